"""Arrays inside a `shard_map`: the mesh axes over which they vary, and means over whole leaves."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

# Before JAX 0.10 a type has no more than the axes over which its arrays vary.
_KIND = "manual_axis_type" if hasattr(jax.core.ShapedArray, "manual_axis_type") else "vma"


def kind_of(x: Any) -> dict[str, Any]:
    """Arguments of `jax.ShapeDtypeStruct` for a result that varies over a mesh as `x` does."""
    kind = getattr(x, _KIND, None)  # of a `jax.ShapeDtypeStruct`
    return {_KIND: getattr(jax.typeof(x), _KIND) if kind is None else kind}


def axes_of(*trees: object) -> frozenset[Any]:
    """The axes over which any of these arrays varies; none outside of a `shard_map`."""
    kinds = [kind_of(leaf)[_KIND] for leaf in jax.tree.leaves(trees)]
    return frozenset().union(*(getattr(kind, "varying", kind) for kind in kinds))


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


# ---- reductions over a whole leaf, wherever its parts lie ----------------------------------------


def mean_of_leaf(x: jax.Array) -> jax.Array:
    """The mean over a leaf, also where a `shard_map` shows this function a part of it only.

    Raises:
      ValueError: inside a `shard_map` that does not say which values differ from device to device.
    """
    mean = jnp.mean(x)
    axes = tuple(sorted(axes_of(x)))
    if axes:  # parts are of one size
        return lax.pmean(mean, axes)
    _check_known("a mean over it")
    return mean


def _check_known(what: str) -> None:
    """Raises inside a `shard_map` that does not say which values differ from device to device."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    for name in (name for name, kind in kinds if kind == AxisType.Manual):
        if not axes_of(lax.axis_index(name)):
            raise ValueError(
                f"inside a shard_map with check_vma=False, or a pmap, nobody knows whether a leaf "
                f"is sharded over '{name}', and {what} is needed: use check_vma=True, or jit with "
                "shardings."
            )


def check_whole(path: str, tree: object, needed: str) -> None:
    """Raises inside a `shard_map` where arrays of a leaf may be parts of it.

    Args:
      path: the leaf's name.
      tree: arrays of it.
      needed: what all of the leaf is needed for.
    """
    axes = axes_of(tree)
    if axes:
        raise ValueError(
            f"inside this shard_map leaf '{path}' may differ over {', '.join(sorted(axes))}, and "
            f"{needed} is needed: use jit with shardings, which sees the whole leaf; or keep the "
            "leaf replicated, with gradients from lax.pmean."
        )
    _check_known(needed)


def after(x: object, earlier: object) -> Any:
    """`x`, which must wait until `earlier` is there.

    Inside a `shard_map` with check_vma, where the fence would make what devices have in common
    differ from device to device, it does not wait: that costs memory only.
    """
    kinds = {axes_of(leaf) for leaf in jax.tree.leaves(x)}
    if len(kinds) != 1 or not axes_of(earlier) <= min(kinds):
        return x
    return lax.optimization_barrier((x, earlier))[0]
