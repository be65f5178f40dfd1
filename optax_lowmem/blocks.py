"""Infer Adam-mini's blocks, which share a second moment, from paths, shapes and metadata."""

from optax_lowmem._src.blocks.structure import Description, Row, Structure, describe, infer
from optax_lowmem._src.core.block import Block

__all__ = ["Block", "Description", "Row", "Structure", "describe", "infer"]
