"""Layers with 8-bit products or noise, for Flax Linen and NNX; `convert` for existing models."""

from optax_lowmem._src.layers.fp8_flow.linen import Fp8Dense
from optax_lowmem._src.layers.fp8_flow.llama import Fp8LlamaBlock
from optax_lowmem._src.layers.fp8_flow.nnx import (
    Fp8GatedProduct,
    Fp8LayerNorm,
    Fp8Linear,
    Fp8RMSNorm,
)
from optax_lowmem._src.layers.losses.cross_entropy import linear_cross_entropy
from optax_lowmem._src.layers.noise.linen import GaussWSDense
from optax_lowmem._src.layers.noise.nnx import GaussWSLinear, renew_noise
from optax_lowmem._src.layers.switchback.convert import convert
from optax_lowmem._src.layers.switchback.dot_general import switchback_dot_general
from optax_lowmem._src.layers.switchback.linen import SwitchBackDense
from optax_lowmem._src.layers.switchback.nnx import LayerScale, SwitchBackLinear
from optax_lowmem.layers import fp8_flow, nf4
from optax_lowmem.layers import linen as linen

__all__ = [
    "Fp8Dense",
    "Fp8GatedProduct",
    "Fp8LayerNorm",
    "Fp8Linear",
    "Fp8LlamaBlock",
    "Fp8RMSNorm",
    "GaussWSDense",
    "GaussWSLinear",
    "LayerScale",
    "SwitchBackDense",
    "SwitchBackLinear",
    "convert",
    "fp8_flow",
    "linear_cross_entropy",
    "nf4",
    "renew_noise",
    "switchback_dot_general",
]
