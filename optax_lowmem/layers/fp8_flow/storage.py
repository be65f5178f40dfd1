"""Activations quantised for products, and what rules of differentiation here have in common."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from optax_lowmem.kernels.fp8_flow import quantized
from optax_lowmem.kernels.quantized_matmul.reference import absmax_of
from optax_lowmem.layers.fp8_flow.recipe import Coded


def kept(*trees: Any) -> Any:
    """The same arrays, each stored as it is once one of them is.

    Else XLA would compute codes that only the backward pass reads there, and keep what they are of.
    """
    return lax.optimization_barrier(trees)


def code(x: jax.Array | Coded) -> Coded:
    """An activation quantised for matrix products, by one scale.

    The gradient goes straight through. One that is quantised stays as it is.
    """
    return x if isinstance(x, Coded) else _code(x)


@jax.custom_vjp
def _code(x: jax.Array) -> Coded:
    return Coded(x, quantized(x, absmax_of(x, None)))


_code.defvjp(lambda x: (_code(x), None), lambda saved, g: (g.value,))


def once(function: Callable[..., Any], static: int = 1) -> Callable[..., Any]:
    """A part of a rule of differentiation, that refuses to be differentiated again.

    Rounding has no derivative: gradients would be a part of the truth. (Its results are new arrays:
    it must not return what is kept as it was given, which would then be kept twice.)

    Args:
      function: of `static` static arguments, then arrays.
      static: how many.
    """
    rule = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))
    rule.defjvp(_refuse)
    return rule


def _refuse(*args: Any) -> Any:
    raise TypeError(
        "the gradients of an FP8 flow have no derivative: rounding has none. For second "
        "derivatives use the ordinary layers."
    )
