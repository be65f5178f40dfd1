"""Bit-level arithmetic that gives the same answer on CPU, GPU and TPU.

XLA removes `astype` round trips on GPU and flushes subnormals in f32 multiplies, so whatever claims
exactness here works on the bits.
"""

import jax
import jax.numpy as jnp
from jax import lax

MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000  # canonical: CUDA's 0x7fffffff would round to -0.0
MIN_NORMAL_BITS = 0x00800000


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of f32 values as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """The f32 values of uint32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def canonical_nan(bits: jax.Array) -> jax.Array:
    """f32 bits with every NaN made 0x7fc00000."""
    is_nan = (bits & MAGNITUDE_MASK) > INF_BITS
    return jnp.where(is_nan, jnp.uint32(NAN_BITS), bits)


def absmax_bits(x: jax.Array) -> jax.Array:
    """Bits of max |x| over the last axis, in integers: a float maximum may drop NaN."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_MASK
    return lax.reduce(magnitude, jnp.int32(0), lax.max, (x.ndim - 1,)).astype(jnp.uint32)


def round_to_byte(x: jax.Array) -> jax.Array:
    """int32 of f32 values in [0, 255], to nearest, ties to even.

    Adding 2^23 leaves the integer in the low bits; taking 2^23 off in integers is what XLA cannot
    fold away. A conversion of the float would cost its checks for NaN and range.
    """
    return lax.bitcast_convert_type(x + jnp.float32(2.0**23), jnp.int32) - 0x4B000000


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in f32 for integers in [-126, 127], exactly."""
    return from_bits((exponent.astype(jnp.int32) + 127).astype(jnp.uint32) << 23)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 values rounded (nearest even) to those of a 16-bit float, still as f32."""
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if jnp.dtype(dtype) != jnp.float16:
        return rounded
    # reduce_precision makes subnormals 0; those of f16 are ordinary f32 numbers, 2^-24 apart
    steps = jnp.abs(x) * jnp.float32(2.0**24)
    whole = jnp.floor(steps)
    odd = whole - 2 * jnp.floor(whole * 0.5)
    rest = steps - whole
    up = (rest > 0.5) | ((rest == 0.5) & (odd > 0))
    subnormal = (whole + jnp.where(up, jnp.float32(1), jnp.float32(0))) * jnp.float32(2.0**-24)
    subnormal = from_bits(to_bits(subnormal) | (to_bits(x) & ~jnp.uint32(MAGNITUDE_MASK)))
    return jnp.where(jnp.abs(x) < jnp.float32(2.0**-14), subnormal, rounded)


def narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """16-bit floats of f32 values rounded to nearest even, in a way XLA cannot undo."""
    rounded = round_to(x, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:  # the upper half is the number: no second rounding
        bits = canonical_nan(to_bits(rounded)) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return rounded.astype(dtype)


def widen(x: jax.Array) -> jax.Array:
    """f32 from bf16, f16 or f32 (exact)."""
    if x.dtype == jnp.bfloat16:  # by the bits: XLA may not then keep an unrounded f32 in its place
        return from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    return x.astype(jnp.float32)
