"""Leaves in boxes that name the axes of their array: Linen's `Partitioned`, NNX's `Variable`.

Flax places an array of the state by the names in its box, without a look at its shape, and a state
made by `jax.tree.map` over the parameters has their boxes. So those of arrays with other dimensions
than the parameter's get other names, known from the shapes alone, since a box knows no mesh.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

# A mesh axis of so many devices, or one that the number divides, keeps its name where it can.
_PARTS = 64


def is_box(node: Any) -> bool:
    """Whether a node is one of Linen's boxes with metadata of an array."""
    return hasattr(type(node), "unbox") and hasattr(type(node), "replace_boxed")


def _is_variable(node: Any) -> bool:
    return hasattr(type(node), "get_metadata") and hasattr(type(node), "replace")


def unboxed(tree: Any) -> Any:
    """A tree without Linen's boxes."""

    def content(node: Any) -> Any:
        if not is_box(node):
            return node
        inside = jax.tree.leaves(node)  # `node.unbox()` would shard it by its names on a set mesh
        return inside[0] if inside else None

    return jax.tree.map(content, tree, is_leaf=is_box)


def like(reference: Any, arrays: Iterable[Any]) -> Any:
    """A tree of the structure of `reference`, whose boxes fit the arrays in them.

    A box of Linen names the axes that the array shares with the parameter. Along the others it
    has no name, but where any number of parts up to 64, and any multiple of them by odd numbers,
    that divides the parameter divides the array too: groups of a long enough axis. A 0-d
    placeholder has no names, in a `Variable` of NNX either.

    Args:
      reference: the parameters, or a tree of their boxes and shapes.
      arrays: the new leaves, in order.
    """
    made = jax.tree.unflatten(jax.tree.structure(reference), list(arrays))
    return jax.tree.map(_fitted, made, reference, is_leaf=lambda n: is_box(n) or _is_variable(n))


def _fitted(box: Any, reference: Any) -> Any:
    if not is_box(box) and not _is_variable(box):
        return box
    inside, original = jax.tree.leaves(box), jax.tree.leaves(reference)
    if len(inside) != 1:
        return box
    shape, whole = jnp.shape(inside[0]), jnp.shape(original[0])
    if shape == whole:
        return box
    if not is_box(box):
        return box if shape else _without_axes(box)
    names = getattr(box, "names", None)
    return box if names is None else box.replace(names=_names(tuple(names), shape, whole))


def _names(names: tuple[Any, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Any:
    if len(shape) != len(whole):
        return (None,) * len(shape)
    rows = zip(names, shape, whole, strict=False)
    return tuple(name if _splits_alike(own, of) else None for name, own, of in rows)


def _splits_alike(own: int, whole: int) -> bool:
    """Whether `own` entries along an axis of `whole` can be split wherever that is."""
    if own == whole:
        return True
    if own == 0 or own % _PARTS or whole % own:
        return False
    size = whole // own
    return size & (size - 1) == 0  # else an odd number of parts may cut through a group


def _without_axes(variable: Any) -> Any:
    metadata = variable.get_metadata()
    changes: dict[str, Any] = {}
    for key in ("out_sharding", "optimizer_sharding"):
        sharding = metadata.get(key)
        if isinstance(sharding, NamedSharding):
            changes[key] = NamedSharding(sharding.mesh, PartitionSpec())
        elif isinstance(sharding, tuple | PartitionSpec):
            changes[key] = type(sharding)()
    return variable.replace(**changes) if changes else variable
