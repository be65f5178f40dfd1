"""Arrays on Explicit mesh axes, whose sharding is part of their type.

Every operation on them must determine its result's sharding. A step cannot, since it reshapes rows
into groups, which may span two devices: it is compiled with Auto axes, and only its arguments and
results have shardings in their types.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_lowmem._src.core.compiled import is_eager
from optax_lowmem._src.core.placement import Placement, beside, entry, placement
from optax_lowmem._src.core.typing import Shaped, Tree


def sharding_of(x: object) -> NamedSharding | None:
    """Return the sharding in the type of an array; None without Explicit axes.

    Args:
      x: an array, a `jax.ShapeDtypeStruct`, or another object, for which the result is None.
    """
    # a concrete array's sharding has its devices, needed outside of `jax.set_mesh`
    typed = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    sharding = getattr(typed, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return None
    return sharding


def placement_of(path: str, x: Shaped) -> Placement | None:
    """Return the placement in an array's type; None if no axis of its mesh is Explicit."""
    sharding = sharding_of(x)
    return None if sharding is None else placement(path, tuple(x.shape), sharding, sharding.mesh)


def of_state(path: str, x: Shaped, shape: tuple[int, ...], group_size: int) -> NamedSharding | None:
    """Return the sharding of a state array of parameter `x`; None without Explicit axes.

    Args:
      path: the parameter's name.
      x: the parameter, or its codes.
      shape: shape of the state array.
      group_size: number of neighbours of the parameter's last axis that share a scale.
    """
    return beside(path, tuple(x.shape), sharding_of(x), shape, (group_size,))


def of_values(codes: Any, length: int) -> NamedSharding | None:
    """Return the sharding of decoded values, which follows the codes'; None without Explicit axes.

    Args:
      codes: the codes of a slot.
      length: length of the values' last axis; a byte of codes may hold several values.
    """
    sharding = sharding_of(codes)
    if sharding is None or codes.shape[-1] == length:
        return sharding
    place = placement("the codes", tuple(codes.shape), sharding, sharding.mesh)
    last = place.axes[-1] if length % place.parts(-1) == 0 else ()
    axes = (*place.axes[:-1], last)
    return NamedSharding(place.mesh, PartitionSpec(*map(entry, axes)))


def filled(path: str, x: Any, form: jax.ShapeDtypeStruct, group_size: int, value: Any) -> jax.Array:
    """Return a constant state array of parameter `x`, with a sharding that follows `x`'s.

    Args:
      path: the parameter's name.
      x: the parameter.
      form: shape and dtype of the array.
      group_size: number of neighbours of the parameter's last axis that share a scale.
      value: a number, or a 0-d array.
    """
    if form.shape == x.shape:
        return jnp.full_like(x, value, dtype=form.dtype)
    given = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(given, NamedSharding) or sharding_of(x) is not None:
        placed = of_state(path, x, form.shape, group_size)
        return reshard(jnp.full(form.shape, value, form.dtype), placed)
    placed = beside(path, tuple(x.shape), given, form.shape, (group_size,))
    return jnp.full(form.shape, value, form.dtype, device=placed)


def reshard(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Reshard an array to the given sharding; return it unchanged if there is none."""
    if sharding is None or sharding_of(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def reshard_like(tree: Tree, other: object) -> Tree:
    """Reshard the arrays of a tree to the shardings in the types of another tree's arrays."""
    return jax.tree.map(lambda x, like: reshard(x, sharding_of(like)), tree, other)


def left_to_xla(function: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """Call function(*args) with Explicit axes as Auto: XLA chooses the shardings inside.

    Args:
      function: takes trees of arrays; it must not close over arrays.
      shardings: a tree like the result, of NamedShardings; None means replicated.
      *args: trees of arrays.

    Returns:
      The result, with these shardings if the types of `args` have Explicit axes.
    """
    leaves = jax.tree.leaves(args)
    mesh = next((s.mesh for s in map(sharding_of, leaves) if s is not None), None)
    if mesh is None:
        return function(*args)
    replicated = NamedSharding(mesh, PartitionSpec())
    out = jax.tree.map(lambda s: s or replicated, shardings, is_leaf=lambda node: node is None)
    free = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)
    return (jax.jit(free) if is_eager(leaves) else free)(*args)


def on_each_device(
    function: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    typed: bool,
    specs: Any,
    out_specs: Any,
    *args: Any,
) -> Any:
    """Call `function` with each device's shards of `args`, by `shard_map`.

    Args:
      function: takes a device's shards.
      mesh: the device mesh.
      typed: whether the mesh's axes are Explicit; `args` are then resharded to `specs`.
      specs: PartitionSpecs, in a tree like `args`.
      out_specs: PartitionSpecs of the results.
      *args: trees of arrays.
    """
    if typed:
        args = jax.tree.map(lambda spec, x: reshard(x, NamedSharding(mesh, spec)), specs, args)
    how = {"in_specs": specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(function, mesh=mesh, **how)(*args)
