"""Activations quantized for products, and what rules of differentiation here have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from optax_lowmem._src.fp8_flow.kernels import quantized
from optax_lowmem._src.fp8_flow.recipe import Coded, Formula, Source, value_of
from optax_lowmem._src.switchback.quantized_matmul.reference import absmax_of


def kept(*trees: Any) -> Any:
    """The same arrays, each stored as it is once one of them is.

    Else XLA would compute codes that only the backward pass reads there, and keep what they are of.
    """
    return lax.optimization_barrier(trees)


def code(x: jax.Array | Coded) -> Coded:
    """An activation quantized for matrix products, by one scale.

    The gradient goes straight through. One that is quantized stays as it is.
    """
    return x if isinstance(x, Coded) and x.quantized is not None else _code(value_of(x))


@jax.custom_vjp
def _code(x: jax.Array) -> Coded:
    return Coded(x, quantized(x, absmax_of(x, None)))


_code.defvjp(lambda x: (_code(x), None), lambda saved, g: (g.value,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(formula: Formula, *given: jax.Array) -> Coded:
    """The value of a formula, of which the backward pass is given the arguments alone.

    It computes what it needs from these once more, as linear layers of the value do.
    """
    return _recomputed_forward(formula, *given)[0]


def _recomputed_forward(formula: Formula, *given: jax.Array) -> tuple[Coded, Any]:
    # else XLA would find that both computations are the same, and keep the first one's results
    again = lax.optimization_barrier(given)
    return Coded(formula(*given), None, Source(formula, again)), again


def _recomputed_backward(formula: Formula, given: Any, g: Coded) -> tuple[jax.Array, ...]:
    return jax.vjp(formula, *given)[1](g.value)


recomputed.defvjp(_recomputed_forward, _recomputed_backward)


def _refuse(*args: Any) -> Any:
    raise TypeError(
        "the gradients of an FP8 flow have no derivative: rounding has none. For second "
        "derivatives use the ordinary layers."
    )


def once(
    function: Callable[..., Any], static: int = 1, refuse: Callable[..., Any] = _refuse
) -> Callable[..., Any]:
    """A part of a rule of differentiation, that refuses to be differentiated again.

    Rounding has no derivative: gradients would be a part of the truth. (Its results are new arrays:
    it must not return what is kept as it was given, which would then be kept twice.)

    Args:
      function: of `static` static arguments, then arrays.
      static: how many.
      refuse: of the static arguments and more, raises the error.
    """
    rule = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))
    rule.defjvp(refuse)
    return rule
