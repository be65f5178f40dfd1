"""The step of a leaf in plain jnp: the specification of every backend, and the path without one."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.codecs import BitSplit, MasterSplit, decode_array, encode_array
from optax_lowmem._src.core import groups, numerics, random
from optax_lowmem._src.core.rules import OF_BLOCK, UpdateRule
from optax_lowmem._src.update.plan import LeafPlan, LeafState, SlotPlan

MASTER = "correction"  # its name among the slots in the random hash


def decode(plan: LeafPlan, state: LeafState) -> dict[str, jax.Array]:
    """The f32 values of a leaf's slots."""
    rows = zip(plan.slots, state.slots, state.scales, strict=True)
    return {
        slot.name: stored.astype(jnp.float32)
        if slot.codec is None
        else decode_array(slot.codec, stored, scales, plan.group_size)
        for slot, stored, scales in rows
    }


def advanced(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`advance` from the state as it is stored."""
    if plan.block is not None:
        h = {**h, OF_BLOCK: plan.block.spread(h[OF_BLOCK], plan.shape)}
    return advance(rule, plan, g, p, state.correction, decode(plan, state), h)


def measured(
    plan: LeafPlan, values: Mapping[str, jax.Array]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Stored scales and the divisors of codes, of each slot that has a codec."""
    return {
        slot.name: slot.codec.measure(groups.to_groups(values[slot.name], plan.group_size))
        for slot in plan.slots
        if slot.codec is not None
    }


def advance(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    correction: jax.Array,
    values: Mapping[str, jax.Array],
    h: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the step to subtract from the master weight, and the new values of the slots.

    Without a weight, the step is the bare direction of the rule.
    """
    g, weight = gradient_and_weight(plan, g, p, correction, h)
    direction, values = rule.update(g, values, h)
    if weight is None:
        return direction, values
    step = h["lr"] * direction
    return (step + h["decay"] * weight if plan.decays and "decay" in h else step), values


def gradient_and_weight(
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    correction: jax.Array,
    h: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradient that the rule takes, and the master weight or None."""
    g = numerics.widen(g)
    if "gradient_scale" in h:
        g = g * h["gradient_scale"]
    if p is None:
        return g, None
    weight = numerics.widen(p) if plan.split is None else plan.split.join(p, correction)
    return g + h["l2"] * weight if plan.decays and "l2" in h else g, weight


def of_leaf(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """The hyperparameters of one leaf: `h`, and what the rule must measure of all of it."""
    gradient, _ = gradient_and_weight(plan, g, p, state.correction, h)
    return {**h, **rule.measure(gradient, decode(plan, state), h)}


def land(
    split: MasterSplit,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    update_dtype: jnp.dtype,
    direct: bool,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(weight, its correction) for master weight - step; `noise` is of `random.slot_bits`.

    The weight is the one that an update of `update_dtype` reaches where the step is `direct`, else
    the one to aim it at. `optax.apply_updates` computes p + update in f32 and rounds to p's dtype,
    and the correction is that of what comes out, so weight and correction always belong together.
    """
    master = split.join(p, correction) - step
    if update_dtype == jnp.float32 and (direct or isinstance(split, BitSplit)):
        weight, kept = split.split(master, p.dtype, noise)
        if not direct:
            kept = jnp.where(_missed(master, p), jnp.zeros((), kept.dtype), kept)
        return weight, kept
    target = split.round(master, p.dtype, noise)
    reached = numerics.widen(p) + _towards(target, p, update_dtype)
    reached = numerics.narrow(reached, p.dtype)
    return reached if direct else target, split.correction(master, reached, noise)


def _missed(master: jax.Array, p: jax.Array) -> jax.Array:
    """Return a mask of the elements where p + (weight - p) in f32 may not be the weight.

    The error of that sum, a wrong low digit of p included, is under 2^-24 |p|. It changes only
    weights that are small beside p: for bf16, under 2^-16 |p|.
    """
    digits = int(jnp.finfo(p.dtype).nmant) + 1
    return jnp.abs(master) < jnp.abs(numerics.widen(p)) * jnp.float32(2.0 ** (digits - 24))


def landed(
    plan: LeafPlan,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`land` for a plan with a split."""
    assert plan.split is not None
    return land(plan.split, p, step, correction, plan.update_dtype, plan.direct, noise)


def master_noise(
    plan: LeafPlan, noise: tuple[jax.Array, jax.Array] | None, group_size: int | None = None
) -> jax.Array | None:
    """The random bits of master weights from `random.noise_bits`; None for a plan without."""
    if noise is None or not plan.stochastic_master:
        return None
    return random.slot_bits(*noise, group_size or plan.group_size, MASTER)


def _towards(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 of the update in a dtype; rounded by hand, since XLA drops an `astype` round trip."""
    # -0.0, which leaves even a -0.0 alone, where nothing changes
    exact = -(numerics.widen(p) - numerics.widen(target))
    return exact if dtype == jnp.float32 else numerics.round_to(exact, dtype)


def update_towards(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The update that takes a weight to another."""
    return _towards(target, p, dtype).astype(dtype)


def split_update(
    split: MasterSplit | None,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    update_dtype: jnp.dtype,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The update to emit for master weight - step, and the new correction."""
    if split is None:
        return (-step).astype(update_dtype), correction
    target, correction = land(split, p, step, correction, update_dtype, False, noise)
    return update_towards(target, p, update_dtype), correction


def moved(
    plan: LeafPlan,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Update, or new weight for a plan that is `direct`, and the new correction."""
    if not plan.direct:
        return split_update(plan.split, p, step, correction, plan.update_dtype, noise)
    if plan.split is None:
        return optax.apply_updates(p, (-step).astype(plan.update_dtype)), correction
    return landed(plan, p, step, correction, noise)


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """Update of the parameter (itself anew for a `direct` plan), and the new state, of one leaf.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices.
      g: gradient, f32 or 16-bit, of the parameter's shape.
      p: parameter; None for a bare direction (no `lr` in h).
      state: stored slots, scales, correction.
      h: f32 scalars (see `of_leaf`; `OF_BLOCK` has a value a block): the rule's own,
        `gradient_scale` (a factor of the gradient) where there is one, and with a parameter `lr`,
        `decay` (the share of the weight taken off) and `l2` (added to the gradient times the
        weight).
      key: a uint32 key for the rounding of this leaf in this step; a pair for a part of one.
    """
    update, values = advanced(rule, plan, g, p, state, h)
    slots, scales = [], []
    for slot, old in zip(plan.slots, state.scales, strict=True):
        stored, scale = encode(plan, slot, values[slot.name], old, key)
        slots.append(stored)
        scales.append(scale)
    correction = state.correction
    if p is not None:
        noise = None
        if plan.stochastic_master:
            noise = random.leaf_bits(key, plan.shape, plan.group_size, MASTER)
        update, correction = moved(plan, p, update, correction, noise)
    return update, LeafState(tuple(slots), tuple(scales), correction)


def encode(
    plan: LeafPlan, slot: SlotPlan, value: jax.Array, placeholder: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stored slot and scales of its new value; without a codec the old scales' placeholder.

    (A new one would be a copy from a constant: one launch a leaf and step.)
    """
    if slot.codec is None:
        return value.astype(slot.dtype), placeholder
    noise = None
    if slot.stochastic:
        noise = random.uniforms(key, plan.shape, plan.group_size, slot.name)
    return encode_array(slot.codec, value, plan.group_size, noise)
