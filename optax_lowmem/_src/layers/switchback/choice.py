"""Choose 8-bit or standard products for a layer, by estimating their time from the sizes.

Quantization costs extra reads of the operands, T (K + N) + K N elements, and saves a fraction of
the products' T K N operations, so it does not pay off for narrow layers or few tokens.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.kernels import platform
from optax_lowmem._src.layers.quantized_matmul import product_reason
from optax_lowmem._src.layers.switchback.products import ProductSettings

IMPLEMENTATIONS = ("quantized", "auto")

# For an H100, fitted to layers of 8192 to 32768 tokens and widths of 1024 to 16384: estimates are
# within 7 % of the measured times, and choose the faster products unless the times differ by less
# than 3 %. XLA's 8-bit products are as fast, but write and read a 32-bit result before scaling it.
_STANDARD, _EIGHT_BITS = 7.1e14, 1.58e15  # operations per second
_TAIL = 2.5e-6  # seconds per standard product, for its launch and its last wave of blocks
_UNSCALED = 2e-12  # seconds per element of XLA's unscaled result
_BANDWIDTH = 1.75e12  # bytes per second of the kernels that quantize, with the products' waits
_LAUNCHES = 5 * 2e-6  # seconds to launch these kernels

# by XLA's estimates for v5e and v6e, quantizing costs more than it saves
_ON_A_TPU = (
    "standard: on a TPU, 8-bit products are estimated to be slower than 16-bit ones, except for "
    "layers at least 4096 wide on a v5e"
)


class Choice(NamedTuple):
    """Decision of `implementation="auto"`: 8-bit or standard products, and why, for display."""

    quantized: bool
    reason: str


def estimates(
    settings: ProductSettings, tokens: int, inputs: int, outputs: int, dtype: DTypeLike
) -> tuple[float, float]:
    """Estimate seconds of forward and backward on a Hopper GPU: (8-bit, standard) products."""
    wide = jnp.dtype(dtype).itemsize
    product = 2 * tokens * inputs * outputs
    standard = product / (_STANDARD * 2 / wide) + _TAIL
    numbers = tokens * (inputs + outputs)
    # activations: read once, codes written; weights: read for the maximum and for each product
    moved = (wide + 1) * numbers + (wide + 2 * (wide + 1)) * inputs * outputs
    if settings.variant.saves_codes:  # codes of X are dequantized for the gradient of the weight
        moved += (wide + 1) * tokens * inputs
    products = 2 * product / _EIGHT_BITS + standard
    quantized = products + moved / _BANDWIDTH + _LAUNCHES
    for left, columns, length in (
        (settings.forward, outputs, inputs),
        (settings.gradient, inputs, outputs),
    ):
        a = jax.ShapeDtypeStruct((tokens, length), left.dtype)
        b = jax.ShapeDtypeStruct((columns, length), settings.forward.dtype)
        if product_reason(a, b, 1, dtype) is not None:
            quantized += _UNSCALED * tokens * columns
    return quantized, 3 * standard


def choose(
    settings: ProductSettings, tokens: int, inputs: int, outputs: int, dtype: DTypeLike
) -> Choice:
    """Choose the products estimated to be faster, or 8-bit products without an estimate.

    On TPUs, where nothing was measured, choose standard products, by the compiler's estimates.
    """
    if platform.may_be_tpu():
        return Choice(False, _ON_A_TPU)
    elsewhere = platform.no_gpu_reason() or platform.not_hopper_reason()
    if elsewhere is not None:
        return Choice(True, f"in 8 bits: the estimates are for Hopper GPUs ({elsewhere})")
    if settings.variant.weight_gradient is not None:
        return Choice(True, "in 8 bits: there is no estimate for three quantized products")
    if math.prod((tokens, inputs, outputs)) == 0:
        return Choice(True, "in 8 bits: the product is empty")
    quantized, standard = estimates(settings, tokens, inputs, outputs, dtype)
    times = f"{quantized * 1e3:.3g} ms estimated in 8 bits, {standard * 1e3:.3g} in {dtype}"
    if quantized < standard:
        return Choice(True, f"in 8 bits: {times}")
    return Choice(False, f"standard: {times}")
