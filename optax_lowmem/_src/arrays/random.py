"""Random bits from a counter: a hash of (seed, step, leaf path, slot, coordinates).

The result does not depend on sharding, device, masking or recompilation, and nothing is stored.
Stochastic rounding combines R, a hash per group, with C, a hash per lane of it: see `uniforms`.
The noise of `gaussws` is made from `draw_words`.
"""

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lowmem._src.arrays import groups, numerics

_GOLDEN = 0x9E3779B9
_LANE_SALT = 0x5BD1E995
_WORD_SALT = 0x2545F491
_ROUND_GROUP = 32

Seeds = tuple[jax.Array, jax.Array]  # R of each group, and C of each lane of a group


def mix(x: jax.Array, tweak: jax.Array | None = None) -> jax.Array:
    """Hash uint32 bijectively, with full avalanche (C. Wellons' lowbias32, varied by `tweak`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    if tweak is not None:
        x = x ^ tweak
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def leaf_key(seed: jax.Array, step: jax.Array, path: str) -> jax.Array:
    """Return one uint32 key for a leaf at a step."""
    return key_of_hash(seed, step, path_hash(path))


def path_hash(path: str) -> np.uint32:
    """Return the hash of a leaf's path, from which its keys are derived."""
    return np.uint32(zlib.crc32(path.encode()))


def leaf_keys(seed: jax.Array, step: jax.Array, paths: Sequence[str]) -> jax.Array:
    """Return `leaf_key` of each path, uint32 [paths]."""
    return key_of_hash(seed, step, np.asarray(list(map(path_hash, paths)), np.uint32))


def key_of_hash(seed: jax.Array, step: jax.Array, hashes: np.ndarray | np.uint32) -> jax.Array:
    """Return `leaf_key`, or `leaf_keys`, from hashes by `path_hash`."""
    hashed = jnp.asarray(hashes)
    # hashed once, two leaves could have the same keys at all steps, a few steps apart
    return mix(mix(mix(seed.astype(jnp.uint32) ^ hashed) + step.astype(jnp.uint32)) ^ hashed)


def part_keys(keys: jax.Array, *starts: jax.Array) -> jax.Array:
    """Return the keys [..., 2] of R and C of parts of leaves, from the keys [...] of whole leaves.

    A part draws the bits that the whole leaf has there. `starts` are the first index of each part
    along axis 0, 1, ... of the scales.
    """
    rows = keys
    for axis, start in enumerate(starts):
        rows = rows + start.astype(jnp.uint32) * odd(axis)
    return jnp.stack([rows, keys], axis=-1)


def key_of_part(key: jax.Array, *starts: jax.Array) -> jax.Array:
    """Return `part_keys` of one leaf, or of a part of it, from its key or pair: uint32 [2]."""
    row_key, lane_key = row_and_lane_keys(key)
    return jnp.stack([part_keys(row_key, *starts)[0], lane_key])


def element_keys(keys: jax.Array, place: jax.Array, group_size: int) -> jax.Array:
    """Return `part_keys` of one element (`place`) of 1-d leaves, which may be inside a group."""
    rows = keys + (place // group_size).astype(jnp.uint32) * odd(0)
    lane = (place % group_size).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    # the key whose first lane has the bits of this lane
    lanes = _unmix(mix(keys ^ jnp.uint32(_LANE_SALT)) + lane) ^ jnp.uint32(_LANE_SALT)
    return jnp.stack([rows, lanes], axis=-1)


def _unmix(x: jax.Array) -> jax.Array:
    """Invert `mix` without a tweak."""
    x = (x ^ (x >> 16)) * jnp.uint32(pow(0x846CA68B, -1, 1 << 32))
    x = (x ^ (x >> 15) ^ (x >> 30)) * jnp.uint32(pow(0x7FEB352D, -1, 1 << 32))
    return x ^ (x >> 16)


def row_and_lane_keys(keys: jax.Array, rank: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return the keys of R and of C: a whole leaf's key serves as both, `part_keys` gives pairs.

    `rank` is the number of dimensions of keys of whole leaves; pairs have one more.
    """
    return (keys, keys) if keys.ndim == rank else (keys[..., 0], keys[..., 1])


def seeds(key: jax.Array, shape: tuple[int, ...], group_size: int) -> Seeds:
    """Return R [..., groups] and C [n] of an array [..., n], uint32: `slot_bits` combines them."""
    row_key, lane_key = row_and_lane_keys(key)
    grouped = groups.scale_shape(shape, group_size)
    lane = lane_seeds(lane_key, lax.iota(jnp.uint32, min(group_size, shape[-1])))
    return mix(counter(row_key, indices(grouped))), jnp.tile(lane, grouped[-1])[: shape[-1]]


def indices(shape: tuple[int, ...]) -> list[jax.Array]:
    """Return the uint32 indices along each axis of an array, which broadcast to its shape."""
    result = []
    for axis, size in enumerate(shape):
        dims = (*[1] * axis, size, *[1] * (len(shape) - axis - 1))
        result.append(lax.broadcasted_iota(jnp.uint32, dims, axis))
    return result


def counter(key: jax.Array, coordinates: Sequence[jax.Array]) -> jax.Array:
    """Return the uint32 whose hash, by `mix`, is R of groups.

    `coordinates` are the uint32 index along each axis, the group's last; each is multiplied by an
    odd number per axis. A part of an array gets the same bits as the whole array.
    """
    for axis, index in enumerate(coordinates):
        key = key + index * odd(axis)
    return key


def word_keys(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the keys for `draw_words`, from a key of `leaf_key` or a pair of `part_keys`."""
    return word_keys_of(*row_and_lane_keys(key))


def word_keys_of(row_key: jax.Array, lane_key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `word_keys` of the two keys of a pair; for a whole leaf both are its key."""
    return row_key, mix(lane_key ^ jnp.uint32(_WORD_SALT))


def draw_words(
    keys: tuple[jax.Array, jax.Array], coordinates: Sequence[jax.Array], count: int
) -> list[jax.Array]:
    """Draw `count` random uint32 for each place; those of any two places are independent.

    The counters of all keys and draws are in one cycle of 2^32 numbers, where those of large leaves
    overlap: a different tweak for each key and draw hashes equal counters to different numbers.

    Args:
      keys: from `word_keys`.
      coordinates: uint32 indices of the places along each axis, which broadcast.
      count: number of words per place.
    """
    place, axis = counter(keys[0], coordinates), len(coordinates)
    drawn = []
    for draw in range(count):
        tweak = keys[1] + jnp.uint32(draw * _GOLDEN & 0xFFFFFFFF)
        drawn.append(mix(place + jnp.uint32(draw) * odd(axis), tweak))
    return drawn


def lane_seeds(key: jax.Array, lanes: jax.Array) -> jax.Array:
    """Return C of lanes (uint32 positions in a group)."""
    return mix(mix(key ^ jnp.uint32(_LANE_SALT)) + lanes * jnp.uint32(_GOLDEN))


def odd(name: str | int) -> jax.Array:
    """Return the odd number of a slot, by its name, or of an axis, by its number."""
    text = name if isinstance(name, str) else f"axis {name}"
    return jnp.uint32(zlib.crc32(text.encode()) | 1)


def slot_bits(row: jax.Array, lane: jax.Array, group_size: int, slot: str) -> jax.Array:
    """Return uint32 of an array's shape for one slot, from `seeds`; upper bits are random."""
    # no reshape: Triton would then move data between threads
    lanes = lax.expand_dims(lane, range(row.ndim - lane.ndim))
    return (groups.spread(row, lane.shape[-1], group_size) + lanes) * odd(slot)


def leaf_bits(key: jax.Array, shape: tuple[int, ...], group_size: int, slot: str) -> jax.Array:
    """Return `slot_bits` of a leaf of any shape, including 0-d, which round its master weight.

    The R of `uniforms` is computed for each element, since spreading it over groups would move it
    between devices if shards cut through groups.
    """
    row_key, lane_key = row_and_lane_keys(key)
    whole = shape or (1,)
    *leading, last = (lax.broadcasted_iota(jnp.uint32, whole, axis) for axis in range(len(whole)))
    row = mix(counter(row_key, [*leading, last // jnp.uint32(group_size)]))
    bits = row + lane_seeds(lane_key, last % jnp.uint32(group_size))
    return (bits * odd(slot)).reshape(shape)


def uniforms(key: jax.Array, shape: tuple[int, ...], group_size: int, slot: str = "") -> jax.Array:
    """Return uniform f32 in [0, 1) for an array [..., n] in groups on the last axis.

    bits = (R[row, group] + C[lane]) odd(slot) mod 2^32, R and C strongly mixed: any two elements
    are independent over keys, so sums of rounding errors keep the variance of independent ones, and
    the cost is one addition and one multiplication per element. R and C serve all slots of a leaf.
    The key is a uint32 scalar, as from `leaf_key`, or a pair, as from `part_keys`.
    """
    row, lane = seeds(key, shape, group_size)
    return numerics.uniform(slot_bits(row, lane, group_size, slot))


def round_bits(x: jax.Array, key: jax.Array, dropped: int) -> jax.Array:
    """Set the `dropped` lowest bits of f32 (at most 23) to 0, rounding stochastically, unbiased.

    NaN and infinities are unchanged. The key is as from `leaf_key`.
    """
    shape = x.shape if x.ndim else (1,)
    drawn = uniforms(key, shape, _ROUND_GROUP).reshape(x.shape)
    bits = numerics.to_bits(x)
    lifted = bits + (drawn * jnp.float32(1 << dropped)).astype(jnp.int32).astype(jnp.uint32)
    finite = (bits & numerics.MAGNITUDE_MASK) < numerics.INF_BITS
    kept = jnp.where(finite, lifted, numerics.canonical_nan(bits))
    return numerics.from_bits((kept >> dropped) << dropped)
