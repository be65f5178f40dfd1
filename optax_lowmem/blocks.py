"""Infer Adam-mini's blocks and a mask of weight decay, from paths, shapes and metadata."""

from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.roles.roles import decay_mask
from optax_lowmem._src.optim.blocks.structure import Description, Row, Structure, describe, infer

__all__ = ["Block", "Description", "Row", "Structure", "decay_mask", "describe", "infer"]
