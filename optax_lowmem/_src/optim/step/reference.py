"""The step of a leaf in plain jnp: the specification of every backend, and the XLA path.

A step is `advance` (decode the slots, then the rule), `move` of the weight and its correction,
`feed_back` of the weight's rounding error, and `encode_slots` of the new values. Every
implementation calls these functions, the first three through `advance_weight`, and differs only in
what it does between them, and in the `Layout` of its arrays.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import BitSplit, Layout, MasterSplit, UlpSplit
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Tree
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import OF_BLOCK, AnyHyperparameters, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, update_dtype

MASTER = "correction"  # the slot name of the master weight in the random hash
_LEAST_RATE = 1 / 16
Units = Mapping[str, PyTree]  # slot name -> the scales in the form that `dequantize` takes
Measured = Mapping[str, tuple[PyTree, PyTree]]  # slot name -> (stored scales, divisors)


class TileLayout(Layout):
    """Layout of a kernel's tile, [groups, lanes]: each row is one group."""

    def to_groups(self, x: jax.Array) -> jax.Array:
        return x

    def to_elements(self, of_groups: Tree) -> Tree:
        return jax.tree.map(lambda x: x[..., None], of_groups)


def whole(plan: LeafPlan) -> Layout:
    """Return the layout of a whole leaf, which may be 0-d."""
    return Layout(plan.group_size, plan.shape[-1] if plan.shape else 1)


def decode(plan: LeafPlan, leaf: Leaf, layout: Layout, units: Units | None = None) -> Arrays:
    """Decode the slots of a leaf to f32; `units` are its decoded scales, if computed before."""
    scales = iter(leaf.scales)
    values = {}
    for slot, stored in zip(plan.slots, leaf.slots, strict=True):
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
    leaf: Leaf,
    h: Arrays,
    layout: Layout | None = None,
    units: Units | None = None,
) -> tuple[jax.Array, Arrays]:
    """Return the step to subtract from the master weight, and the new f32 values of the slots.

    Without a weight, the step is the rule's direction. In a kernel's layout, `leaf.of_block`
    broadcasts to the elements.
    """
    if leaf.of_block is not None:
        h = _with_block(plan, leaf, h, layout)
    values = decode(plan, leaf, layout or whole(plan), units)
    g, weight = gradient_and_weight(plan, leaf, h)
    direction, values = rule.update(g, values, h)
    if weight is None:
        return direction, values
    step = h["lr"] * direction
    return (step + h["decay"] * weight if plan.decays and "decay" in h else step), values


def _with_block(plan: LeafPlan, leaf: Leaf, h: Arrays, layout: Layout | None) -> Arrays:
    """Add a leaf's block-wise operand, broadcast to its elements, to the hyperparameters."""
    of_block = leaf.of_block
    if layout is None and plan.block is not None:
        of_block = plan.block.of_elements(of_block, plan.shape)
    return {**h, OF_BLOCK: of_block}


def advance_weight(
    rule: UpdateRule,
    plan: LeafPlan,
    leaf: Leaf,
    h: Arrays,
    random_bits: jax.Array | None,
    layout: Layout | None = None,
    units: Units | None = None,
) -> tuple[jax.Array, jax.Array | None, Arrays]:
    """Return the result of `move`, the new correction and the new f32 values of the slots.

    Without a weight, return the rule's direction instead. `random_bits` are as in `move`.
    """
    step, values = advance(rule, plan, leaf, h, layout, units)
    if leaf.p is None:
        return step, leaf.correction, values
    moved, correction = move(plan, leaf.p, step, leaf.correction, random_bits, layout)
    if plan.feeds_back:
        if leaf.of_block is not None:
            h = _with_block(plan, leaf, h, layout)
        values = feed_back(rule, plan, leaf.p, step, moved, values, h, layout or whole(plan))
    return moved, correction, values


def gradient_and_weight(
    plan: LeafPlan, leaf: Leaf, h: Arrays
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradient as the rule takes it, and the master weight or None."""
    g = numerics.widen(leaf.g)
    if "gradient_scale" in h:
        g = g * h["gradient_scale"]
    if leaf.p is None:
        return g, None
    weight = numerics.widen(leaf.p)
    if plan.split is not None and leaf.correction is not None:
        weight = plan.split.join(leaf.p, leaf.correction)
    return g + h["l2"] * weight if plan.decays and "l2" in h else g, weight


def prepare(rule: UpdateRule, plan: LeafPlan, leaf: Leaf, h: Arrays) -> Arrays:
    """Return the operands that a rule computes from a whole leaf; they override entries of `h`."""
    if rule.prepares != "leaf":
        return {}
    gradient, _ = gradient_and_weight(plan, leaf, h)
    return rule.prepare(gradient, decode(plan, leaf, whole(plan)), h)[0]


def measure(plan: LeafPlan, values: Arrays) -> Measured:
    """Return (stored scales, divisors) of each slot of a whole leaf that has a codec."""
    return {
        slot.name: slot.codec.measure(whole(plan).to_groups(values[slot.name]))
        for slot in plan.slots
        if slot.codec is not None
    }


def encode_slots(
    plan: LeafPlan,
    values: Arrays,
    seeds: random.Seeds | None,
    layout: Layout,
    measured: Measured | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Encode the new values of the slots; returns them as stored, and the scales of their codecs.

    Without seeds (random bits) codes are rounded to nearest. `measured` is the result of `measure`,
    if computed before.
    """
    slots, scales = [], []
    for slot in plan.slots:
        value = values[slot.name]
        if slot.codec is None:
            slots.append(value.astype(slot.dtype))
            continue
        uniforms = None
        if seeds is not None and slot.stochastic:
            bits = random.slot_bits(*seeds, layout.group_size, slot.name)
            uniforms = numerics.uniform(bits)
        if measured is None:
            stored, divisor = slot.codec.measure(layout.to_groups(value))
        else:
            stored, divisor = measured[slot.name]
        codes = slot.codec.quantize(value, layout.to_elements(divisor), uniforms)
        slots.append(layout.pack(slot.codec, codes))
        scales.append(stored)
    return tuple(slots), tuple(scales)


def move(
    plan: LeafPlan,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array | None,
    random_bits: jax.Array | None = None,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the new weight and its correction.

    If the plan neither `writes_weight` nor `returns_params`, return the update instead of the
    weight. `emit` turns a new weight into an update. `random_bits` come from `master_bits` or
    `random.leaf_bits`.
    """
    if plan.split is not None and correction is not None:
        return land(
            plan.split, p, step, correction, plan.update_dtype, plan.returns_params, random_bits
        )
    if plan.weight_format is not None:
        assert random_bits is not None  # since `stochastic_master` is true
        layout = layout or whole(plan)
        weight = plan.weight_format.round(numerics.widen(p) - step, random_bits, layout)
        if plan.returns_params and plan.update_dtype != jnp.float32:
            weight = _reached(weight, p, plan.update_dtype)
        return weight, correction
    update = numerics.negative(step).astype(plan.update_dtype)
    return (optax.apply_updates(p, update) if plan.returns_params else update), correction


def feed_back(
    rule: UpdateRule,
    plan: LeafPlan,
    p: jax.Array,
    step: jax.Array,
    moved: jax.Array,
    values: Arrays,
    h: Arrays,
    layout: Layout,
) -> Arrays:
    r"""Return the new slots, with the rounding error of the weight `moved` added to mu.

    With the error e = (p - step) - weight, the slot mu = m, its decay b and its divisor d, the
    direction of the step s steps later contains b^s m / d. These sum to b / (1 - b) m / d, so

    .. math:: m \leftarrow m - \frac{1 - b}{b} \frac{e}{\eta} d

    moves the weight by e in all, for a constant learning rate and divisor. The learning rate counts
    as `_LEAST_RATE` of the spacing of weights or more: so the change of m / d is bounded, also if
    the rate is 0 or rises later. Given the unrounded weight, e and the change of m have mean 0.
    """
    reached = moved if plan.returns_params else _reached(moved, p, plan.update_dtype)
    wanted = numerics.widen(p) - step
    error = wanted - numerics.widen(reached)
    assert plan.weight_format is not None  # since the plan `feeds_back`
    spacing = plan.weight_format.spacing(wanted, layout)
    rate = jnp.maximum(h["feedback_rate"], spacing * jnp.float32(_LEAST_RATE))
    share = numerics.quotient(error * h["feedback"], rate)
    return {**values, "mu": values["mu"] - share * rule.momentum_divisor(values, h)}


def emit(plan: LeafPlan, p: jax.Array | None, moved: jax.Array) -> jax.Array:
    """Turn the result of `move` into the update, or the new weight if the plan `returns_params`.

    Without a weight, the update is the rule's direction in the plan's `update_dtype`.
    """
    if p is None:
        return moved.astype(plan.update_dtype)
    if plan.returns_params or not plan.writes_weight:
        return moved
    return update_towards(moved, p, plan.update_dtype)


def master_bits(plan: LeafPlan, seeds: random.Seeds | None, layout: Layout) -> jax.Array | None:
    """Return the random bits that round master weights, or None if the plan needs none."""
    if seeds is None or not plan.stochastic_master:
        return None
    return random.slot_bits(*seeds, layout.group_size, MASTER)


def land(
    split: MasterSplit,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    update_dtype: jnp.dtype,
    returns_params: bool,
    random_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Split master weight - step into (weight, correction), rounding by `random.slot_bits`.

    If the step `returns_params`, the weight is the result of applying an update in `update_dtype`,
    else the target of that update. `optax.apply_updates` computes p + update in f32 and rounds to
    p's dtype. The correction is relative to that result, so weight and correction always match.
    """
    old = split.join(p, correction)
    master = old - step
    if update_dtype == jnp.float32 and (returns_params or isinstance(split, BitSplit)):
        weight, kept = split.split(master, p.dtype, random_bits)
        if not returns_params:
            kept = jnp.where(_missed(master, p), jnp.zeros((), kept.dtype), kept)
    else:
        target = split.round(master, p.dtype, random_bits)
        reached = _reached(target, p, update_dtype)
        weight, kept = (
            reached if returns_params else target,
            split.correction(master, reached, random_bits),
        )
    if isinstance(split, UlpSplit):  # half an ulp from p there are two splits: keep p's
        unmoved = master == old
        weight, kept = jnp.where(unmoved, p, weight), jnp.where(unmoved, correction, kept)
    return weight, kept


def _missed(master: jax.Array, p: jax.Array) -> jax.Array:
    """Return a mask of the elements where p + (weight - p) in f32 may differ from the weight.

    From 2^(digits - 24) |p| up (bf16: 2^-16 |p|), a weight is a multiple of f32's spacing at p: the
    sum is exact.
    """
    digits = int(jnp.finfo(p.dtype).nmant) + 1
    return jnp.abs(master) < jnp.abs(numerics.widen(p)) * jnp.float32(2.0 ** (digits - 24))


def _towards(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the update rounded to a dtype, as f32; XLA would drop an `astype` round trip."""
    back = numerics.widen(p) - numerics.widen(target)
    if dtype != jnp.float32:
        back = numerics.round_to(back, dtype)  # before the sign: kernels round no negative NaN
    # where nothing changes this is -0.0, which preserves the sign of a weight of -0.0
    return numerics.negative(back)


def _reached(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the weight that `optax.apply_updates` computes with the update towards a target."""
    return numerics.narrow(numerics.widen(p) + _towards(target, p, dtype), p.dtype)


def update_towards(target: jax.Array, p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the update that changes weight p into the target."""
    return _towards(target, p, dtype).astype(dtype)


def split_update(
    split: MasterSplit | None,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    update_dtype: jnp.dtype,
    random_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the update that subtracts a step from the master weight, and the new correction."""
    if split is None:
        return (-step).astype(update_dtype), correction
    target, correction = land(split, p, step, correction, update_dtype, False, random_bits)
    return update_towards(target, p, update_dtype), correction


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    leaf: Leaf,
    h: Arrays,
    key: jax.Array,
    two_passes: bool = False,
) -> Leaf:
    """Return the update of a leaf (the parameter if the plan `returns_params`) and its new state.

    `h` are f32 scalars: the hyperparameters of the rule, optionally `gradient_scale` (a factor of
    the gradient), and with a parameter `lr`, `decay` (the fraction of the weight to subtract) and
    `l2` (a factor of the weight, added to the gradient). `key`, uint32, is of this leaf and step; a
    pair for one shard of a leaf.

    With `two_passes` the new slots are computed twice: for the groups' maxima, then for the codes.
    Otherwise XLA on a GPU stores the new slots in f32 in between, since it does not fuse a
    reduction with the consumers of its broadcast result; reading the codes twice moves fewer bytes.
    Measured: docs/results/gpu_speed.md.
    """
    layout = whole(plan)
    measured = seeds = random_bits = None
    if two_passes:
        if plan.noisy:
            seeds = random.seeds(key, plan.shape, plan.group_size)
        random_bits = master_bits(plan, seeds, layout)
        *_, values = advance_weight(rule, plan, leaf, h, random_bits)
        measured = measure(plan, values)
        # the barrier prevents XLA from eliminating the second pass as a common subexpression:
        # https://github.com/jax-ml/jax/issues/13999
        leaf, measured, seeds = lax.optimization_barrier((leaf, measured, seeds))
        random_bits = master_bits(plan, seeds, layout)
    else:
        if plan.stochastic:
            seeds = random.seeds(key, plan.shape, plan.group_size)
        if leaf.p is not None and plan.stochastic_master:
            random_bits = random.leaf_bits(key, plan.shape, plan.group_size, MASTER)
    moved, correction, values = advance_weight(rule, plan, leaf, h, random_bits)
    slots, scales = encode_slots(plan, values, seeds, layout, measured)
    p = emit(plan, leaf.p, moved)
    return Leaf(p=p, slots=slots, scales=scales, correction=correction)


def step_tile(
    rule: UpdateRule, plan: LeafPlan, leaf: Leaf, h: Arrays, seeds: random.Seeds | None
) -> Leaf:
    """Step one tile [groups, lanes], one group per row: decode, rule, split, encode.

    `plan` may be that of any leaf in the launch, since they differ only in shape, which is unused.
    """
    lanes = leaf.g.shape[-1]
    layout = TileLayout(lanes, lanes)
    # the weight even if the step returns updates: XLA fuses the update with its consumer
    random_bits = None if leaf.p is None else master_bits(plan, seeds, layout)
    moved, correction, values = advance_weight(rule, plan, leaf, h, random_bits, layout)
    # encode last, when the weight's registers are free: encoding needs the most registers
    slots, scales = encode_slots(plan, values, seeds, layout)
    update = moved.astype(update_dtype(plan, leaf.p))
    return Leaf(p=update, slots=slots, scales=scales, correction=correction)


def jaxpr_of_tile(
    rule: UpdateRule, plan: LeafPlan, shape: tuple[int, int], arithmetic: numerics.Approximations
) -> ClosedJaxpr:
    """Trace `step_tile` of a tile of this shape, to see which primitives a kernel needs."""

    def like(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    slots = tuple(
        like(shape, slot.dtype) if slot.codec is None else slot.codec.storage(shape, shape[1]).codes
        for slot in plan.slots
    )
    scales = tuple(like(shape[:1], s.codec.scale.dtype) for s in plan.slots if s.codec is not None)
    correction = None if plan.split is None else like(shape, plan.split.dtype)
    leaf = Leaf(like(shape, jnp.float32), like(shape, plan.dtype), slots, scales, correction)

    def step(leaf: Leaf, seeds: random.Seeds) -> Leaf:
        with numerics.kernel_arithmetic(arithmetic):
            return step_tile(rule, plan, leaf, AnyHyperparameters(), seeds if plan.noisy else None)

    seeds = like((shape[0], 1), jnp.uint32), like(shape[1:], jnp.uint32)
    return jax.make_jaxpr(step)(leaf, seeds)
