"""Shardings of arrays over a mesh: checked, with errors that name the array; and Explicit axes.

The sharding of an array on Explicit mesh axes is part of its type, and every operation on it must
determine its result's sharding. A step cannot, since it reshapes rows into groups, which may span
two devices: it is compiled with Auto axes, and only its arguments and results have shardings in
their types.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.compiled import is_eager
from optax_lowmem._src.arrays.groups import group_count
from optax_lowmem._src.arrays.shards import Shards, axes_of, divides, spec_of
from optax_lowmem._src.arrays.typing import PyTree, Tree

Sharding = NamedSharding | PartitionSpec | None  # of a leaf; None means replicated
Given = TypeVar("Given")


def named_sharding(
    path: str, shape: tuple[int, ...], sharding: Sharding, mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """Check the sharding of an array, and return it with an entry for every dimension.

    `mesh` is of a PartitionSpec. Raises if the mesh lacks an axis, or an axis is named twice or
    does not divide its dimension.
    """
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding or PartitionSpec()
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
    axes = axes_of(spec, len(shape))
    where = f"parameter '{path}' of shape {shape} with {spec}"
    if len(axes) > len(shape):
        raise ValueError(f"{where}: the spec has more entries than the parameter has dimensions.")
    named = [axis for names in axes for axis in names]
    for axis in named:
        if axis not in mesh.shape:
            raise ValueError(f"{where}: the mesh has no axis '{axis}', only {tuple(mesh.shape)}.")
        if named.count(axis) > 1:
            raise ValueError(f"{where}: axis '{axis}' is named twice.")
    checked = NamedSharding(mesh, spec_of(axes))
    for d, parts in enumerate(Shards.of(checked, len(shape)).parts):
        if not divides(parts, shape[d]):
            raise ValueError(
                f"{where}: {' x '.join(axes[d])} makes {parts} parts, which do not divide "
                f"dimension {d} ({shape[d]}). Choose another dimension or mesh, or pad the "
                "parameter."
            )
    return checked


def state_sharding(
    path: str,
    whole: tuple[int, ...],
    sharding: Given,
    shape: tuple[int, ...],
    group_sizes: Iterable[int],
) -> Given | NamedSharding:
    """Return the sharding of a state array, of shape `shape`, of a parameter of shape `whole`.

    It is the parameter's, but replicated along axes whose shards would cut through a group or a
    head, and fully replicated if the number of dimensions differs. A sharding other than a
    NamedSharding is returned unchanged.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    checked = named_sharding(path, whole, sharding, sharding.mesh)
    if len(shape) != len(whole):
        return NamedSharding(checked.mesh, PartitionSpec())
    parts, sizes = Shards.of(checked, len(whole)).parts, tuple(group_sizes)
    axes = [
        names if _shards_alike(whole, d, parts[d], shape[d], sizes) else ()
        for d, names in enumerate(axes_of(checked.spec, len(whole)))
    ]
    return NamedSharding(checked.mesh, spec_of(axes))


def _shards_alike(
    whole: tuple[int, ...], d: int, parts: int, entries: int, group_sizes: tuple[int, ...]
) -> bool:
    """Return whether `entries` entries along a dimension can be sharded as the parameter's are.

    Neighbours that one entry covers (a group, a head) must be in one shard.
    """
    if whole[d] == entries:
        return True
    if entries == 0 or not divides(parts, entries):
        return False
    if any(entries == group_count(whole[d], size) for size in group_sizes):
        return d < len(whole) - 1 or divides(parts, whole[d], math.lcm(*group_sizes))
    return whole[d] % entries == 0


def mesh_of(shardings: Sequence[Sharding], mesh: Mesh | None) -> Mesh | AbstractMesh:
    """Return the mesh of some shardings: that given, of a NamedSharding, or of `jax.set_mesh`."""
    if mesh is not None:
        return mesh
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("PartitionSpecs and axis names need a mesh: pass mesh=, or use set_mesh.")
    return mesh


def replicated(tree: object) -> jax.sharding.Sharding:
    """Return the replicated sharding on the devices of the array that has most of them."""
    given = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    most = max((s for s in given if s), key=lambda s: len(s.device_set), default=None)
    if isinstance(most, NamedSharding):
        return NamedSharding(most.mesh, PartitionSpec())
    return most or jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())


def sharding_leaves(params: optax.Params, shardings: object) -> list[Sharding]:
    """Return the leaves of a tree like the parameters of NamedShardings, PartitionSpecs or None."""
    names = [name for name, _ in trees.named_leaves(params)]
    result = jax.tree_util.tree_leaves_with_path(
        shardings, is_leaf=lambda n: n is None or isinstance(n, NamedSharding | PartitionSpec)
    )
    # a None beside a None of the parameters, as in trees of equinox.partition, is of no parameter
    result = [
        (path, x) for path, x in result if x is not None or trees.path_name(path) in set(names)
    ]
    other = [trees.path_name(path) for path, _ in result]
    if differs := trees.difference(names, other):
        raise ValueError(
            f"the shardings do not have the structure of the parameters: {differs}. Give one for "
            "each; None means replicated."
        )
    for name, (_, sharding) in zip(names, result, strict=True):
        if sharding is not None and not isinstance(sharding, NamedSharding | PartitionSpec):
            raise ValueError(
                f"the sharding of '{name}' is a {type(sharding).__name__}: give a NamedSharding or "
                "a PartitionSpec, or None for a replicated parameter."
            )
    return [sharding for _, sharding in result]


def named_shardings(
    params: optax.Params, shardings: object, mesh: Mesh | None
) -> dict[str, NamedSharding]:
    """Return the `named_sharding` of each parameter by path, from its NamedSharding or spec."""
    given = sharding_leaves(params, shardings)
    the_mesh = mesh_of(given, mesh)
    return {
        path: named_sharding(path, tuple(leaf.shape), sharding, the_mesh)
        for (path, leaf), sharding in zip(trees.named_leaves(params), given, strict=True)
    }


# ---- Explicit axes -------------------------------------------------------------------------------


def sharding_of(x: object) -> NamedSharding | None:
    """Return the sharding in the type of an array; None for others, and without Explicit axes."""
    # a concrete array's sharding has its devices, needed outside of `jax.set_mesh`
    typed = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    sharding = getattr(typed, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return None
    return sharding


def sharding_of_values(codes: PyTree, length: int) -> NamedSharding | None:
    """Return the sharding of decoded values, which follows the codes'; None without Explicit axes.

    `length` is of the values' last axis; a byte of codes may hold several values.
    """
    sharding = sharding_of(codes)
    if sharding is None or codes.shape[-1] == length:
        return sharding
    *axes, last = axes_of(sharding.spec, codes.ndim)
    whole = divides(Shards.of(sharding, codes.ndim).parts[-1], length)
    return NamedSharding(sharding.mesh, spec_of([*axes, last if whole else ()]))


def filled_like(
    path: str, x: PyTree, form: jax.ShapeDtypeStruct, group_size: int, value: ArrayLike
) -> jax.Array:
    """Return a constant state array of parameter `x`, with a sharding that follows `x`'s."""
    if form.shape == x.shape:
        return jnp.full_like(x, value, dtype=form.dtype)
    given = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(given, NamedSharding) or sharding_of(x) is not None:
        placed = state_sharding(path, x.shape, sharding_of(x), form.shape, (group_size,))
        return reshard(jnp.full(form.shape, value, form.dtype), placed)
    placed = state_sharding(path, tuple(x.shape), given, form.shape, (group_size,))
    return jnp.full(form.shape, value, form.dtype, device=placed)


def reshard(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Reshard an array to the given sharding; return it unchanged if there is none."""
    if sharding is None or sharding_of(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def reshard_like(tree: Tree, other: object) -> Tree:
    """Reshard the arrays of a tree to the shardings in the types of another tree's arrays."""
    return jax.tree.map(lambda x, like: reshard(x, sharding_of(like)), tree, other)


def left_to_xla(function: Callable[..., PyTree], shardings: PyTree, *args: PyTree) -> PyTree:
    """Call function(*args) with Explicit axes as Auto: XLA chooses the shardings inside.

    The function must not close over arrays. If the types of `args` have Explicit axes, the result
    has these shardings: a tree like it of NamedShardings, or None for replicated.
    """
    leaves = jax.tree.leaves(args)
    mesh = next((s.mesh for s in map(sharding_of, leaves) if s is not None), None)
    if mesh is None:
        return function(*args)
    replicated = NamedSharding(mesh, PartitionSpec())
    out = jax.tree.map(lambda s: s or replicated, shardings, is_leaf=lambda node: node is None)
    free = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)
    return (jax.jit(free) if is_eager(leaves) else free)(*args)


def sees_shards() -> bool:
    """Return whether a `shard_map` is being traced, in which arrays are shards."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def on_each_device(
    function: Callable[..., PyTree],
    mesh: Mesh | AbstractMesh,
    typed: bool,
    specs: PyTree,
    out_specs: PyTree,
    *args: PyTree,
) -> PyTree:
    """Call `function` with each device's shards of `args`, by `shard_map`.

    If the mesh's axes are Explicit (`typed`), `args` are resharded to `specs` before.
    """
    if typed:
        args = jax.tree.map(lambda spec, x: reshard(x, NamedSharding(mesh, spec)), specs, args)
    how = {"in_specs": specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(function, mesh=mesh, **how)(*args)
