"""Flax layers that compute in 8 bits: for Linen, for NNX, and for models that exist already."""

from optax_lowmem.layers.convert import convert as convert
from optax_lowmem.layers.dot_general import switchback_dot_general as switchback_dot_general
from optax_lowmem.layers.einsum import switchback_einsum as switchback_einsum
from optax_lowmem.layers.linen import SwitchBackDense as SwitchBackDense
from optax_lowmem.layers.nnx import LayerScale as LayerScale
from optax_lowmem.layers.nnx import SwitchBackLinear as SwitchBackLinear

__all__ = [
    "LayerScale",
    "SwitchBackDense",
    "SwitchBackLinear",
    "convert",
    "switchback_dot_general",
    "switchback_einsum",
]
