"""The fused step in programs that call `update` and add."""

from typing import Any

import jax
import optax

from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim.wrappers import chain


class _Sum:
    """An update whose sum with its parameter is already computed."""

    def __init__(self, new: jax.Array):
        self.new, self.shape, self.dtype = new, new.shape, new.dtype

    def __radd__(self, old: jax.Array) -> jax.Array:
        if (old.shape, old.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"an update of fuse_updates for a parameter {self.dtype}{list(self.shape)} is "
                f"added to {old.dtype}{list(old.shape)}: add it to the parameter that `update` took"
            )
        return self.new


def fuse_updates(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Give the fused step to a program that calls `update` and adds, such as a trainer.

    `update` takes `step`, and returns objects that give its new parameters where they are added to
    the old ones: `optax.apply_updates(params, updates)`, `eqx.apply_updates(model, updates)`. They
    are no arrays: do nothing else with them, in particular no wrapper around this one and no norms,
    and add them in the function, jitted or not, that calls `update`.

    Args:
      tx: the whole optimizer, any optax transformation.

    Returns:
      An optax transformation with the state of `tx`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.fuse_updates(lowmem.flash_adamw(1e-3))
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> @jax.jit
      ... def train_step(params, state, grads):
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = train_step(params, state, params)
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        new, state = chain.step(tx, updates, state, params, **extra)
        return jax.tree.map(_Sum, new), state

    return optax.GradientTransformationExtraArgs(tx.init, update)
