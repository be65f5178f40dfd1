"""Infer Adam-mini's blocks, which share a second moment, from paths, shapes and metadata."""

from optax_lowmem._src.blocks.structure import Description as Description
from optax_lowmem._src.blocks.structure import Row as Row
from optax_lowmem._src.blocks.structure import Structure as Structure
from optax_lowmem._src.blocks.structure import describe as describe
from optax_lowmem._src.blocks.structure import infer as infer
from optax_lowmem._src.core.block import Block as Block

__all__ = ["Block", "Description", "Row", "Structure", "describe", "infer"]
