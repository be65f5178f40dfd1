"""Functions that refuse to be differentiated, since rounding has no derivative."""

from collections.abc import Callable
from typing import Any

import jax

from optax_lowmem._src.core.typing import Tree


@jax.custom_jvp
def without(tree: Tree) -> Tree:
    """Return a tree unchanged, and raise if it is differentiated.

    JAX gives integers no tangent, and roundings none or the identity's, so that gradients through
    a state would silently lack a term.

    Raises:
      TypeError: under `jax.grad` and `jax.jvp`, if a leaf depends on the differentiated arguments.
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
    """Make a function of a custom derivative rule raise if it is differentiated again.

    Rounding has no derivative, so second derivatives would silently lack a term. The function must
    not return an argument unchanged: JAX would then keep that array twice.

    Args:
      function: takes `static` static arguments, then arrays.
      static: number of static arguments.
      refuse: raises the error; its first arguments are the static ones.
    """
    rule = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))
    rule.defjvp(refuse)
    return rule
