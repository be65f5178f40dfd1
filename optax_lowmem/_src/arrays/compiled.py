"""Compile eager library calls to a few programs, instead of one for each primitive."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.typing import PyTree

F = TypeVar("F", bound=Callable[..., PyTree])


def compiled(function: F) -> F:
    """Compile `function` where it is called eagerly; call it directly while JAX traces.

    Its arguments are pytrees: arrays become operands of the program, everything else is static and
    must be hashable. The results must be arrays that depend on the arguments only: a cached program
    is not traced again.

    Args:
      function: a module-level function, since programs are cached by its identity.

    Returns:
      The function, which compiles once per structure, shapes and static parts of arguments.
    """

    @functools.wraps(function)
    def call(*args: PyTree, **named: object) -> PyTree:
        leaves, treedef = jax.tree.flatten((args, named))
        if not is_eager(leaves) or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return function(*args, **named)
        committed = {x.sharding for x in leaves if isinstance(x, jax.Array) and x.committed}
        devices = {frozenset(sharding.device_set) for sharding in committed}
        if len(devices) > 1 or numerics.in_kernel():
            return function(*args, **named)
        is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        arrays = [x if array else None for x, array in zip(leaves, is_array, strict=True)]
        # 1, 1.0 and True are equal, but trace differently
        static = tuple(
            None if array else (type(x), x) for x, array in zip(leaves, is_array, strict=True)
        )
        return _run(function, treedef, static, arrays)

    return call  # type: ignore[return-value]


def is_eager(leaves: Iterable[object]) -> bool:
    """Return whether no leaf is a tracer."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def is_free(leaves: list[PyTree]) -> bool:
    """Return whether all leaves are concrete JAX arrays that are not committed to a device.

    New arrays like them may then be placed on any device, like the results of a program.
    """
    arrays = all(isinstance(leaf, jax.Array) for leaf in leaves) and is_eager(leaves)
    return arrays and not any(leaf.committed for leaf in leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    function: Callable[..., PyTree],
    treedef: PyTreeDef,
    static: tuple[Any, ...],
    arrays: list[PyTree],
) -> PyTree:
    rows = zip(static, arrays, strict=True)
    leaves = [array if fixed is None else fixed[1] for fixed, array in rows]
    args, named = jax.tree.unflatten(treedef, leaves)
    return function(*args, **named)


FEW = 8  # up to this many rows share one program


def each(
    function: Callable[..., PyTree], rows: Sequence[tuple[PyTree, ...]], *shared: PyTree
) -> list[PyTree]:
    """Return [function(*row, *shared) for row in rows], compiled where it is called eagerly.

    Up to `FEW` rows compile to one program. More rows run one by one, and rows with equal shapes
    and static parts share a program: a hundred equal leaves compile once. The function must be
    module-level, as for `compiled`.
    """
    if len(rows) <= FEW or not is_eager(jax.tree.leaves((rows, shared))):
        return _each(function, list(rows), shared)
    return [_each(function, [row], shared)[0] for row in rows]


@compiled
def _each(
    function: Callable[..., PyTree], rows: list[tuple[PyTree, ...]], shared: tuple[PyTree, ...]
) -> list[PyTree]:
    return [function(*row, *shared) for row in rows]


def unstacked(x: jax.Array) -> list[ArrayLike]:
    """Return the slices of a small array along its first axis, without a program for each."""
    if is_eager([x]) and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return list(np.asarray(x))
    return list(x)
