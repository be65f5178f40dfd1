"""Activations in FP8: stored in passing by a norm or an activation function, and brought back."""

from optax_lowmem.kernels.fp8_flow.dispatch import multiply_over_tokens as multiply_over_tokens
from optax_lowmem.kernels.fp8_flow.dispatch import store_gated as store_gated
from optax_lowmem.kernels.fp8_flow.dispatch import store_normed as store_normed
from optax_lowmem.kernels.fp8_flow.dispatch import supported as supported
from optax_lowmem.kernels.fp8_flow.reference import ACTIVATIONS as ACTIVATIONS
from optax_lowmem.kernels.fp8_flow.reference import Grouped as Grouped
from optax_lowmem.kernels.fp8_flow.reference import gated as gated
from optax_lowmem.kernels.fp8_flow.reference import group_absmax as group_absmax
from optax_lowmem.kernels.fp8_flow.reference import inverse_rms as inverse_rms
from optax_lowmem.kernels.fp8_flow.reference import quantized as quantized
from optax_lowmem.kernels.fp8_flow.reference import restore as restore
from optax_lowmem.kernels.fp8_flow.reference import row as row
from optax_lowmem.kernels.fp8_flow.reference import row_sum as row_sum
from optax_lowmem.kernels.fp8_flow.reference import store as store
from optax_lowmem.kernels.fp8_flow.reference import tensor_absmax as tensor_absmax
