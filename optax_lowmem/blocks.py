"""Infer Adam-mini's blocks and a mask of weight decay, from paths, shapes and metadata."""

from optax_lowmem._src.blocks.roles import decay_mask
from optax_lowmem._src.blocks.structure import Description, Row, Structure, describe, infer
from optax_lowmem._src.core.block import Block

__all__ = ["Block", "Description", "Row", "Structure", "decay_mask", "describe", "infer"]
