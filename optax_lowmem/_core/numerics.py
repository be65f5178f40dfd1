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
SIXTEEN_BIT_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


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
    """Bits of max |x| over the last axis (kept), in integers: a float maximum may drop NaN."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_MASK
    return jnp.max(magnitude, axis=-1, keepdims=True, initial=0).astype(jnp.uint32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in f32 for integers in [-126, 127], exactly."""
    return from_bits((exponent.astype(jnp.int32) + 127).astype(jnp.uint32) << 23)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 values rounded (nearest even) to those of a 16-bit float, still as f32."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def widen(x: jax.Array) -> jax.Array:
    """f32 from bf16, f16 or f32 (exact)."""
    if x.dtype == jnp.bfloat16:  # by the bits: XLA may not then keep an unrounded f32 in its place
        return from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    return x.astype(jnp.float32)
