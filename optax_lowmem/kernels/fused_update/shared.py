"""The slots that the elements of a block share: their step, and what it gives each element.

A block may span its leaf, so XLA reads the gradient once for the means. What is left is the step
of a small leaf, with one element a block, and goes the way of every other.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from optax_lowmem._core.reductions import mean_of_blocks
from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.kernels.fused_update import reference
from optax_lowmem.kernels.fused_update.dispatch import fused_updates
from optax_lowmem.kernels.fused_update.plan import LeafPlan, LeafState


def shared_updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    corrections: Sequence[jax.Array],
    states: Sequence[LeafState],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    alive: jax.Array,
    implementation: str | None = None,
) -> list[tuple[jax.Array, LeafState]]:
    """(What each block gives its elements, new state of the shared slots) of every leaf.

    Args:
      rule: the optimizer's arithmetic, with shared slots.
      plans: the leaves' static choices.
      gradients: one a leaf.
      weights: parameters, or None each.
      corrections: of the parameters.
      states: the stored shared slots, of `Block.mean_shape`; their corrections are not used.
      h: f32 hyperparameters.
      keys: uint32 [leaves], for the rounding of each leaf in this step.
      alive: a traced True (see `packed`).
      implementation: as of `fused_updates`.
    """
    own = rule.of_blocks
    assert own is not None
    rows = zip(plans, gradients, weights, corrections, strict=True)
    means = [_mean(plan.nameless, *arrays, h) for plan, *arrays in rows]
    flat = [s._replace(slots=tuple(x.reshape(-1) for x in s.slots)) for s in states]
    # the means have the factors of the gradient in them
    found = fused_updates(
        own, [plan.of_blocks for plan in plans], means, [None] * len(plans), flat,
        {name: value for name, value in h.items() if name != "gradient_scale"}, keys, alive,
        implementation,
    )  # fmt: skip
    shaped = []
    for plan, (given, state) in zip(plans, found, strict=True):
        assert plan.block is not None
        shape = plan.block.mean_shape(plan.shape)
        slots = tuple(x.reshape(shape) for x in state.slots)
        shaped.append((given.reshape(shape), state._replace(slots=slots)))
    return shaped


@functools.partial(jax.jit, static_argnames=("plan",))  # traced once for leaves of one shape
def _mean(
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    correction: jax.Array,
    h: Mapping[str, jax.Array],
) -> jax.Array:
    """Mean of g^2 over each block, f32 [blocks]."""
    assert plan.block is not None
    gradient, _ = reference.gradient_and_weight(plan, g, p, correction, h)
    return jnp.reshape(mean_of_blocks(plan.block, gradient * gradient), -1)
