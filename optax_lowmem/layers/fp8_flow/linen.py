"""The FP8 precision flow for Flax Linen."""

from optax_lowmem._src.layers.fp8_flow.linen import (
    Fp8Dense,
    Fp8GatedProduct,
    Fp8LayerNorm,
    Fp8RMSNorm,
)

__all__ = ["Fp8Dense", "Fp8GatedProduct", "Fp8LayerNorm", "Fp8RMSNorm"]
