"""Updates have no derivative: codes are integers, and what is left of a split is rounded away."""

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
def _refuse(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    raise TypeError(
        "an update that keeps 8-bit state or splits master weights has no derivative, and JAX "
        "would give a wrong one. Take the gradient of the loss alone, with the update outside of "
        "it or its arguments under jax.lax.stop_gradient; for gradients through training (of a "
        "learning rate, of initial weights) use optax's own optimizer, or "
        "storage=lowmem.Storage(mu=None, nu=None, master_weight_bits=None) on f32 weights."
    )
