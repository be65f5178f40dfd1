"""The mesh axes over which arrays vary from device to device, inside a `shard_map` that checks."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def axes_of(*trees: object) -> frozenset[Any]:
    """The axes over which any of these arrays varies; none outside of a `shard_map`."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def of_parts() -> bool:
    """Return whether tracing is in a `shard_map`, checked or not, where arrays are shards."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def over(x: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """The same numbers, typed as varying over these axes too. Its gradient is summed over them."""
    more = frozenset(axes) - axes_of(x)
    return lax.pcast(x, tuple(sorted(more)), to="varying") if more else x


def alike(*trees: Any) -> tuple[Any, ...]:
    """All arrays as varying over every axis that one of them varies over.

    JAX does so by itself between the operations of an expression, not for the arguments of one with
    a rule of differentiation of its own.
    """
    axes = axes_of(*trees)
    return jax.tree.map(lambda x: over(x, axes), trees)
