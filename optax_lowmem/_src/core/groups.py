"""Groups of neighbours on the last axis; the last group of a row may be partial.

Never across rows: codes then shard like the parameter, with no collective.
"""

import jax
import jax.numpy as jnp

from optax_lowmem._src.core.typing import Tree


def group_count(length: int, group_size: int) -> int:
    """Return the number of groups along a last axis of `length`."""
    return -(-length // group_size)


def scale_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """Shape of the scales of an array: shape[:-1] + (groups,)."""
    return shape[:-1] + (group_count(shape[-1], group_size),)


def to_groups(x: jax.Array, group_size: int) -> jax.Array:
    """[..., n] as [..., groups, lanes]; a partial last group is padded with zeros."""
    length = x.shape[-1]
    if length <= group_size:
        return x[..., None, :]
    groups = group_count(length, group_size)
    padding = groups * group_size - length
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(x.shape[:-1] + (groups, group_size))


def from_groups(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `to_groups`."""
    flat = x.reshape(x.shape[:-2] + (x.shape[-2] * x.shape[-1],))
    return flat if flat.shape == shape else flat[..., : shape[-1]]


def spread_tree(of_groups: Tree, length: int, group_size: int) -> Tree:
    """`spread` of each array of a tree."""
    return jax.tree.map(lambda x: spread(x, length, group_size), of_groups)


def spread(x: jax.Array, length: int, group_size: int) -> jax.Array:
    """[..., groups] as [..., length]: each group's value for each of its elements."""
    if x.shape[-1] == 1:
        return jnp.broadcast_to(x, x.shape[:-1] + (length,))
    repeated = jnp.broadcast_to(x[..., None], x.shape + (group_size,))
    return repeated.reshape(x.shape[:-1] + (x.shape[-1] * group_size,))[..., :length]
