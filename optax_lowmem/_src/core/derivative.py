"""Functions that refuse to be differentiated, since rounding has no derivative."""

from collections.abc import Callable
from typing import Any

import jax

from optax_lowmem._src.core.typing import Tree


@jax.custom_jvp
def without(tree: Tree) -> Tree:
    """A tree as it is, which raises where it would be differentiated.

    JAX gives an integer no tangent and a rounding that of the identity or none, so that the
    gradient of what a later step makes of a state would lack a part, in silence.

    Raises:
      TypeError: under `jax.grad` and `jax.jvp`, where a leaf depends on what they differentiate by.
    """
    return tree


@without.defjvp
def _refuse_update(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    raise TypeError(
        "an update that keeps 8-bit state or splits master weights has no derivative, and JAX "
        "would give a wrong one. Take the gradient of the loss alone, with the update outside of "
        "it or its arguments under jax.lax.stop_gradient; for gradients through training (of a "
        "learning rate, of initial weights) use optax's own optimizer, or "
        "storage=lowmem.Storage(mu=None, nu=None, master_weight_bits=None) on f32 weights."
    )


def _refuse_flow(*args: Any) -> Any:
    raise TypeError(
        "the gradients of an FP8 flow have no derivative: rounding has none. For second "
        "derivatives use the ordinary layers."
    )


def first_order_only(
    function: Callable[..., Any], static: int = 1, refuse: Callable[..., Any] = _refuse_flow
) -> Callable[..., Any]:
    """Return a function of a custom derivative rule that raises where it is differentiated again.

    Rounding has no derivative, so second derivatives would silently lack a term. The function must
    not return an argument as it is: JAX would then keep that array twice.

    Args:
      function: of `static` static arguments, then arrays.
      static: how many.
      refuse: of the static arguments and more, raises the error.
    """
    rule = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))
    rule.defjvp(refuse)
    return rule
