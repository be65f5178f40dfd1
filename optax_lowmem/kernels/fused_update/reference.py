"""The step of a leaf in plain jnp: the specification of every backend, and the path without one."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from optax_lowmem._core import groups, numerics, random
from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.codecs import MasterSplit
from optax_lowmem.kernels.fused_update.plan import LeafPlan, LeafState, SlotPlan


def _view(plan: LeafPlan, x: jax.Array) -> jax.Array:
    return groups.to_groups(x, plan.group_size) if plan.grouped else x


def _unview(plan: LeafPlan, x: jax.Array) -> jax.Array:
    return groups.from_groups(x, plan.shape) if plan.grouped else x


def _decode(plan: LeafPlan, slot: SlotPlan, stored: jax.Array, scales: jax.Array) -> jax.Array:
    if slot.codec is None:
        return _view(plan, stored.astype(jnp.float32))
    return slot.codec.decode(_view(plan, stored), scales)


def _encode(
    plan: LeafPlan, slot: SlotPlan, value: jax.Array, noise_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if slot.codec is None:
        return _unview(plan, value).astype(slot.dtype), jnp.zeros((), jnp.float32)
    noise = random.uniforms(noise_key, value.shape) if slot.stochastic else None
    codes, scales = slot.codec.encode(value, noise)
    return _unview(plan, codes), scales


def land(
    split: MasterSplit | None,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    update_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """The update to emit for master weight - step, and the correction of what it lands on.

    `optax.apply_updates` computes p + update in f32 and rounds to p's dtype. For f32 updates that
    is the new weight itself unless it is under 2^-16 of the old one; the correction is taken
    against the sum in every case, so weight and correction always belong together.
    """
    if split is None:
        return (-step).astype(update_dtype), correction
    weight = numerics.widen(p)
    master = split.join(p, correction) - step
    target = numerics.widen(split.round(master, p.dtype))
    update = (target - weight).astype(update_dtype)
    landed = numerics.round_to(weight + numerics.widen(update), p.dtype).astype(p.dtype)
    return update, split.correction(master, landed)


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    noise_keys: tuple[jax.Array, ...],
) -> tuple[jax.Array, LeafState]:
    """Update to be added to the parameter, and the new state, of one leaf.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices.
      g: gradient, f32 or 16-bit, of the parameter's shape.
      p: parameter; None for a bare direction (no `lr` in h).
      state: stored slots, scales, correction.
      h: f32 scalars: the rule's own, and with a parameter `lr`, `decay` (the share of the weight
        taken off) and `l2` (added to the gradient times the weight).
      noise_keys: a uint32 key for each slot's rounding.
    """
    g = numerics.widen(g)
    weight = None
    if p is not None:
        weight = numerics.widen(p) if plan.split is None else plan.split.join(p, state.correction)
        if plan.decays and "l2" in h:
            g = g + h["l2"] * weight
    slots = zip(plan.slots, state.slots, state.scales, strict=True)
    values = {slot.name: _decode(plan, slot, stored, scales) for slot, stored, scales in slots}
    direction, values = rule.update(_view(plan, g), values, h)
    encoded = [
        _encode(plan, slot, values[slot.name], key)
        for slot, key in zip(plan.slots, noise_keys, strict=True)
    ]
    update, correction = _unview(plan, direction), state.correction
    if p is not None:
        step = h["lr"] * update
        if weight is not None and plan.decays and "decay" in h:
            step = step + h["decay"] * weight
        update, correction = land(plan.split, p, step, correction, plan.update_dtype)
    codes, scales = zip(*encoded, strict=True) if encoded else ((), ())
    return update, LeafState(codes, scales, correction)
