"""Select the matrices of a transformer that get noise: out and down, query, key, value, or all."""

from optax_lowmem._src.arrays.roles.parts import PARTS, Parts, chooser

__all__ = ["PARTS", "Parts", "chooser"]
