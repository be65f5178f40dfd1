"""Library calls outside of a jit: a few compiled programs, instead of one for each primitive."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.typing import Tree

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Return `function` compiled where it is called eagerly; while JAX traces, itself.

    Its arguments are pytrees: their arrays become the operands of the program, everything else is
    static and must be hashable. The result must be arrays, and must depend on nothing but the
    arguments: a program that is there already is not traced again.

    Args:
      function: a function of a module, since programs are kept by its identity.

    Returns:
      The function, which compiles once for arguments alike in structure, shapes and static parts.
    """

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, named))
        eager = is_eager(leaves) and not jax.config.jax_disable_jit  # type: ignore[attr-defined]
        if not eager or _lie_apart(leaves) or numerics.in_kernel():
            return function(*args, **named)
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        # 1, 1.0 and True are equal, and not the same to a trace
        static = tuple(None if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        return _run(function, treedef, static, arrays)

    return call  # type: ignore[return-value]


def is_eager(leaves: Iterable[object]) -> bool:
    """Return whether no leaf is a tracer."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def is_free(leaves: list[Any]) -> bool:
    """Return whether all leaves are concrete JAX arrays that are not committed to a device.

    New arrays like them may then be on any device, as the results of a program.
    """
    arrays = all(isinstance(leaf, jax.Array) for leaf in leaves) and is_eager(leaves)
    return arrays and not any(leaf.committed for leaf in leaves)


def _lie_apart(leaves: Iterable[object]) -> bool:
    """Return whether the leaves include arrays committed to different sets of devices."""
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
    return len({frozenset(s.device_set) for s in {a.sharding for a in arrays if a.committed}}) > 1


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    function: Callable[..., Any], treedef: PyTreeDef, static: tuple[Any, ...], arrays: list[Any]
) -> Any:
    rows = zip(static, arrays, strict=True)
    leaves = [array if fixed is None else fixed[1] for fixed, array in rows]
    args, named = jax.tree.unflatten(treedef, leaves)
    return function(*args, **named)


FEW = 8  # leaves whose programs are one


def each(function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], *shared: Any) -> list[Any]:
    """Return [function(*row, *shared) for row in rows], compiled where it is called eagerly.

    Few rows are one program. Of more, those alike in shapes and static parts share a program of one
    row: what a hundred equal leaves compile is what one does.

    Args:
      function: of a module.
      rows: pytrees, as of `compiled`; what differs between rows that are alike must be arrays.
      *shared: arguments of every call.
    """
    if len(rows) <= FEW or not is_eager(jax.tree.leaves((rows, shared))):
        return _each(function, list(rows), shared)
    return [_each(function, [row], shared)[0] for row in rows]


@compiled
def _each(
    function: Callable[..., Any], rows: list[tuple[Any, ...]], shared: tuple[Any, ...]
) -> list[Any]:
    return [function(*row, *shared) for row in rows]


def unstacked(x: jax.Array) -> list[ArrayLike]:
    """The parts of a small array along its first axis, with no program for each."""
    if is_eager([x]) and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return list(np.asarray(x))
    return list(x)


_apply = compiled(optax.apply_updates)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, as one program."""
    treedef: Any = jax.tree.structure(params)
    if treedef != jax.tree.structure(updates):
        return optax.apply_updates(params, updates)
    return treedef.unflatten(_apply(jax.tree.leaves(params), jax.tree.leaves(updates)))


def advanced(
    params: optax.Params, updates: optax.Updates, count: jax.Array
) -> tuple[optax.Params, jax.Array]:
    """`optax.apply_updates` and the count after it, as one program."""
    treedef: Any = jax.tree.structure(params)
    if treedef != jax.tree.structure(updates):
        return optax.apply_updates(params, updates), optax.safe_increment(count)
    new, count = _advance(jax.tree.leaves(params), jax.tree.leaves(updates), count)
    return treedef.unflatten(new), count


@compiled
def _advance(
    params: list[jax.Array], updates: list[jax.Array], count: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    return optax.apply_updates(params, updates), optax.safe_increment(count)


def widened(tree: Tree, floats_only: bool = False) -> Tree:
    """A tree with its 8- and 16-bit floats in f32, made in one program.

    Args:
      tree: of arrays.
      floats_only: leave other numbers as they are, instead of making them f32 too.
    """
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return jax.tree.map(lambda x: _widened_shape(x, floats_only), tree)
    wide = [
        not numerics.is_narrow(x.dtype) and (floats_only or x.dtype == jnp.float32) for x in leaves
    ]
    if all(wide):
        return tree
    made = iter(_widen([x for x, known in zip(leaves, wide, strict=True) if not known]))
    found = [x if known else next(made) for x, known in zip(leaves, wide, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def _widened_shape(x: jax.ShapeDtypeStruct, floats_only: bool) -> jax.ShapeDtypeStruct:
    wide = floats_only and not numerics.is_narrow(x.dtype)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype if wide else jnp.float32, sharding=getattr(x, "sharding", None)
    )


@compiled
def _widen(arrays: list[jax.Array]) -> list[jax.Array]:
    return [numerics.widen(x) for x in arrays]


def as_given(updates: optax.Updates, gradients: optax.Updates) -> optax.Updates:
    """Updates in the dtypes of the gradients; those of another tree (lookahead's) as they are."""
    treedef: Any = jax.tree.structure(updates)
    if treedef != jax.tree.structure(gradients):
        return updates
    rows = list(zip(jax.tree.leaves(updates), jax.tree.leaves(gradients), strict=True))
    narrow = [numerics.is_narrow(g.dtype) and u.dtype == jnp.float32 for u, g in rows]
    chosen = [(u, g.dtype) for (u, g), cast in zip(rows, narrow, strict=True) if cast]
    made = iter(_cast(chosen) if chosen else [])
    return treedef.unflatten(
        [next(made) if cast else u for (u, _), cast in zip(rows, narrow, strict=True)]
    )


@compiled
def _cast(rows: list[tuple[jax.Array, DTypeLike]]) -> list[jax.Array]:
    return [x.astype(dtype) for x, dtype in rows]
