"""Which implementation takes a leaf: decided when tracing, by `supported`, never by catching."""

import functools
from collections.abc import Mapping

import jax

from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.kernels.fused_update import packed, reference
from optax_lowmem.kernels.fused_update.plan import LeafPlan, LeafState


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
    alive: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """`reference.fused_update` by the fastest implementation for the backend.

    Compiled once for leaves of one shape and plan, also outside of a jit.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices.
      g: gradient.
      p: parameter or None.
      state: stored state.
      h: f32 hyperparameters.
      key: for the rounding of this leaf in this step.
      alive: a traced True (see `packed`).
    """
    if packed.supported(plan, jax.default_backend()) is None:
        return packed.fused_update(rule, plan, g, p, state, h, key, alive)
    return reference.fused_update(rule, plan, g, p, state, h, key)
