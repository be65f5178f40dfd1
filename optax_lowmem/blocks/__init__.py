"""Adam-mini's blocks of shared second moments, from the parameters' paths, shapes and metadata."""

from optax_lowmem._core.block import Block as Block
from optax_lowmem.blocks.report import Description as Description
from optax_lowmem.blocks.report import Row as Row
from optax_lowmem.blocks.report import describe as describe
from optax_lowmem.blocks.structure import Structure as Structure
from optax_lowmem.blocks.structure import infer as infer

__all__ = ["Block", "Description", "Row", "Structure", "describe", "infer"]
