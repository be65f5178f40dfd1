"""Bit-level arithmetic that gives the same answer on CPU, GPU and TPU.

XLA removes `astype` round trips on GPU and flushes subnormals in f32 multiplies, so whatever claims
exactness here works on the bits.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000  # canonical: CUDA's 0x7fffffff would round to -0.0
MIN_NORMAL_BITS = 0x00800000
_F16_OVERFLOW_BITS = 0x477FF000  # 65520, half way from f16's largest number to the next

_approximate: ContextVar[bool] = ContextVar("approximate", default=False)


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of f32 values as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """The f32 values of uint32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def canonical_nan(bits: jax.Array) -> jax.Array:
    """f32 bits with every NaN made 0x7fc00000."""
    return jnp.where(jnp.isnan(from_bits(bits)), jnp.uint32(NAN_BITS), bits)


def absmax_bits(x: jax.Array) -> jax.Array:
    """Bits of max |x| over the last axis, in integers: a float maximum may drop NaN."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_MASK
    return jnp.max(magnitude, axis=-1).astype(jnp.uint32)


def round_to_byte(x: jax.Array) -> jax.Array:
    """int32 of f32 values in [0, 255], to nearest, ties to even.

    Adding 2^23 leaves the integer in the low bits; taking 2^23 off in integers is what XLA cannot
    fold away. A conversion of the float would cost its checks for NaN and range.
    """
    return lax.bitcast_convert_type(x + jnp.float32(2.0**23), jnp.int32) - 0x4B000000


def round_to_signed_byte(magnitude: jax.Array, sign: jax.Array) -> jax.Array:
    """int8 of f32 magnitudes in [0, 127] with the sign of another number, to nearest even.

    As `round_to_byte`, from 1.5 2^23, below which negative integers lie: the lowest byte is the
    answer in two's complement.
    """
    negative = to_bits(sign) & jnp.uint32(~MAGNITUDE_MASK & 0xFFFFFFFF)
    signed = from_bits(to_bits(magnitude) | negative)
    return lax.bitcast_convert_type(signed + jnp.float32(1.5 * 2.0**23), jnp.int32).astype(jnp.int8)


def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y for y >= 0.

    In a kernel (`approximate_division`) x rsqrt(y) rsqrt(y), to 2^-21: two instructions of the nine
    that a division takes there, and codes and steps ask for no more.
    """
    if not _approximate.get():
        return x / y
    root = lax.rsqrt(y)
    return x * root * root


@contextlib.contextmanager
def approximate_division() -> Iterator[None]:
    """What is traced inside divides as a GPU kernel does."""
    token = _approximate.set(True)
    try:
        yield
    finally:
        _approximate.reset(token)


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


def widen(x: jax.Array) -> jax.Array:
    """f32 from bf16, f16 or f32 (exact)."""
    if x.dtype == jnp.bfloat16:  # by the bits: XLA may not then keep an unrounded f32 in its place
        return from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    return x.astype(jnp.float32)
