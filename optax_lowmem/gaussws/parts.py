"""Select the matrices of a transformer that get noise: out and down, query, key, value, or all."""

from optax_lowmem._src.blocks.parts import PARTS as PARTS
from optax_lowmem._src.blocks.parts import Parts as Parts
from optax_lowmem._src.blocks.parts import chooser as chooser

__all__ = ["PARTS", "Parts", "chooser"]
