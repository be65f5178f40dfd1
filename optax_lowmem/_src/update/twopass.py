"""The step of a leaf for XLA on a GPU: one pass for the group maxima, one for everything else.

Left to itself XLA computes the new slots in a kernel of their own and stores them in f32, since a
reduction and what is broadcast from it do not fuse. With a barrier between them it reads the codes
twice instead, which are an eighth of that. Measured: docs/results/gpu_speed.md.
"""

from collections.abc import Mapping

import jax
from jax import lax

from optax_lowmem._src.core import random
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.update import reference
from optax_lowmem._src.update.plan import LeafPlan, LeafState


def supported(plan: LeafPlan, platform: str) -> str | None:
    """Return the reason why a leaf does not take this path, or None where it does."""
    if platform != "gpu":
        return f"two passes are for XLA's GPU backend, not {platform}"
    if not plan.grouped:
        return "no slot is compressed: plain elementwise work, which XLA fuses well"
    return None


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """As `reference.fused_update`."""
    measured = reference.measure(plan, reference.advance(rule, plan, g, p, state, h)[1])
    noise = random.noise_bits(key, plan.shape, plan.group_size) if plan.noisy else None
    # what comes after the barrier is not the same expression as before it: nothing is shared
    g, p, state, measured, noise = lax.optimization_barrier((g, p, state, measured, noise))
    step, values = reference.advance(rule, plan, g, p, state, h)
    slots, scales = reference.encode(plan, values, state.scales, noise, measured=measured)
    correction = state.correction
    if p is not None:
        own = reference.master_noise(plan, noise)
        step, correction = reference.move(plan, p, step, correction, own)
    return reference.emit(plan, p, step), LeafState(slots, scales, correction)
