"""Encode and decode of one array in plain jnp: the specification, and the path without a kernel."""

import jax

from optax_lowmem._src.codecs import GroupCodec, decode_array, encode_array
from optax_lowmem._src.core import numerics, random


def encode(
    codec: GroupCodec, x: jax.Array, group_size: int, key: jax.Array | None = None, slot: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales, as `codec.storage` has them, of an array [..., n].

    Args:
      codec: how to store it.
      x: values [..., n], f32 or 16-bit.
      group_size: neighbours on the last axis that share a scale.
      key: a uint32 scalar for stochastic rounding, as of `random.leaf_key`; None rounds to nearest.
      slot: which slot of the leaf, for the random bits.
    """
    noise = None if key is None else random.uniforms(key, x.shape, group_size, slot)
    return encode_array(codec, numerics.widen(x), group_size, noise)


def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int,
    length: int | None = None,
) -> jax.Array:
    """f32 values of `encode`'s codes and scales, of this `length` where codes share bytes."""
    return decode_array(codec, codes, scales, group_size, length)
