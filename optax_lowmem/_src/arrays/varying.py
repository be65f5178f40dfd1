"""Arrays inside a `shard_map`: the mesh axes over which they vary, and means over whole leaves."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.typing import PyTree

# Before JAX 0.10 a type has only the axes over which its array varies (`vma`).
# https://github.com/jax-ml/jax/pull/27893
_KIND = "manual_axis_type" if hasattr(jax.core.ShapedArray, "manual_axis_type") else "vma"


def kind_of(x: PyTree) -> dict[str, Any]:
    """Return `jax.ShapeDtypeStruct` arguments for a result that varies over a mesh as `x` does."""
    kind = getattr(x, _KIND, None)  # set if `x` is a `jax.ShapeDtypeStruct`
    return {_KIND: getattr(jax.typeof(x), _KIND) if kind is None else kind}


def result_like(
    x: PyTree, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None
) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's result, which varies over mesh axes as operand `x` does."""
    shape, dtype = x.shape if shape is None else shape, x.dtype if dtype is None else dtype
    return jax.ShapeDtypeStruct(shape, dtype, **kind_of(x))


def axes_of(*trees: object) -> frozenset[str]:
    """Return the axes over which any of these arrays varies; none outside of a `shard_map`."""
    kinds = [kind_of(leaf)[_KIND] for leaf in jax.tree.leaves(trees)]
    return frozenset().union(*(getattr(kind, "varying", kind) for kind in kinds))


def over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return `x` typed as varying over these axes too; its gradient is summed over them."""
    more = frozenset(axes) - axes_of(x)
    return lax.pcast(x, tuple(sorted(more)), to="varying") if more else x


def alike(*trees: PyTree) -> tuple[PyTree, ...]:
    """Type all arrays as varying over every axis that one of them varies over.

    JAX does this for the operands of its operations, but not for the arguments of a function with a
    custom derivative.
    """
    axes = axes_of(*trees)
    return jax.tree.map(lambda x: over(x, axes), trees)


# ---- reductions over a whole leaf, which may be sharded ------------------------------------------


def mean_of_leaf(x: jax.Array) -> jax.Array:
    """Return the mean over a whole leaf, also inside a `shard_map` that sees one shard of it.

    Raises inside a `shard_map` that does not track which values vary between devices.
    """
    mean = jnp.mean(x)
    axes = tuple(sorted(axes_of(x)))
    if axes:  # shards have equal sizes
        return lax.pmean(mean, axes)
    _check_known("a mean over it")
    return mean


def _check_known(what: str) -> None:
    """Raise inside a `shard_map` that does not track which values vary between devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    for name in (name for name, kind in kinds if kind == AxisType.Manual):
        if not axes_of(lax.axis_index(name)):
            raise ValueError(
                f"inside a shard_map with check_vma=False, or a pmap, JAX does not know whether a "
                f"leaf is sharded over '{name}', and {what} is needed: use check_vma=True, or jit "
                "with shardings."
            )


def check_whole(path: str, tree: object, needed: str) -> None:
    """Raise inside a `shard_map` if a leaf's arrays may be shards; `needed` needs all of it."""
    axes = axes_of(tree)
    if axes:
        raise ValueError(
            f"inside this shard_map leaf '{path}' may differ over {', '.join(sorted(axes))}, and "
            f"{needed} is needed: use jit with shardings, which sees the whole leaf; or keep the "
            "leaf replicated, with gradients from lax.pmean."
        )
    _check_known(needed)


def after(x: object, earlier: object) -> PyTree:
    """Return `x`, delayed until `earlier` is computed.

    Inside a `shard_map` with check_vma there is no delay if the barrier would make replicated
    values vary between devices: this costs memory only.
    """
    kinds = {axes_of(leaf) for leaf in jax.tree.leaves(x)}
    if len(kinds) != 1 or not axes_of(earlier) <= min(kinds):
        return x
    return lax.optimization_barrier((x, earlier))[0]
