"""A kernel with a fallback for other platforms, which is traced only if it is lowered.

`jax.lax.platform_dependent` alone traces every branch, and then lowers one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

_Fallback = Callable[..., list[jax.Array]]  # of the flat arguments, with flat results

_fallback = jex.core.Primitive("fallback")
_fallback.multiple_results = True


def with_fallback(
    name: str, kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any
) -> Any:
    """Return kernel(*args) on the kernel's platform, else plain(*args).

    A computation for the host's CPU may be traced on a machine with an accelerator, and one for
    several platforms may be exported: JAX decides which of the two is lowered. The kernel is always
    traced; the fallback must return the same shapes and dtypes.

    Args:
      name: the kernel's platform, as in `jax.lax.platform_dependent`.
      kernel: a function of arrays.
      plain: the fallback. It may be traced after this call has returned: it must take all of its
        arrays as arguments, and depend on no other state.
      *args: pytrees of arrays.
    """
    types: list[Any] = []  # filled with one item, the types of the kernel's results

    def first(*args: Any) -> Any:
        result = kernel(*args)
        types[:] = [jax.tree.map(jax.typeof, result)]
        return result

    def second(*args: Any) -> Any:
        if not types:  # called without a trace
            return plain(*args)
        leaves, treedef = jax.tree.flatten(args)
        wanted, structure = jax.tree.flatten(types[0])

        def flat(*leaves: Any) -> list[jax.Array]:
            result = plain(*jax.tree.unflatten(treedef, leaves))
            _check(jax.tree.map(jax.typeof, result), types[0])
            return jax.tree.leaves(result)

        result = _fallback.bind(*leaves, function=flat, types=tuple(wanted))
        return jax.tree.unflatten(structure, result)

    return jax.lax.platform_dependent(*args, default=second, **{name: first})


def _check(found: Any, wanted: Any) -> None:
    """Raise if a fallback returns other shapes or dtypes than its kernel."""
    forms = jax.tree.map(lambda x: (x.shape, x.dtype), (found, wanted))
    if forms[0] != forms[1]:
        raise TypeError(f"the fallback returns {found}, but its kernel {wanted}")


def _call(*args: Any, function: _Fallback, types: tuple[Any, ...]) -> list[jax.Array]:
    return function(*args)


def _batched(
    args: Sequence[Any], axes: Sequence[int | None], function: _Fallback, types: tuple[Any, ...]
) -> tuple[list[jax.Array], list[int]]:
    result = jax.vmap(function, in_axes=tuple(axes))(*args)
    return result, [0] * len(result)


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], function: _Fallback, types: tuple[Any, ...]
) -> tuple[list[jax.Array], list[jax.Array]]:
    return jax.jvp(function, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


_fallback.def_impl(_call)
_fallback.def_abstract_eval(lambda *_, types, **__: list(types))
batching.primitive_batchers[_fallback] = _batched
ad.primitive_jvps[_fallback] = _derivative
mlir.register_lowering(_fallback, mlir.lower_fun(_call, multiple_results=True))
