"""COAT's FP8 precision flow: residuals for the backward pass are stored in FP8 (section 5)."""

from optax_lowmem._src.fp8_flow.gate import gated_product as gated_product
from optax_lowmem._src.fp8_flow.kernels import Grouped as Grouped
from optax_lowmem._src.fp8_flow.kernels import group_absmax as group_absmax
from optax_lowmem._src.fp8_flow.kernels import quantized as quantized
from optax_lowmem._src.fp8_flow.kernels import restore as restore
from optax_lowmem._src.fp8_flow.kernels import store as store
from optax_lowmem._src.fp8_flow.kernels import tensor_absmax as tensor_absmax
from optax_lowmem._src.fp8_flow.linear import Projection as Projection
from optax_lowmem._src.fp8_flow.linear import QuantizedKernel as QuantizedKernel
from optax_lowmem._src.fp8_flow.linear import linear as linear
from optax_lowmem._src.fp8_flow.linear import quantize_weight as quantize_weight
from optax_lowmem._src.fp8_flow.linear import weight_absmax as weight_absmax
from optax_lowmem._src.fp8_flow.llama import after_attention as after_attention
from optax_lowmem._src.fp8_flow.llama import before_attention as before_attention
from optax_lowmem._src.fp8_flow.llama import mlp_residual as mlp_residual
from optax_lowmem._src.fp8_flow.llama import quantized_weights as quantized_weights
from optax_lowmem._src.fp8_flow.llama import weight_maxima as weight_maxima
from optax_lowmem._src.fp8_flow.norm import layer_norm as layer_norm
from optax_lowmem._src.fp8_flow.norm import rms_norm as rms_norm
from optax_lowmem._src.fp8_flow.storage import Coded as Coded
from optax_lowmem._src.fp8_flow.storage import Recipe as Recipe
from optax_lowmem._src.fp8_flow.storage import code as code
from optax_lowmem.layers.fp8_flow import linen as linen

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
