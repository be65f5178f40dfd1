"""The FP8 precision flow for Flax Linen."""

from optax_lowmem._src.fp8_flow.linen import Fp8Dense as Fp8Dense
from optax_lowmem._src.fp8_flow.linen import Fp8GatedProduct as Fp8GatedProduct
from optax_lowmem._src.fp8_flow.linen import Fp8LayerNorm as Fp8LayerNorm
from optax_lowmem._src.fp8_flow.linen import Fp8RMSNorm as Fp8RMSNorm

__all__ = ["Fp8Dense", "Fp8GatedProduct", "Fp8LayerNorm", "Fp8RMSNorm"]
