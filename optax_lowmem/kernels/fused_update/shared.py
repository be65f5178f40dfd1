"""The slots that the elements of a block share: their step, and what it gives each element.

A block may span the leaf, so this is a pass over the gradient before the elements' own step. XLA
makes it, everywhere: a reduction, and arithmetic on few values.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._core import random
from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.codecs import decode_array, encode_array
from optax_lowmem.kernels.fused_update import reference
from optax_lowmem.kernels.fused_update.plan import LeafPlan, SharedState, SlotPlan

Shared = tuple[dict[str, jax.Array], SharedState]


def shared_updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    corrections: Sequence[jax.Array],
    states: Sequence[SharedState],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
) -> list[Shared]:
    """`shared_update` of every leaf."""
    rows = zip(plans, gradients, weights, corrections, states, strict=True)
    return [
        _compiled(rule, plan.nameless, *arrays, h, keys[i]) if plan.shared else ({}, SharedState())
        for i, (plan, *arrays) in enumerate(rows)
    ]


def shared_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    correction: jax.Array,
    state: SharedState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> Shared:
    """(What `rule.share` gives the step, one value a block; the new state) of one leaf.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices, with shared slots.
      g: gradient, f32 or 16-bit, of the parameter's shape.
      p: parameter; None for a bare direction.
      correction: of the parameter.
      state: the stored slots.
      h: f32 scalars.
      key: a uint32 key for the rounding of this leaf in this step.
    """
    shared = plan.shared
    assert shared is not None
    gradient, _ = reference.gradient_and_weight(plan, g, p, correction, h)
    rows = zip(shared.slots, state.slots, state.scales, strict=True)
    values = {slot.name: _decode(plan, slot, *stored) for slot, *stored in rows}
    values, given = rule.share(gradient, values, h, shared.block)
    stored = [
        _encode(plan, slot, values[slot.name], old, key)
        for slot, old in zip(shared.slots, state.scales, strict=True)
    ]
    slots, scales = zip(*stored, strict=True)
    return given, SharedState(slots, scales)


# traced once for leaves of one shape
_compiled = jax.jit(shared_update, static_argnames=("rule", "plan"))


def _decode(plan: LeafPlan, slot: SlotPlan, stored: jax.Array, scales: jax.Array) -> jax.Array:
    if slot.codec is None:
        return stored.astype(jnp.float32)
    row = decode_array(slot.codec, stored.reshape(-1), scales, plan.group_size)
    return row.reshape(stored.shape)


def _encode(
    plan: LeafPlan, slot: SlotPlan, value: jax.Array, placeholder: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if slot.codec is None:
        return value.astype(slot.dtype), placeholder
    row, noise = value.reshape(-1), None
    if slot.stochastic:
        noise = random.uniforms(key, row.shape, plan.group_size, slot.name)
    codes, scales = encode_array(slot.codec, row, plan.group_size, noise)
    return codes.reshape(value.shape), scales
