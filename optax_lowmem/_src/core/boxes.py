"""Leaves in boxes that name the axes of their array: Linen's `Partitioned`, NNX's `Variable`.

Flax shards an array of the state by the names in its box, without a look at its shape, and a state
made by `jax.tree.map` over the parameters has their boxes. So those of arrays with other dimensions
than the parameter's get other names: a variable of NNX those whose mesh axes divide the array,
where a mesh is known; else, and in a box of Linen, those that any mesh of these devices divides.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# A mesh axis of so many devices, or one that the number divides, keeps its name where it can.
_PARTS = 64
_KEYS = (
    "out_sharding",
    "optimizer_sharding",
)  # of NNX; Flax shards a state by the latter, if given


def is_box(node: object) -> bool:
    """Return whether a node is an array with Linen metadata, such as `Partitioned`."""
    return hasattr(type(node), "unbox") and hasattr(type(node), "replace_boxed")


def is_variable(node: object) -> bool:
    """Return whether a node is an NNX `Variable`."""
    return hasattr(type(node), "get_metadata") and hasattr(type(node), "replace")


def unboxed(tree: optax.Params) -> optax.Params:
    """A tree without Linen's boxes."""

    def content(node: object) -> object:
        if not is_box(node):
            return node
        inside = jax.tree.leaves(node)  # `node.unbox()` would shard it by its names on a set mesh
        return inside[0] if inside else None

    return jax.tree.map(content, tree, is_leaf=is_box)


def like(
    reference: optax.Params, arrays: Iterable[object], before: optax.Params | None = None
) -> optax.Params:
    """A tree of the structure of `reference`, whose boxes fit the arrays in them.

    A box of Linen names the axes that the array shares with the parameter. Along the others it
    has no name, but where any number of parts up to 64, or to that of the devices, and any multiple
    of them by odd numbers, that divides the parameter divides the array too: groups of a long
    enough axis. A `Variable` of NNX does so where no mesh is known, neither to itself nor as
    `jax.set_mesh`, and otherwise has the names whose axes divide the array. A 0-d placeholder has
    no names.

    Args:
      reference: the parameters, or a tree of their boxes and shapes.
      arrays: the new leaves, in order.
      before: the tree of the step before, whose boxes stay, since they are part of a state's type.
    """
    treedef: Any = jax.tree.structure(reference)
    kept: Any = jax.tree.structure(before)
    boxed = _has_boxes(reference)
    if boxed and _has_boxes(before) and kept.num_leaves == treedef.num_leaves:
        return jax.tree.unflatten(kept, list(arrays))
    made = jax.tree.unflatten(treedef, list(arrays))
    if not boxed:
        return made
    return jax.tree.map(_fitted, made, reference, is_leaf=_is_any)


def _is_any(node: object) -> bool:
    return is_box(node) or is_variable(node)


def _has_boxes(tree: object) -> bool:
    return any(map(_is_any, jax.tree.leaves(tree, is_leaf=_is_any)))


def _fitted(box: Any, reference: object) -> Any:
    if not _is_any(box):
        return box
    inside, original = jax.tree.leaves(box), jax.tree.leaves(reference)
    if len(inside) != 1:
        return box
    shape, whole = jnp.shape(inside[0]), jnp.shape(original[0])
    if shape == whole:
        return box
    if not is_box(box):
        return fitted_variable(box, shape, whole)
    names = getattr(box, "names", None)
    if names is None:
        return box
    sizes = _sizes(jax.sharding.get_abstract_mesh())
    keeps = [_splits_on_any(own, of, sizes) for own, of in zip(shape, whole, strict=False)]
    return box.replace(names=_names(tuple(names), shape, whole, keeps))


def _names(
    names: tuple[Any, ...], shape: tuple[int, ...], whole: tuple[int, ...], keeps: list[bool]
) -> tuple[Any, ...]:
    if len(shape) != len(whole):
        return (None,) * len(shape)
    return tuple(name if keep else None for name, keep in zip(names, keeps, strict=False))


def _splits_on_any(own: int, whole: int, sizes: dict[str, int]) -> bool:
    """Return whether an axis of `own` entries splits on every mesh that splits one of `whole`."""
    devices = max(math.prod(sizes.values()), jax.device_count())
    parts = max(_PARTS, 1 << (devices - 1).bit_length())
    if own == whole:
        return True
    if own == 0 or own % parts or whole % own:
        return False
    size = whole // own
    return size & (size - 1) == 0  # else an odd number of parts may cut through a group


def _sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    return {} if mesh is None or mesh.empty else dict(mesh.shape)


# ---- variables of NNX --------------------------------------------------------------------------


def fitted_variable(
    variable: Any, shape: tuple[int, ...], whole: tuple[int, ...] | None = None
) -> Any:
    """A variable of NNX whose metadata shard it along the axes that its shape allows.

    Args:
      variable: of an optimizer's state, with the metadata of its parameter.
      shape: of its array.
      whole: shape of the parameter, where that is known.
    """
    metadata, changes = variable.get_metadata(), {}
    for key in _KEYS:
        sharding = metadata.get(key)
        if isinstance(sharding, NamedSharding | PartitionSpec | tuple):
            fitting = _fitting(sharding, metadata, shape, whole)
            if fitting != sharding:
                changes[key] = fitting
    return variable.replace(**changes) if changes else variable


def _fitting(
    sharding: Any,
    metadata: Mapping[str, Any],
    shape: tuple[int, ...],
    whole: tuple[int, ...] | None,
) -> Any:
    from flax.core import meta, spmd

    named = isinstance(sharding, NamedSharding)
    names = tuple(sharding.spec if named else sharding)
    mesh: Any = sharding.mesh if named else metadata.get("mesh") or meta.get_global_mesh()
    rules, sizes = metadata.get("sharding_rules"), _sizes(mesh)
    axes = tuple(spmd.apply_rules(PartitionSpec(*names), rules))
    if whole is None:  # of an array about whose groups nothing is known
        keeps = [
            own % (_parts(axis, sizes) or 1) == 0 for axis, own in zip(axes, shape, strict=False)
        ]
    else:
        keeps = [
            _splits(_parts(axis, sizes), own, of, sizes)
            for axis, own, of in zip(axes, shape, whole, strict=False)
        ]
    fitting = _names(names, shape, shape if whole is None else whole, keeps)
    if fitting == names:
        return sharding
    if named:
        return NamedSharding(sharding.mesh, PartitionSpec(*fitting))
    return type(sharding)(*fitting) if isinstance(sharding, PartitionSpec) else fitting


def _parts(axes: Any, sizes: dict[str, int]) -> int | None:
    """Return the number of shards along a dimension, or None where the mesh lacks its axes."""
    own = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(sizes[a] for a in own) if all(a in sizes for a in own) else None


def _splits(parts: int | None, own: int, whole: int, sizes: dict[str, int]) -> bool:
    """Return whether an axis of `own` entries splits into `parts`, as its axis of `whole` does.

    Where `parts` is None, it must split on every mesh that splits `whole`.
    """
    if parts is None:
        return _splits_on_any(own, whole, sizes)
    return own == whole or parts == 1 or (own > 0 and own % parts == 0 and whole % own == 0)
