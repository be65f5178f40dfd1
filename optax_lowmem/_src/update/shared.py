"""The slots that the elements of a block share: their step, and what it gives each element.

A block may span its leaf, so the gradient is read once for the means. What is left is the step of a
small leaf, with one element a block, and goes the way of every other.
"""

import functools
from collections.abc import Mapping, Sequence

import jax

from optax_lowmem._src.core import explicit
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.update import block_means
from optax_lowmem._src.update.dispatch import fused_updates
from optax_lowmem._src.update.plan import LeafPlan, LeafState


def shared_updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    states: Sequence[LeafState],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    implementation: str | None = None,
) -> list[tuple[jax.Array, LeafState]]:
    """(What each block gives its elements, new state of the shared slots) of every leaf.

    Args:
      rule: the optimizer's arithmetic, with shared slots.
      plans: the leaves' static choices.
      gradients: one a leaf.
      states: the stored shared slots, of `Block.mean_shape`; their corrections are not used.
      h: f32 hyperparameters; weight decay is not part of the gradient (no `l2`).
      keys: uint32 [leaves], for the rounding of each leaf in this step.
      implementation: as of `fused_updates`.
    """
    # where blocks lie on several devices XLA finds it out, on Explicit axes too
    lies = [jax.tree.map(explicit.sharding_of, (s.slots[0], s)) for s in states]
    work = functools.partial(_updates, rule, plans, implementation)
    return explicit.left_to_xla(work, lies, gradients, states, h, keys)


def _updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    implementation: str | None,
    gradients: Sequence[jax.Array],
    states: Sequence[LeafState],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
) -> list[tuple[jax.Array, LeafState]]:
    """`shared_updates` of what it depends on."""
    own = rule.of_blocks
    assert own is not None
    blocks = [plan.block or Block() for plan in plans]
    scale = h.get("gradient_scale")
    means = block_means.means_of_squares(blocks, gradients, scale, implementation)
    flat = [s._replace(slots=tuple(x.reshape(-1) for x in s.slots)) for s in states]
    # the means have the factors of the gradient in them
    found = fused_updates(
        own, [plan.of_blocks for plan in plans], [mean.reshape(-1) for mean in means],
        [None] * len(plans), flat,
        {name: value for name, value in h.items() if name != "gradient_scale"}, keys,
        implementation,
    )  # fmt: skip
    shaped = []
    for mean, (given, state) in zip(means, found, strict=True):
        slots = tuple(x.reshape(mean.shape) for x in state.slots)
        shaped.append((given.reshape(mean.shape), state._replace(slots=slots)))
    return shaped
