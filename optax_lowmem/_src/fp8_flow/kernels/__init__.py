"""Activations in FP8: stored in passing by a norm or an activation function, and brought back."""

from optax_lowmem._src.fp8_flow.kernels.dispatch import multiply_over_tokens as multiply_over_tokens
from optax_lowmem._src.fp8_flow.kernels.dispatch import store_gated as store_gated
from optax_lowmem._src.fp8_flow.kernels.dispatch import store_normed as store_normed
from optax_lowmem._src.fp8_flow.kernels.dispatch import supported as supported
from optax_lowmem._src.fp8_flow.kernels.reference import ACTIVATIONS as ACTIVATIONS
from optax_lowmem._src.fp8_flow.kernels.reference import Grouped as Grouped
from optax_lowmem._src.fp8_flow.kernels.reference import gated as gated
from optax_lowmem._src.fp8_flow.kernels.reference import group_absmax as group_absmax
from optax_lowmem._src.fp8_flow.kernels.reference import inverse_rms as inverse_rms
from optax_lowmem._src.fp8_flow.kernels.reference import quantized as quantized
from optax_lowmem._src.fp8_flow.kernels.reference import restore as restore
from optax_lowmem._src.fp8_flow.kernels.reference import row as row
from optax_lowmem._src.fp8_flow.kernels.reference import row_sum as row_sum
from optax_lowmem._src.fp8_flow.kernels.reference import store as store
from optax_lowmem._src.fp8_flow.kernels.reference import tensor_absmax as tensor_absmax
