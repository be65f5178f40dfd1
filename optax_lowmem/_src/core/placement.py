"""Checked shardings of arrays over a mesh, with errors that name the array."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_lowmem._src.core import groups, trees

Axes = tuple[str, ...]  # mesh axes that shard one dimension, outermost first
Sharding = NamedSharding | PartitionSpec | None  # of a leaf; None means replicated
Given = TypeVar("Given")


def entry(axes: Axes) -> None | str | Axes:
    """Return the PartitionSpec entry of a dimension: None, one mesh axis, or a tuple of them."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(spec: PartitionSpec, rank: int) -> list[Axes]:
    """Return the mesh axes that shard each dimension."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding of an array.

    Attributes:
      mesh: the device mesh.
      axes: the mesh axes that shard each dimension.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[Axes, ...]

    def parts(self, dimension: int) -> int:
        """Return the number of shards along a dimension."""
        return self.count(self.axes[dimension])

    def count(self, axes: Axes) -> int:
        """Return the number of shards over some mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec, with an entry for every dimension."""
        return PartitionSpec(*map(entry, self.axes))

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard."""
        return tuple(size // self.parts(d) for d, size in enumerate(shape))

    def starts(self, sizes: Sequence[int]) -> list[jax.Array]:
        """Return the first index of this device's shard along each axis, in a `shard_map`.

        Args:
          sizes: size of a shard along each axis, in the unit of the index (elements or groups).
        """
        return [
            lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size) if axes else jnp.uint32(0)
            for axes, size in zip(self.axes, sizes, strict=True)
        ]

    def cut_groups(self, shape: tuple[int, ...], group_size: int) -> str | None:
        """Describe how shards cut through groups of the last axis; None if they do not."""
        return groups.cut_reason(shape[-1], self.parts(-1), group_size)

    def cuts_some(self, shape: tuple[int, ...], group_sizes: Iterable[int]) -> bool:
        """Return whether shards cut through groups of any of these sizes."""
        return any(self.cut_groups(shape, size) for size in group_sizes)


def _splits(
    place: Placement, whole: tuple[int, ...], d: int, entries: int, group_sizes: frozenset[int]
) -> bool:
    """Return whether `entries` entries along a dimension can be sharded as the parameter's are.

    Neighbours that one entry covers (a group, a head) must be in one shard.
    """
    if whole[d] == entries:
        return True
    if entries == 0 or entries % place.parts(d):
        return False
    if any(entries == groups.group_count(whole[d], size) for size in group_sizes):
        return d < len(whole) - 1 or not place.cuts_some(whole, group_sizes)
    return whole[d] % entries == 0


def sharding_of_state(
    place: Placement, whole: tuple[int, ...], shape: tuple[int, ...], group_sizes: Iterable[int]
) -> NamedSharding:
    """Return the sharding of a state array of a parameter.

    It is the parameter's, but replicated along axes whose shards would cut through a group or a
    head, and fully replicated if the number of dimensions differs.

    Args:
      place: the parameter's placement.
      whole: shape of the parameter.
      shape: shape of the state array.
      group_sizes: group sizes of the parameter's compressed slots.
    """
    sizes = frozenset(group_sizes)
    axes: list[Axes] = []
    if len(shape) == len(whole):
        for d, names in enumerate(place.axes):
            axes.append(names if _splits(place, whole, d, shape[d], sizes) else ())
    return NamedSharding(place.mesh, PartitionSpec(*map(entry, axes)))


def placement(
    path: str, shape: tuple[int, ...], sharding: Sharding, mesh: Mesh | AbstractMesh
) -> Placement:
    """Check the sharding of an array, and return it as a `Placement`.

    Args:
      path: name of the array, for errors.
      shape: global shape of the array.
      sharding: a NamedSharding, a PartitionSpec, or None if it is replicated.
      mesh: mesh of a PartitionSpec.

    Raises:
      ValueError: if the mesh lacks an axis, or an axis is named twice or does not divide its
        dimension.
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
    placed = Placement(mesh, tuple(axes))
    for d, size in enumerate(shape):
        if size % placed.parts(d):
            raise ValueError(
                f"{where}: {' x '.join(axes[d])} makes {placed.parts(d)} parts, which do not "
                f"divide dimension {d} ({size}). Choose another dimension or mesh, or pad the "
                "parameter."
            )
    return placed


def beside(
    path: str,
    whole: tuple[int, ...],
    sharding: Given,
    shape: tuple[int, ...],
    group_sizes: Iterable[int],
) -> Given | NamedSharding:
    """Return `sharding_of_state` for a NamedSharding; return other shardings unchanged."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    place = placement(path, whole, sharding, sharding.mesh)
    return sharding_of_state(place, whole, shape, group_sizes)


def mesh_of(shardings: Sequence[Sharding], mesh: Mesh | None) -> Mesh | AbstractMesh:
    """Return the mesh of some NamedShardings and PartitionSpecs.

    Raises:
      ValueError: if neither `mesh`, a NamedSharding nor `jax.set_mesh` gives one.
    """
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
    """Return the leaves of a tree of shardings: NamedShardings, PartitionSpecs or None.

    Raises:
      ValueError: if it does not have the parameters' structure, or has another kind of sharding.
    """
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


def placements(params: optax.Params, shardings: object, mesh: Mesh | None) -> dict[str, Placement]:
    """Return the `Placement` of each parameter by path, from its NamedSharding or spec."""
    given = sharding_leaves(params, shardings)
    the_mesh = mesh_of(given, mesh)
    return {
        path: placement(path, tuple(leaf.shape), sharding, the_mesh)
        for (path, leaf), sharding in zip(trees.named_leaves(params), given, strict=True)
    }
