"""Pytree nodes that wrap one array and describe its axes: those of Linen, NNX and haliax.

Flax shards an array of the state by the names in its metadata (Linen's `Partitioned`, NNX's
`Variable`), Levanter by the names of its axes (haliax's `NamedArray`); neither checks its shape.
`jax.tree.map` over the parameters copies their metadata to the state, where they do not fit arrays
of other shapes, such as scales and 0-d placeholders: `with_metadata_of` adjusts
the names.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_lowmem._src.arrays.typing import PyTree, Structure

# If no mesh is known, assume up to this many shards per axis, times any odd number.
_PARTS = 64
# Of NNX, whose versions have different names: https://github.com/google/flax/issues/5248. In the
# state's variables Flax overwrites the first with each of the others:
# https://github.com/google/flax/pull/5231
_KEYS = ("out_sharding", "optimizer_sharding", "sharding", "sharding_names")


def _kind(node: object) -> str | None:
    """Return `box`, `variable`, or the field with the axes; None if a node has no metadata.

    A node with named axes is a dataclass with the fields `array` and either `axes` (names and
    sizes) or `axis_names` (strings): haliax's `NamedArray`, depending on its version.
    """
    cls = type(node)
    if hasattr(cls, "unbox") and hasattr(cls, "replace_boxed"):
        return "box"
    if hasattr(cls, "get_metadata") and hasattr(cls, "replace"):
        return "variable"
    fields = set(getattr(cls, "__dataclass_fields__", ()))
    return next((name for name in ("axes", "axis_names") if fields == {"array", name}), None)


def is_box(node: object) -> bool:
    """Return whether a node is an array with Linen metadata, such as `Partitioned`."""
    return _kind(node) == "box"


def is_variable(node: object) -> bool:
    """Return whether a node is an NNX `Variable`."""
    return _kind(node) == "variable"


def pure(tree: PyTree) -> PyTree:
    """Replace the NNX variables of a tree by their arrays."""
    from flax import nnx

    # `as_pure` was `pure` before Flax 0.12.7 (no upstream issue known)
    return (getattr(nnx, "as_pure", None) or nnx.pure)(tree)


def unboxed(tree: optax.Params) -> optax.Params:
    """Remove Linen's metadata (`nn.Partitioned` and the like) from a tree."""

    def content(node: object) -> object:
        if not is_box(node):
            return node
        inside = jax.tree.leaves(node)  # `node.unbox()` would shard it under `jax.set_mesh`
        return inside[0] if inside else None

    return jax.tree.map(content, tree, is_leaf=is_box)


def with_metadata_of(
    reference: optax.Params, arrays: Iterable[object], before: optax.Params | None = None
) -> optax.Params:
    """Return a tree with the structure of `reference` and metadata that fit the new arrays.

    `before` is the same tree of the previous state. If it has metadata, the result has the same,
    since metadata are part of a tree's structure, which a step must not change.
    """
    arrays, nodes = list(arrays), jax.tree.leaves(reference, is_leaf=has_metadata)
    if not any(map(has_metadata, nodes)):
        return jax.tree.unflatten(jax.tree.structure(reference), arrays)
    if any(map(has_metadata, jax.tree.leaves(before, is_leaf=has_metadata))):
        kept: Structure = jax.tree.structure(before)
        if kept.num_leaves == len(arrays):
            return jax.tree.unflatten(kept, arrays)
    rest = iter(arrays)
    treedef: Structure = jax.tree.structure(reference, is_leaf=has_metadata)
    return jax.tree.unflatten(treedef, [_fitted(node, rest) for node in nodes])


def has_metadata(node: object) -> bool:
    """Return whether a node is an array with metadata, of any kind."""
    return _kind(node) is not None


def _fitted(node: PyTree, rest: Iterable[PyTree]) -> PyTree:
    """Rebuild a node from the next arrays; adjust its metadata if it holds one array.

    In a Linen box an axis keeps its name if the array and the parameter have the same size there,
    or if every number of shards that divides the parameter also divides the array, as for groups of
    a long enough axis. (Numbers of shards are powers of two up to 64, or to the number of devices,
    times odd numbers.) Otherwise the name is None. `NamedArray` of haliax and `Variable` of NNX
    follow this rule if no mesh is known. With a mesh (of `jax.set_mesh`, or of the variable) a
    `NamedArray` keeps a name if all products of mesh axes that divide the parameter divide the
    array, and a `Variable` if the mesh axes of its sharding do. In haliax the other axes are called
    "<name>_groups", which no mapping of names shards. A 0-d placeholder has no names.
    """
    leaves, treedef = jax.tree.flatten(node)
    arrays = list(itertools.islice(rest, len(leaves)))
    described = has_metadata(node) and len(leaves) == 1 and hasattr(arrays[0], "shape")
    if not described or arrays[0].shape == jnp.shape(leaves[0]):
        return jax.tree.unflatten(treedef, arrays)
    shape, whole = arrays[0].shape, jnp.shape(leaves[0])
    if is_variable(node):
        return fitted_variable(jax.tree.unflatten(treedef, arrays), shape, whole)
    sizes, pairs = _sizes(jax.sharding.get_abstract_mesh()), list(zip(shape, whole, strict=False))
    field = _kind(node)
    if field is not None and field != "box":
        axes = _axes(getattr(node, field), shape, [_splits_as(*pair, sizes) for pair in pairs])
        return dataclasses.replace(node, **{"array": arrays[0], field: axes})
    keeps = [_splits_on_any(*pair, sizes) for pair in pairs]
    box: Any = jax.tree.unflatten(treedef, arrays)
    names = getattr(box, "names", None)
    return box if names is None else box.replace(names=_names(names, shape, whole, keeps))


def _names(
    names: Iterable[object], shape: tuple[int, ...], whole: tuple[int, ...], keeps: list[bool]
) -> tuple[object, ...]:
    if len(shape) != len(whole):
        return (None,) * len(shape)
    return tuple(name if keep else None for name, keep in zip(names, keeps, strict=False))


def _axes(axes: tuple[Any, ...], shape: tuple[int, ...], keeps: list[bool]) -> tuple[Any, ...]:
    """Return haliax axes for an array of this shape, with sizes if those given have sizes."""
    names = [f"groups_{d}" for d, _ in enumerate(shape)]
    if len(axes) == len(shape):
        old = [getattr(axis, "name", axis) for axis in axes]
        names = [n if keep else f"{n}_groups" for n, keep in zip(old, keeps, strict=True)]
    if all(isinstance(axis, str) for axis in axes):
        return tuple(names)
    return tuple(type(axes[0])(*axis) for axis in zip(names, shape, strict=True))


def _splits_on_any(entries: int, whole: int, sizes: dict[str, int]) -> bool:
    """Return whether every number of shards that divides `whole` entries divides `entries`."""
    if entries == whole:
        return True
    devices = max(math.prod(sizes.values()), jax.device_count())
    parts = max(_PARTS, 1 << (devices - 1).bit_length())
    if entries == 0 or entries % parts or whole % entries:
        return False
    size = whole // entries
    return size & (size - 1) == 0  # else an odd number of shards may split a group


def _splits_as(entries: int, whole: int, sizes: dict[str, int]) -> bool:
    """Return whether all mesh axes that divide `whole` entries also divide `entries`.

    If the mesh is not known, this must hold for every mesh.
    """
    counts = {1}
    for size in sizes.values():
        counts |= {size * count for count in counts}
    parts = [count for count in counts if whole % count == 0] if sizes else [None]
    return all(_splits(count, entries, whole, sizes) for count in parts)


def _sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    return {} if mesh is None or mesh.empty else dict(mesh.shape)


# ---- variables of NNX --------------------------------------------------------------------------


def fitted_variable(
    variable: PyTree, shape: tuple[int, ...], whole: tuple[int, ...] | None = None
) -> PyTree:
    """Return an NNX variable whose metadata shard only the axes that its shape allows.

    The variable is of an optimizer's state, with the metadata of its parameter, of shape `whole`.
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
    sharding: PyTree,
    metadata: Mapping[str, PyTree],
    shape: tuple[int, ...],
    whole: tuple[int, ...] | None,
) -> PyTree:
    from flax.core import meta, spmd

    named = isinstance(sharding, NamedSharding)
    names = tuple(sharding.spec if named else sharding)
    mesh = sharding.mesh if named else metadata.get("mesh") or meta.get_global_mesh()
    rules, sizes = metadata.get("sharding_rules"), _sizes(mesh)
    axes = tuple(spmd.apply_rules(PartitionSpec(*names), rules))
    if whole is None:  # the parameter's shape, hence the groups, are unknown
        keeps = [
            size % (_parts(axis, sizes) or 1) == 0 for axis, size in zip(axes, shape, strict=False)
        ]
    else:
        keeps = [
            _splits(_parts(axis, sizes), size, of, sizes)
            for axis, size, of in zip(axes, shape, whole, strict=False)
        ]
    fitting = _names(names, shape, shape if whole is None else whole, keeps)
    if fitting == names:
        return sharding
    if named:
        return NamedSharding(sharding.mesh, PartitionSpec(*fitting))
    return type(sharding)(*fitting) if isinstance(sharding, PartitionSpec) else fitting


def _parts(axes: object, sizes: dict[str, int]) -> int | None:
    """Return the number of shards along a dimension, or None if the mesh lacks its axes."""
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(sizes[a] for a in names) if all(a in sizes for a in names) else None


def _splits(parts: int | None, size: int, whole: int, sizes: dict[str, int]) -> bool:
    """Return whether a dimension of `size` splits into `parts` shards as the parameter's does.

    If `parts` is None, they must split on every mesh that splits `whole`.
    """
    if parts is None:
        return _splits_on_any(size, whole, sizes)
    return size == whole or parts == 1 or (size > 0 and size % parts == 0 and whole % size == 0)
