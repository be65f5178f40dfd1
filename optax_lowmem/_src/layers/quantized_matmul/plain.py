"""Matrix products of 8-bit operands in plain jnp: quantize, multiply, scale back."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Format:
    """Format that stores numbers between -largest and largest in a byte."""

    name: str  # for example `int8`
    dtype: jnp.dtype  # dtype of the codes
    largest: float  # the value that the largest magnitude of a row or tensor is scaled to

    @property
    def integer(self) -> bool:
        """Return whether codes are integers, whose products are summed exactly in int32."""
        return jnp.issubdtype(self.dtype, jnp.integer)

    def at_unit(self) -> "Format":
        """Return the format with the largest magnitude scaled to 1, as SwitchBack simulates it."""
        return dataclasses.replace(self, name=f"{self.name}-unit", largest=1.0)


INT8 = Format("int8", jnp.dtype(jnp.int8), 127.0)
E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0)
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0)
FORMATS = {format.name: format for format in (INT8, E4M3, E5M2)}


# ---- quantized operands and their products -------------------------------------------------------

LONGEST_SUM = (2**31 - 1) // 127**2  # number of int8 products in an int32 sum
# 2^-100: lower bound of maxima, so that their reciprocals do not overflow f32
_LEAST_BITS = (127 - 100) << 23


class Quantized(NamedTuple):
    """An array as codes * scales: f32 scales have size 1 on the axes that share one."""

    codes: jax.Array
    scales: jax.Array

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """Return codes * scales, computed in f32."""
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


def quantize_plain(x: jax.Array, axes: int | tuple[int, ...] | None, to: Format) -> Quantized:
    r"""Return codes round(x * largest / absmax) and scales absmax / largest (SwitchBack, eq. 1).

    Args:
      x: an array of any floating dtype.
      axes: axes that share a maximum: the summed axis (row-wise), or None for all (tensor-wise).
      to: the format.

    Returns:
      Codes and scales; |x - codes * scales| is at most half a unit of the codes. Rounding is to
      nearest, ties to even. Zeros have codes of 0. If a maximum is not finite, neither are its
      scale and the product.
    """
    absmax = absmax_of(x, axes)
    return Quantized(codes_of(x, absmax, to), scales_of(absmax, to))


def absmax_of(x: jax.Array, axes: int | tuple[int, ...] | None) -> jax.Array:
    """Return f32 maxima of |x|, at least 2^-100, with size 1 on the axes that share one."""
    listed = range(x.ndim) if axes is None else (axes,) if isinstance(axes, int) else axes
    over = tuple(axis % x.ndim for axis in listed)
    if x.size == 0:
        shape = [1 if axis in over else size for axis, size in enumerate(x.shape)]
        return jnp.full(shape, numerics.from_bits(jnp.uint32(_LEAST_BITS)))
    if len(over) > 1 or (axes is None and over):
        absmax = numerics.absmax(numerics.widen(x), over, _LEAST_BITS)
    else:  # as in the kernels
        bits = numerics.absmax_bits(numerics.widen(x), axes=over)
        absmax = numerics.from_bits(jnp.maximum(bits, jnp.uint32(_LEAST_BITS)))
    return lax.expand_dims(absmax, over)


def as_stored(stored: T) -> T:
    """Return the same codes and scales, behind a barrier: XLA on a GPU may skip rounding to FP8."""
    return lax.optimization_barrier(stored)


def codes_of(x: jax.Array, absmax: jax.Array, to: Format, clip: bool = False) -> jax.Array:
    """Return codes of values with maximum `absmax`, which broadcasts; `clip` if x may exceed it."""
    x = numerics.widen(x)
    if clip:
        x = jnp.clip(x, -absmax, absmax)
    scaled = x * (jnp.float32(to.largest) / _limited_absmax(absmax, to))
    if to.integer:
        return numerics.low_byte(numerics.round_to_int(scaled), to.dtype)
    return scaled.astype(to.dtype)


def scales_of(absmax: jax.Array, to: Format) -> jax.Array:
    """Return the scales: the values that a code of 1 represents."""
    return _limited_absmax(absmax, to) * jnp.float32(1 / to.largest)


def _limited_absmax(absmax: jax.Array, to: Format) -> jax.Array:
    """Return maxima of at most 2^126 `largest`, so that `largest / maximum` is not subnormal.

    The limit only matters for formats with `largest` < 4, as of `at_unit`: their codes of values
    near 2^128, which f32 cannot exceed, reach 4 instead of 1.
    """
    most = to.largest * 2.0**126
    return absmax if most >= 2.0**128 else jnp.minimum(absmax, jnp.float32(most))


def multiply_plain(
    a: Quantized,
    b: Quantized,
    sums: int,
    dtype: jnp.dtype,
    transposed: bool = False,
    sharding: jax.sharding.NamedSharding | None = None,
    over_devices: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Multiply codes, and scale the sums back.

    int8 products are summed exactly in int32, float8 products in f32. The sums are multiplied by
    the scales in f32, those of `b` first, and rounded to `dtype`.

    Args:
      a: the left operand.
      b: the right operand.
      sums: number of axes to sum over, on which scales have size 1.
      dtype: dtype of the result.
      transposed: whether to sum over the first axes instead of the last ones.
      sharding: sharding of the result, on a mesh with Explicit axes.
      over_devices: adds the sums of all devices, if each has a part of the axes to sum over.

    Returns:
      The product, [*other axes of a, *other axes of b].

    Raises:
      ValueError: if a sum has more int8 products than int32 can hold, 133,144.
    """
    axes = [
        tuple(range(sums)) if transposed else tuple(range(x.codes.ndim - sums, x.codes.ndim))
        for x in (a, b)
    ]
    integer = jnp.issubdtype(a.codes.dtype, jnp.integer)
    length = math.prod(a.codes.shape[axis] for axis in axes[0])
    if integer and length > LONGEST_SUM:
        raise ValueError(
            f"a sum of {length:,} int8 products may overflow int32, which holds {LONGEST_SUM:,}: "
            "use float8, or keep this product in 16 bits."
        )
    dims = ((axes[0], axes[1]), ((), ()))
    kind = jnp.int32 if integer else jnp.float32
    result = lax.dot_general(
        a.codes, b.codes, dims, preferred_element_type=kind, out_sharding=sharding
    )
    result = result if over_devices is None else over_devices(result)
    of_a, of_b = (jnp.squeeze(x.scales, axis) for x, axis in zip((a, b), axes, strict=True))
    rank_a, rank_b = of_a.ndim, of_b.ndim
    of_a = jnp.expand_dims(of_a, tuple(range(rank_a, rank_a + rank_b)))
    of_b = jnp.expand_dims(of_b, tuple(range(rank_a)))
    # the weight's scale first: sums times an activation's can overflow f32 when the result does not
    return (result.astype(jnp.float32) * of_b * of_a).astype(dtype)
