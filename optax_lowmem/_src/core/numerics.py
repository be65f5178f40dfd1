"""Bit-level arithmetic that gives the same answer on CPU, GPU and TPU.

XLA removes `astype` round trips on GPU and flushes subnormals in f32 multiplies, so whatever claims
exactness here works on the bits.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
_LARGEST_BF16_BITS = 0x7F7F0000
NAN_BITS = 0x7FC00000  # canonical: CUDA's 0x7fffffff would round to -0.0
MIN_NORMAL_BITS = 0x00800000
_F16_OVERFLOW_BITS = 0x477FF000  # 65520, half way from f16's largest number to the next

Elementwise = Callable[[jax.Array], jax.Array]


def _log2(x: jax.Array) -> jax.Array:
    return lax.log(x) * jnp.float32(math.log2(math.e))


@dataclasses.dataclass(frozen=True)
class Approximations:
    """The arithmetic of a backend's kernels; reciprocal, log2 and exp2 are single instructions.

    These instructions take subnormal operands, and give subnormal results, as 0.

    Attributes:
      reciprocal: 1 / y to 2^-23; None where a kernel divides.
      log2: to 2^-22 in [1/2, 2], elsewhere to a relative 2^-22.
      exp2: to 2^-22.
      gpu: whether every NaN that is computed is 0x7fffffff, and uint32 converts to f32.
    """

    reciprocal: Elementwise | None = jnp.reciprocal
    log2: Elementwise = _log2
    exp2: Elementwise = jnp.exp2
    gpu: bool = True


# of the kernel whose body is traced
_approximations: ContextVar[Approximations | None] = ContextVar("approximations", default=None)


def in_kernel() -> bool:
    """Return whether the body of a kernel is being traced."""
    return _approximations.get() is not None


def in_gpu_kernel() -> bool:
    """Return whether the body of a GPU kernel is being traced."""
    kernel = _approximations.get()
    return kernel is not None and kernel.gpu


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of f32 values as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """The f32 values of uint32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def canonical_nan(bits: jax.Array) -> jax.Array:
    """f32 bits with every NaN made 0x7fc00000."""
    if in_gpu_kernel():  # what it computes is never another NaN than 0x7fffffff
        signed = lax.bitcast_convert_type(bits, jnp.int32)
        return lax.bitcast_convert_type(jnp.minimum(signed, NAN_BITS), jnp.uint32)
    return jnp.where(jnp.isnan(from_bits(bits)), jnp.uint32(NAN_BITS), bits)


def _bounded_by(choose: Callable[..., jax.Array]) -> Callable[[jax.Array, int], jax.Array]:
    """choose(bits, limit) of uint32 bits and a limit that are under 2^31."""

    def bounded(bits: jax.Array, limit: int) -> jax.Array:
        kernel = _approximations.get()
        if kernel is None or kernel.gpu:
            return choose(bits, jnp.uint32(limit))
        # Mosaic has the minimum and maximum of signed integers only
        signed = lax.bitcast_convert_type(bits, jnp.int32)
        return lax.bitcast_convert_type(choose(signed, limit), jnp.uint32)

    return bounded


at_most, at_least = _bounded_by(jnp.minimum), _bounded_by(jnp.maximum)


def magnitude_bits(x: jax.Array, signed: bool = True) -> jax.Array:
    """int32 bits of |x|, in whose order every NaN is over every number."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    if signed or not in_gpu_kernel():  # whose NaN has no sign
        bits = bits & MAGNITUDE_MASK
    return bits


def absmax_bits(
    x: jax.Array, signed: bool = True, axes: int | tuple[int, ...] | None = -1
) -> jax.Array:
    """Bits of max |x| over axes (None: all), in integers: a float maximum may drop NaN."""
    return jnp.max(magnitude_bits(x, signed), axis=axes).astype(jnp.uint32)


def absmax(x: jax.Array, axes: tuple[int, ...], least: int) -> jax.Array:
    """max(|x|, the f32 of the bits `least`) over axes, outside of kernels.

    As where the reduction starts, and with no conversion of what it gives: either would be a launch
    of its own on a GPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_MASK
    return lax.bitcast_convert_type(lax.reduce(bits, jnp.int32(least), lax.max, axes), jnp.float32)


def round_to_byte(x: jax.Array) -> jax.Array:
    """uint8 of f32 values in [0, 255], to nearest, ties to even.

    Adding 2^23 leaves the integer in the low bits; taking 2^23 off in integers is what XLA cannot
    fold away. A conversion of the float would cost its checks for NaN and range.
    """
    code = lax.bitcast_convert_type(x + jnp.float32(2.0**23), jnp.int32) - 0x4B000000
    return low_byte(code, jnp.uint8)


def round_to_signed_byte(magnitude: jax.Array, sign: jax.Array) -> jax.Array:
    """int8 of f32 magnitudes in [0, 127] with the sign of another number, to nearest even.

    As `round_to_byte`, from 1.5 2^23, below which negative integers lie.
    """
    negative = to_bits(sign) & jnp.uint32(~MAGNITUDE_MASK & 0xFFFFFFFF)
    return low_byte(round_to_int(from_bits(to_bits(magnitude) | negative)), jnp.int8)


def round_to_int(x: jax.Array) -> jax.Array:
    """int32 of f32 values within 2^21 of 0, to nearest, ties to even."""
    return lax.bitcast_convert_type(x + jnp.float32(1.5 * 2.0**23), jnp.int32) - 0x4B400000


def uniform(bits: jax.Array) -> jax.Array:
    """f32 in [0, 1) of uint32 bits; in a GPU kernel rounded from all 32, so up to 1."""
    if in_gpu_kernel():
        return bits.astype(jnp.float32) * jnp.float32(2.0**-32)
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def low_byte(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """int8 or uint8 of int32 values in its range.

    XLA on a GPU (jax 0.11.2) converts the bits of a float, less a constant, as if they were the
    float: everything comes out saturated. A clamp in between prevents it; kernels need none.
    """
    if not in_kernel():
        info = jnp.iinfo(dtype)
        bits = jnp.clip(bits, jnp.int32(info.min), jnp.int32(info.max))
    return bits.astype(dtype)


def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y for 0 <= y <= 2^126.

    In a GPU kernel (`kernel_arithmetic`) x times the reciprocal of y, to 2^-22: two instructions of
    the nine that a division takes there, and codes and steps ask for no more.
    """
    kernel = _approximations.get()
    if kernel is None or kernel.reciprocal is None:
        return x / y
    return x * kernel.reciprocal(y)


def log2(x: jax.Array) -> jax.Array:
    """Of f32 values; minus infinity at 0. In a kernel one instruction (`Approximations`)."""
    return (_approximations.get() or _PORTABLE).log2(x)


def exp2(x: jax.Array) -> jax.Array:
    """Of f32 values; 1 at 0, exactly. In a kernel one instruction (`Approximations`)."""
    return (_approximations.get() or _PORTABLE).exp2(x)


_PORTABLE = Approximations()


@contextlib.contextmanager
def kernel_arithmetic(approximations: Approximations = _PORTABLE) -> Iterator[None]:
    """Trace the code inside as the body of a kernel.

    Args:
      approximations: the backend's arithmetic, in as few instructions as it has.
    """
    token = _approximations.set(approximations)
    try:
        yield
    finally:
        _approximations.reset(token)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in f32 for integers in [-126, 127], exactly."""
    return from_bits((exponent.astype(jnp.int32) + 127).astype(jnp.uint32) << 23)


def _round_bits(bits: jax.Array, dropped: int) -> jax.Array:
    """f32 bits (no NaN but the canonical one) rounded to nearest even, the lowest bits zero."""
    rounded = bits + jnp.uint32((1 << (dropped - 1)) - 1) + ((bits >> dropped) & jnp.uint32(1))
    return (rounded >> dropped) << dropped


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 values rounded (nearest even) to those of a 16-bit float, still as f32.

    On the bits: Pallas' Triton lowering has no `reduce_precision`, and an `astype` round trip is
    what XLA drops.
    """
    bits = canonical_nan(to_bits(x))
    if jnp.dtype(dtype) == jnp.bfloat16:
        return from_bits(_round_bits(bits, 16))
    magnitude = bits & jnp.uint32(MAGNITUDE_MASK)
    overflows = (magnitude >= _F16_OVERFLOW_BITS) & (magnitude <= INF_BITS)
    infinity = (bits ^ magnitude) | jnp.uint32(INF_BITS)
    rounded = from_bits(jnp.where(overflows, infinity, _round_bits(bits, 13)))
    # subnormals of f16 are ordinary f32 numbers, 2^-24 apart
    steps = jnp.abs(x) * jnp.float32(2.0**24)
    whole = jnp.floor(steps)
    odd = whole - 2 * jnp.floor(whole * 0.5)
    rest = steps - whole
    up = (rest > 0.5) | ((rest == 0.5) & (odd > 0))
    subnormal = (whole + jnp.where(up, jnp.float32(1), jnp.float32(0))) * jnp.float32(2.0**-24)
    subnormal = from_bits(to_bits(subnormal) | (bits ^ magnitude))
    return jnp.where(jnp.abs(x) < jnp.float32(2.0**-14), subnormal, rounded)


def narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """16-bit floats of f32 values rounded to nearest even, in a way XLA cannot undo."""
    rounded = round_to(x, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:  # the upper half is the number: no second rounding
        upper = (to_bits(rounded) >> 16).astype(jnp.uint16)
        return lax.bitcast_convert_type(upper, jnp.bfloat16)
    return rounded.astype(dtype)


def narrow_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """bf16 of f32 values, one of the two next to each by random bits (uint32), whose mean it is.

    What is bf16 already stays as it is; so does NaN, and what may become infinite is rounded down.
    """
    words = canonical_nan(to_bits(x))
    finite = (words & jnp.uint32(MAGNITUDE_MASK)) < jnp.uint32(_LARGEST_BF16_BITS)
    lifted = words + jnp.where(finite, bits >> 16, jnp.uint32(0))
    return lax.bitcast_convert_type((lifted >> 16).astype(jnp.uint16), jnp.bfloat16)


def widen(x: jax.Array) -> jax.Array:
    """f32 from bf16, f16 or f32 (exact)."""
    if x.dtype == jnp.bfloat16:  # by the bits: XLA may not then keep an unrounded f32 in its place
        return from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    return x.astype(jnp.float32)


def widen_float(x: jax.Array) -> jax.Array:
    """f32 of floats of 8 and 16 bits; what is of another kind, or wider, as it is."""
    return widen(x) if is_narrow(x.dtype) else x


def is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether a dtype is a float of 8 or 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
