"""Formats of the scale of a group: f32, 16 bits with an 8-bit exponent, or the paper's FP16."""

import dataclasses

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.shown import ShowsChanges

_MAX_BITS = (126 + 127) << 23  # 2^126: its reciprocal is still normal


def guard(bits: jax.Array) -> jax.Array:
    """A scale's bits: subnormal -> 0, over 2^126 -> 2^126 (codes saturate), not finite -> NaN."""
    clamped = jnp.minimum(bits, jnp.uint32(_MAX_BITS))
    kept = jnp.where(bits < numerics.MIN_NORMAL_BITS, jnp.uint32(0), clamped)
    return jnp.where(bits >= numerics.INF_BITS, jnp.uint32(numerics.NAN_BITS), kept)


@dataclasses.dataclass(frozen=True)
class Float32Scale(ShowsChanges):
    """Four bytes a group: follows a second moment that moves by 5e-4 a step."""

    name: str = "f32"
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.float32))
    relative_error: float = 0.0
    absolute_error: float = 0.0

    def encode(self, absmax: jax.Array) -> jax.Array:
        """Stored scales from the bits of the group maxima."""
        return numerics.from_bits(guard(absmax))

    def decode(self, stored: jax.Array) -> jax.Array:
        """f32 scales."""
        return stored


@dataclasses.dataclass(frozen=True)
class E8M8Scale(ShowsChanges):
    """Two bytes a group: an unsigned float of 8 exponent and 8 mantissa bits, f32's range.

    Rounded up: a scale under the group maximum would clip the largest value a little at every step,
    and a slow average would end up to 16 % short of it.
    """

    name: str = "e8m8"
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.uint16))
    relative_error: float = 2.0**-8
    absolute_error: float = 0.0

    def encode(self, absmax: jax.Array) -> jax.Array:
        """Stored scales from the bits of the group maxima, rounded up to 8 mantissa bits."""
        return ((guard(absmax) + 0x7FFF) >> 15).astype(jnp.uint16)

    def decode(self, stored: jax.Array) -> jax.Array:
        """f32 scales."""
        return numerics.from_bits(stored.astype(jnp.uint32) << 15)


@dataclasses.dataclass(frozen=True)
class Float16Scale(ShowsChanges):
    """Two bytes a group, as in the paper: 0 under 3e-8 and inf over 65504, unguarded."""

    name: str = "f16"
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.float16))
    relative_error: float = 2.0**-11
    absolute_error: float = 2.0**-25  # half the spacing of its subnormals

    def encode(self, absmax: jax.Array) -> jax.Array:
        """Stored scales from the bits of the group maxima."""
        return numerics.from_bits(absmax).astype(jnp.float16)

    def decode(self, stored: jax.Array) -> jax.Array:
        """f32 scales."""
        return stored.astype(jnp.float32)


ScaleFormat = Float32Scale | E8M8Scale | Float16Scale
