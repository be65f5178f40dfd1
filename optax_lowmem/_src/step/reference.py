"""The step of a leaf in plain jnp: the specification of every backend, and the path without one.

A step is `advance` (decode the slots, then the rule), `encode` of the new slots, and `move` of the
weight and its correction. Every implementation calls these, and differs in what it does between
them; arrays are those of a leaf (`Whole`), or of a kernel's tile (`Tile`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lowmem._src.codecs import BitSplit, GroupCodec, MasterSplit, UlpSplit
from optax_lowmem._src.core import groups, numerics, random
from optax_lowmem._src.step.plan import LeafPlan, LeafState, SlotPlan
from optax_lowmem._src.step.rule import OF_BLOCK, UpdateRule

MASTER = "correction"  # its name among the slots in the random hash
Noise = tuple[jax.Array, jax.Array]  # of `random.noise_bits`
Units = Mapping[str, Any]  # of each codec what `dequantize` takes of each group
Measured = Mapping[str, tuple[jax.Array, Any]]  # of each codec its scales, and divisors of codes


# ---- arrays in groups ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Whole:
    """Arrays of a whole leaf, [..., n], with groups along the last axis."""

    plan: LeafPlan
    exists = None  # every element is there

    @property
    def group_size(self) -> int:
        """Elements of a group."""
        return self.plan.group_size

    @property
    def length(self) -> int:
        """Elements along the last axis."""
        return self.plan.shape[-1]

    def to_groups(self, x: jax.Array) -> jax.Array:
        """An array as [..., groups, lanes]."""
        return groups.to_groups(x, self.group_size)

    def to_elements(self, of_groups: Any) -> Any:
        """Values of groups for each of their elements."""
        return groups.spread_tree(of_groups, self.length, self.group_size)

    def operands(self, h: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Hyperparameters that broadcast to the elements."""
        if self.plan.block is None:
            return h
        return {**h, OF_BLOCK: self.plan.block.of_elements(h[OF_BLOCK], self.plan.shape)}

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Codes of what is stored."""
        return codec.unpack(stored, self.length)

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Return what is stored of codes."""
        return codec.pack(codes)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Arrays of a kernel's tile, [groups, lanes], with hyperparameters as its kernel loads them.

    Attributes:
      group_size: elements of a group.
      length: of the last axis, which has one group.
    """

    group_size: int
    length: int

    def to_groups(self, x: jax.Array) -> jax.Array:
        """A tile is one already."""
        return x

    def to_elements(self, of_groups: Any) -> Any:
        """Values of groups for each of their elements."""
        return jax.tree.map(lambda x: x[..., None], of_groups)

    def operands(self, h: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Hyperparameters that broadcast to the elements."""
        return h

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Codes of what is stored."""
        return codec.unpack(stored, self.length)

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Return what is stored of codes."""
        return codec.pack(codes)


class Layout(Protocol):
    """The layout of a step's arrays: a leaf's (`Whole`), a kernel's tile (`Tile`) or registers."""

    @property
    def group_size(self) -> int:
        """Neighbours on the last axis that have one number of the random bits R."""

    @property
    def length(self) -> int:
        """Elements along the last axis."""

    def to_groups(self, x: jax.Array) -> jax.Array:
        """An array as [..., groups, lanes]."""

    def to_elements(self, of_groups: Any) -> Any:
        """Values of groups for each of their elements."""

    def operands(self, h: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Hyperparameters that broadcast to the elements."""

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Codes of what is stored."""

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Return what is stored of codes."""


# ---- decode and advance --------------------------------------------------------------------------


def decode(
    plan: LeafPlan, state: LeafState, layout: Layout | None = None, units: Units | None = None
) -> dict[str, jax.Array]:
    """The f32 values of a leaf's slots; `units` of its codecs, where they are there already."""
    layout, scales = layout or Whole(plan), iter(state.scales)
    values = {}
    for slot, stored in zip(plan.slots, state.slots, strict=True):
        if slot.codec is None:
            values[slot.name] = stored.astype(jnp.float32)
            continue
        unit = slot.codec.units(next(scales)) if units is None else units[slot.name]
        unit = layout.to_elements(unit)
        values[slot.name] = slot.codec.dequantize(layout.unpack(slot.codec, stored), unit)
    return values


def advance(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    layout: Layout | None = None,
    units: Units | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the step to subtract from the master weight, and the new values of the slots.

    Without a weight, the step is the bare direction of the rule.
    """
    layout = layout or Whole(plan)
    h = layout.operands(h)
    values = decode(plan, state, layout, units)
    g, weight = gradient_and_weight(plan, g, p, state.correction, h)
    direction, values = rule.update(g, values, h)
    if weight is None:
        return direction, values
    step = h["lr"] * direction
    return (step + h["decay"] * weight if plan.decays and "decay" in h else step), values


def gradient_and_weight(
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    correction: jax.Array | None,
    h: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradient that the rule takes, and the master weight or None."""
    g = numerics.widen(g)
    if "gradient_scale" in h:
        g = g * h["gradient_scale"]
    if p is None:
        return g, None
    weight = numerics.widen(p)
    if plan.split is not None and correction is not None:
        weight = plan.split.join(p, correction)
    return g + h["l2"] * weight if plan.decays and "l2" in h else g, weight


def prepare(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Operands of a rule that prepares for the step of a whole leaf, which go before `h`."""
    if rule.prepares != "leaf":
        return {}
    gradient, _ = gradient_and_weight(plan, g, p, state.correction, h)
    return rule.prepare(gradient, decode(plan, state), h)[0]


# ---- encode --------------------------------------------------------------------------------------


def measure(plan: LeafPlan, values: Mapping[str, jax.Array]) -> Measured:
    """Stored scales and the divisors of codes, of each slot that has a codec."""
    layout = Whole(plan)
    return {
        slot.name: slot.codec.measure(layout.to_groups(values[slot.name]))
        for slot in plan.slots
        if slot.codec is not None
    }


def slot_noise(slot: SlotPlan, noise: Noise | None, layout: Layout) -> jax.Array | None:
    """The uniforms that a slot's codes are rounded with; None rounds to nearest."""
    if noise is None or not slot.stochastic:
        return None
    return random.join_bits(*noise, layout.group_size, slot.name)


def encode(
    plan: LeafPlan,
    values: Mapping[str, jax.Array],
    noise: Noise | None,
    layout: Layout | None = None,
    measured: Measured | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Stored slots of their new values, and the scales of those that have a codec.

    Args:
      plan: the leaf's static choices.
      values: f32.
      noise: for codes that are rounded stochastically.
      layout: of the arrays; by default those of the whole leaf.
      measured: scales and divisors, where `measure` has given them already.
    """
    layout = layout or Whole(plan)
    slots, scales = [], []
    for slot in plan.slots:
        value = values[slot.name]
        if slot.codec is None:
            slots.append(value.astype(slot.dtype))
            continue
        uniforms = slot_noise(slot, noise, layout)
        if measured is None:
            stored, divisor = slot.codec.measure(layout.to_groups(value))
        else:
            stored, divisor = measured[slot.name]
        codes = slot.codec.quantize(value, layout.to_elements(divisor), uniforms)
        slots.append(layout.pack(slot.codec, codes))
        scales.append(stored)
    return tuple(slots), tuple(scales)


# ---- move ----------------------------------------------------------------------------------------


def move(
    plan: LeafPlan,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array | None,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The weight where it lands and its correction; if it does not, the update, if not `direct`.

    `emit` makes an update of it. `noise` is of `master_noise`, or of `random.leaf_bits`.
    """
    if plan.split is not None and correction is not None:
        return land(plan.split, p, step, correction, plan.update_dtype, plan.direct, noise)
    if plan.rounds:
        assert noise is not None  # `stochastic_master` asks for it
        weight = numerics.narrow_stochastically(numerics.widen(p) - step, noise)
        if plan.direct and plan.update_dtype != jnp.float32:
            weight = _reached(weight, p, plan.update_dtype)
        return weight, correction
    update = (-step).astype(plan.update_dtype)
    return (optax.apply_updates(p, update) if plan.direct else update), correction


def emit(plan: LeafPlan, p: jax.Array | None, moved: jax.Array) -> jax.Array:
    """The update of `move`'s weight, or the new weight of a plan that is `direct`.

    Without a weight it is the rule's direction in the plan's dtype of updates.
    """
    if p is None:
        return moved.astype(plan.update_dtype)
    if plan.direct or not plan.lands:
        return moved
    return update_towards(moved, p, plan.update_dtype)


def master_noise(
    plan: LeafPlan, noise: Noise | None, layout: Layout | None = None
) -> jax.Array | None:
    """The random bits of master weights from `random.noise_bits`; None for a plan without."""
    if noise is None or not plan.stochastic_master:
        return None
    return random.slot_bits(*noise, (layout or Whole(plan)).group_size, MASTER)


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
    old = split.join(p, correction)
    master = old - step
    if update_dtype == jnp.float32 and (direct or isinstance(split, BitSplit)):
        weight, kept = split.split(master, p.dtype, noise)
        if not direct:
            kept = jnp.where(_missed(master, p), jnp.zeros((), kept.dtype), kept)
    else:
        target = split.round(master, p.dtype, noise)
        reached = _reached(target, p, update_dtype)
        weight, kept = reached if direct else target, split.correction(master, reached, noise)
    if isinstance(split, UlpSplit):  # a master half an ulp from p is split in two ways: keep p's
        unmoved = master == old
        weight, kept = jnp.where(unmoved, p, weight), jnp.where(unmoved, correction, kept)
    return weight, kept


def _missed(master: jax.Array, p: jax.Array) -> jax.Array:
    """Return a mask of the elements where p + (weight - p) in f32 may not be the weight.

    The error of that sum, a wrong low digit of p included, is under 2^-24 |p|. It changes only
    weights that are small beside p: for bf16, under 2^-16 |p|.
    """
    digits = int(jnp.finfo(p.dtype).nmant) + 1
    return jnp.abs(master) < jnp.abs(numerics.widen(p)) * jnp.float32(2.0 ** (digits - 24))


def _towards(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 of the update in a dtype; rounded by hand, since XLA drops an `astype` round trip."""
    # -0.0, which leaves even a -0.0 alone, where nothing changes
    exact = -(numerics.widen(p) - numerics.widen(target))
    return exact if dtype == jnp.float32 else numerics.round_to(exact, dtype)


def _reached(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The weight where `optax.apply_updates` arrives with that update."""
    return numerics.narrow(numerics.widen(p) + _towards(target, p, dtype), p.dtype)


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


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
    two_passes: bool = False,
) -> tuple[jax.Array, LeafState]:
    """Update of the parameter (itself anew for a `direct` plan), and the new state, of one leaf.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices.
      g: gradient, f32 or 16-bit, of the parameter's shape.
      p: parameter; None for a bare direction (no `lr` in h).
      state: stored slots, scales, correction.
      h: f32 scalars (see `prepare`; `OF_BLOCK` has a value a block): the rule's own,
        `gradient_scale` (a factor of the gradient) where there is one, and with a parameter `lr`,
        `decay` (the share of the weight taken off) and `l2` (added to the gradient times the
        weight).
      key: a uint32 key for the rounding of this leaf in this step; a pair for a part of one.
      two_passes: whether to compute the new slots once for the groups' maxima and once for the
        codes. XLA on a GPU otherwise stores the new slots in f32 between the two, since it does
        not fuse a reduction with what is broadcast from it; reading the codes twice moves fewer
        bytes. Measured: docs/results/gpu_speed.md.
    """
    step, values = advance(rule, plan, g, p, state, h)
    measured = None
    if two_passes:
        measured = measure(plan, values)
        noise = random.noise_bits(key, plan.shape, plan.group_size) if plan.noisy else None
        # behind the barrier the same expressions are others, so XLA does not share their values
        g, p, state, measured, noise = lax.optimization_barrier((g, p, state, measured, noise))
        step, values = advance(rule, plan, g, p, state, h)
        bits = master_noise(plan, noise)
    else:
        noise = random.noise_bits(key, plan.shape, plan.group_size) if plan.stochastic else None
        bits = None
        if p is not None and plan.stochastic_master:
            bits = random.leaf_bits(key, plan.shape, plan.group_size, MASTER)
    slots, scales = encode(plan, values, noise, measured=measured)
    correction = state.correction
    if p is not None:
        step, correction = move(plan, p, step, correction, bits)
    return emit(plan, p, step), LeafState(slots, scales, correction)
