"""Choice between 8-bit and standard products of a layer, estimated from their sizes.

Quantizing reads each operand once more, of T (K + N) and K N numbers, where the products save a
share of T K N operations: narrow layers and few tokens do not pay for it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.kernels import platform
from optax_lowmem._src.quantized_matmul import Format, Quantized, product_reason
from optax_lowmem._src.switchback.products import ProductSettings

IMPLEMENTATIONS = ("quantized", "auto")

# Of an H100, fitted to layers of 8192 to 32768 tokens and 1024 to 16384 wide: estimates are within
# 7 % of what was measured, and choose what was faster but where that is by less than 3 %. XLA's own
# 8-bit products are as fast, but write and read a result in four bytes before it is scaled.
_STANDARD, _EIGHT_BITS = 7.1e14, 1.58e15  # operations per second
_TAIL = 2.5e-6  # seconds per standard product, of starting and of its last blocks
_UNSCALED = 2e-12  # seconds per result
_BANDWIDTH = 1.75e12  # bytes per second of the kernels that quantize, and what products wait for
_LAUNCHES = 5 * 2e-6  # seconds: of these kernels

# by XLA's estimates for v5e and v6e (docs/how_to/tpu.md): quantizing costs more than it saves
_ON_A_TPU = (
    "standard: on a TPU, 8-bit products are estimated slower than those in 16 bits, but for layers "
    "4096 wide and more on a v5e"
)


class Choice(NamedTuple):
    """Choice of `implementation="auto"`: 8-bit or standard products.

    Attributes:
      quantized: whether the layer runs in 8 bits.
      reason: reason for the choice.
    """

    quantized: bool
    reason: str


def estimates(
    settings: ProductSettings, tokens: int, inputs: int, outputs: int, dtype: DTypeLike
) -> tuple[float, float]:
    """Seconds of forward and backward on a Hopper GPU: in 8 bits, and in the standard layer."""
    wide = jnp.dtype(dtype).itemsize
    product = 2 * tokens * inputs * outputs
    standard = product / (_STANDARD * 2 / wide) + _TAIL
    numbers = tokens * (inputs + outputs)
    # activations: read, codes written; weights: read for their maximum, then once for each product
    moved = (wide + 1) * numbers + (wide + 2 * (wide + 1)) * inputs * outputs
    if settings.variant.saves_codes:  # and read for the gradient of the weight
        moved += (wide + 1) * tokens * inputs
    products = 2 * product / _EIGHT_BITS + standard
    quantized = products + moved / _BANDWIDTH + _LAUNCHES
    for left, columns, length in (
        (settings.forward, outputs, inputs),
        (settings.gradient, inputs, outputs),
    ):
        a, b = _operand(tokens, length, left), _operand(columns, length, settings.forward)
        if product_reason(a, b, 1, dtype) is not None:
            quantized += _UNSCALED * tokens * columns
    return quantized, 3 * standard


def _operand(rows: int, length: int, to: Format) -> Quantized:
    """The shapes of a quantized matrix."""
    codes: Any = jax.ShapeDtypeStruct((rows, length), to.dtype)
    scales: Any = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    return Quantized(codes, scales)


def choose(
    settings: ProductSettings, tokens: int, inputs: int, outputs: int, dtype: DTypeLike
) -> Choice:
    """Choose the faster products by estimate, or 8-bit products where there is no estimate.

    Of TPUs nothing was measured; the compiler's estimates are for standard products.
    """
    if platform.may_be_tpu():
        return Choice(False, _ON_A_TPU)
    elsewhere = platform.no_device_reason() or platform.not_hopper_reason()
    if elsewhere is not None:
        return Choice(True, f"in 8 bits: the estimates are of Hopper GPUs ({elsewhere})")
    if settings.variant.weight_gradient is not None:
        return Choice(True, "in 8 bits: no estimate is of three quantized products")
    if math.prod((tokens, inputs, outputs)) == 0:
        return Choice(True, "in 8 bits: nothing is computed")
    quantized, standard = estimates(settings, tokens, inputs, outputs, dtype)
    times = f"{quantized * 1e3:.3g} ms estimated in 8 bits, {standard * 1e3:.3g} in {dtype}"
    if quantized < standard:
        return Choice(True, f"in 8 bits: {times}")
    return Choice(False, f"standard: {times}")
