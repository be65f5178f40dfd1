"""Random bits from a counter: a hash of (seed, step, leaf path, slot, coordinates).

The result does not depend on sharding, device, masking or recompilation, and nothing is stored.
"""

import zlib

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._core import numerics

_GOLDEN = 0x9E3779B9
_LANE_SALT = 0x5BD1E995


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with full avalanche (lowbias32, C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def leaf_key(seed: jax.Array, step: jax.Array, path: str, slot: str) -> jax.Array:
    """One uint32 key for a slot of a leaf at a step."""
    name = jnp.uint32(zlib.crc32(f"{slot}:{path}".encode()))
    return mix(mix(mix(seed.astype(jnp.uint32) ^ name) + step.astype(jnp.uint32)) ^ name)


def uniforms(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform f32 in [0, 1) for a group view [..., groups, lanes].

    bits = R[row, group] + C[lane] mod 2^32 with R and C strongly mixed: any two elements are
    independent over keys, so sums of rounding errors keep the variance of independent ones, and the
    cost is one addition an element.
    """
    group = key
    for axis, size in enumerate(shape[:-1]):
        dims = [1] * len(shape)
        dims[axis] = size
        index = lax.broadcasted_iota(jnp.uint32, tuple(dims), axis)
        group = mix(group + index * jnp.uint32(_GOLDEN))
    lanes = lax.broadcasted_iota(jnp.uint32, (1,) * (len(shape) - 1) + shape[-1:], len(shape) - 1)
    lane = mix(mix(key ^ jnp.uint32(_LANE_SALT)) + lanes * jnp.uint32(_GOLDEN))
    bits = group + lane
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def round_bits(x: jax.Array, key: jax.Array, dropped: int) -> jax.Array:
    """f32 with its lowest bits zero, rounded up or down with the probabilities that keep the mean.

    Args:
      x: f32 values of any shape; NaN and infinities stay what they are.
      key: a uint32 key, as of `leaf_key`.
      dropped: how many bits, at most 23.
    """
    shape = x.shape if x.ndim else (1,)
    noise = uniforms(key, (*shape[:-1], 1, shape[-1])).reshape(x.shape)
    bits = numerics.to_bits(x)
    lifted = bits + (noise * jnp.float32(1 << dropped)).astype(jnp.int32).astype(jnp.uint32)
    finite = (bits & numerics.MAGNITUDE_MASK) < numerics.INF_BITS
    kept = jnp.where(finite, lifted, numerics.canonical_nan(bits))
    return numerics.from_bits((kept >> dropped) << dropped)
