"""COAT's FP8 precision flow: residuals for the backward pass are stored in FP8 (section 5)."""

from optax_lowmem._src.layers.fp8_flow.gate import gated_product
from optax_lowmem._src.layers.fp8_flow.kernels import (
    Grouped,
    group_absmax,
    quantized,
    restore,
    store,
    tensor_absmax,
)
from optax_lowmem._src.layers.fp8_flow.linear import (
    Projection,
    QuantizedKernel,
    linear,
    quantize_weight,
    weight_absmax,
)
from optax_lowmem._src.layers.fp8_flow.llama import (
    after_attention,
    before_attention,
    mlp_residual,
    quantized_weights,
    weight_maxima,
)
from optax_lowmem._src.layers.fp8_flow.norm import layer_norm, rms_norm
from optax_lowmem._src.layers.fp8_flow.storage import Coded, Recipe, code
from optax_lowmem.layers.fp8_flow import linen

__all__ = [
    "Coded",
    "Grouped",
    "Projection",
    "QuantizedKernel",
    "Recipe",
    "after_attention",
    "before_attention",
    "code",
    "gated_product",
    "group_absmax",
    "layer_norm",
    "linear",
    "linen",
    "mlp_residual",
    "quantize_weight",
    "quantized",
    "quantized_weights",
    "restore",
    "rms_norm",
    "store",
    "tensor_absmax",
    "weight_absmax",
    "weight_maxima",
]
