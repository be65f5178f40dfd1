"""The step of a leaf for XLA on a CPU: the reference's functions, each byte computed once.

XLA's CPU backend compiles one loop an output and repeats, or stores in f32, whatever several
outputs share; an `optimization_barrier` does not stop it (jax 0.10). What it cannot see through is
a conditional, so the small outputs of a leaf (weight, correction, codes) are computed together
inside one, packed into 32-bit words, and taken apart outside. Measured: docs/cpu_speed.md.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._core import groups, random
from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.kernels.fused_update import reference
from optax_lowmem.kernels.fused_update.plan import LeafPlan, LeafState, SlotPlan

_WEIGHT, _CORRECTION = "weight", "correction"


def supported(plan: LeafPlan, platform: str) -> str | None:
    """Why a leaf does not take this path; None where it does."""
    if platform != "cpu":
        return f"the packed path is for XLA's CPU backend, not {platform}"
    if not plan.grouped:
        return "no slot is compressed: plain elementwise work, which XLA fuses well"
    return None


def _fields(plan: LeafPlan, has_weight: bool) -> dict[str, jnp.dtype]:
    """Small outputs of a leaf and their dtypes, weight and correction first."""
    fields: dict[str, Any] = {}
    if has_weight and plan.split is not None:
        fields[_WEIGHT] = jnp.dtype(jnp.uint16)
        fields[_CORRECTION] = plan.split.dtype
    return fields | {slot.name: slot.dtype for slot in plan.slots if slot.codec is not None}


def _words(fields: Mapping[str, jnp.dtype]) -> list[list[str]]:
    """Names of the fields of each 32-bit word, filled in order."""
    words: list[list[str]] = [[]]
    left = 32
    for name, dtype in fields.items():
        if dtype.itemsize * 8 > left:
            words.append([])
            left = 32
        words[-1].append(name)
        left -= dtype.itemsize * 8
    return words


def _pack(values: Mapping[str, jax.Array], names: list[str]) -> jax.Array:
    if len(names) == 1:
        return values[names[0]]
    word, offset = jnp.uint32(0), 0
    for name in names:
        width = values[name].dtype.itemsize * 8
        unsigned = lax.bitcast_convert_type(values[name], jnp.dtype(f"uint{width}"))
        word = word | (unsigned.astype(jnp.uint32) << offset)
        offset += width
    return word


def _unpack(
    word: jax.Array, names: list[str], fields: Mapping[str, jnp.dtype]
) -> dict[str, jax.Array]:
    if len(names) == 1:
        return {names[0]: word}
    values, offset = {}, 0
    for name in names:
        width = fields[name].itemsize * 8
        part = (word >> offset).astype(jnp.dtype(f"uint{width}"))
        values[name] = lax.bitcast_convert_type(part, fields[name])
        offset += width
    return values


def _nothing(plan: LeafPlan, names: list[str], g: jax.Array, state: LeafState) -> jax.Array:
    """What stands in for a word in the branch that is never taken: the old slot costs no code."""
    index = {slot.name: i for i, slot in enumerate(plan.slots)}
    if len(names) == 1 and names[0] in index:
        return state.slots[index[names[0]]]
    return jnp.zeros_like(g, dtype=jnp.uint32)  # on Explicit mesh axes it lies where g does


def fused_updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    rows: Sequence[tuple[jax.Array, jax.Array | None, LeafState]],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    numbers: Sequence[int],
    alive: jax.Array,
) -> list[tuple[jax.Array, LeafState]]:
    """As `reference.fused_update` of each leaf.

    Args:
      rule: the optimizer's arithmetic.
      plans: the leaves' static choices.
      rows: (gradient, weight or None, state) of each.
      of_leaves: hyperparameters of each.
      keys: uint32 [n], or [n, 2], of these leaves and perhaps others.
      numbers: which of the keys are theirs.
      alive: a traced True whose value XLA must not know.
    """
    measured = [
        _measured(rule, plan, *row, h) for plan, row, h in zip(plans, rows, of_leaves, strict=True)
    ]
    divisors = [{name: divisor for name, (_, divisor) in m.items()} for m in measured]
    noises = _noises(plans, keys, numbers, alive)

    every = [
        (*row, h, of_groups, noise)
        for row, h, of_groups, noise in zip(rows, of_leaves, divisors, noises, strict=True)
    ]
    fields = [_words(_fields(plan, row[1] is not None)) for plan, row in zip(plans, rows, strict=True)]
    words: list[list[jax.Array]] = [[] for _ in plans]
    # words of one leaf in one conditional would store what they share, in f32
    for place in range(max(map(len, fields))):
        mine = [i for i, names in enumerate(fields) if place < len(names)]

        def compute(every: Any, mine: Any = mine, place: int = place) -> list[jax.Array]:
            rows = zip(mine, every, strict=True)
            return [_word(rule, plans[i], place, *own) for i, own in rows]

        def nothing(every: Any, mine: Any = mine, place: int = place) -> list[jax.Array]:
            rows = zip(mine, every, strict=True)
            return [_nothing(plans[i], fields[i][place], own[0], own[2]) for i, own in rows]

        found = _cond(alive, compute, nothing, [every[i] for i in mine])
        for i, word in zip(mine, found, strict=True):
            words[i].append(word)
    return [
        _outputs(rule, plan, *row, h, word, {name: scale for name, (scale, _) in m.items()})
        for plan, row, h, word, m in zip(plans, rows, of_leaves, words, measured, strict=True)
    ]


def _cond(alive: jax.Array, true: Any, false: Any, operands: Any) -> Any:
    """`lax.cond` that passes what occurs several times in `operands` once."""
    leaves, tree = jax.tree.flatten(operands)
    unique = {id(leaf): leaf for leaf in leaves}
    places = {key: i for i, key in enumerate(unique)}
    order = [places[id(leaf)] for leaf in leaves]

    def restored(function: Any) -> Any:
        return lambda *given: function(jax.tree.unflatten(tree, [given[i] for i in order]))

    return lax.cond(alive, restored(true), restored(false), *unique.values())


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def _measured(rule: UpdateRule, plan: LeafPlan, g: Any, p: Any, state: Any, h: Any) -> Any:
    return reference.measured(plan, reference.advanced(rule, plan, g, p, state, h)[1])


def _noises(
    plans: Sequence[LeafPlan], keys: jax.Array, numbers: Sequence[int], alive: jax.Array
) -> list[Any]:
    """The two parts of the random bits of each leaf, or None.

    Drawn in a conditional of their own, which keeps the mixing out of the loops over elements; and
    a leaf's number is an operand of it: as a constant it would make each leaf's loop another one.
    """
    drawn = [i for i, plan in enumerate(plans) if plan.stochastic]
    noises: list[Any] = [None] * len(plans)
    if drawn:
        indices = [jnp.uint32(numbers[i]) for i in drawn]
        every = [plans[i] for i in drawn]
        found = lax.cond(
            alive,
            lambda keys, *own: [_noise(plan, keys, i) for plan, i in zip(every, own, strict=True)],
            lambda keys, *_: [_no_noise(plan, keys) for plan in every],
            keys,
            *indices,
        )
        for i, noise in zip(drawn, found, strict=True):
            noises[i] = noise
    return noises


@functools.partial(jax.jit, static_argnames=("plan",))
def _noise(plan: LeafPlan, keys: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    key = lax.dynamic_index_in_dim(keys, number, keepdims=False)
    return random.noise_bits(key, plan.shape, plan.group_size)


@functools.partial(jax.jit, static_argnames=("plan",))
def _no_noise(plan: LeafPlan, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    row, lane = random.row_and_lane_keys(keys[0])
    shape = groups.scale_shape(plan.shape, plan.group_size)
    return jnp.broadcast_to(row, shape), jnp.broadcast_to(lane, plan.shape[-1:])


@functools.partial(jax.jit, static_argnames=("rule", "plan", "place"))
def _word(
    rule: UpdateRule,
    plan: LeafPlan,
    place: int,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    divisors: Mapping[str, jax.Array],
    noise: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    step, values = reference.advanced(rule, plan, g, p, state, h)
    small = {s.name: _codes(plan, s, values, divisors, noise) for s in plan.slots if s.codec}
    if p is not None and plan.split is not None:
        weight, small[_CORRECTION] = reference.landed(plan, p, step, state.correction)
        small[_WEIGHT] = lax.bitcast_convert_type(weight, jnp.uint16)
    return _pack(small, _words(_fields(plan, p is not None))[place])


def _codes(
    plan: LeafPlan,
    slot: SlotPlan,
    values: Mapping[str, jax.Array],
    divisors: Mapping[str, jax.Array],
    noise: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    assert slot.codec is not None
    uniforms = None
    if slot.stochastic and noise is not None:
        uniforms = random.join_bits(*noise, plan.group_size, slot.name)
    divisor = groups.spread_tree(divisors[slot.name], plan.shape[-1], plan.group_size)
    return slot.codec.quantize(values[slot.name], divisor, uniforms)


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def _outputs(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    words: Sequence[jax.Array],
    scales: Mapping[str, jax.Array],
) -> tuple[jax.Array, LeafState]:
    """Update and state from the unpacked fields; what is f32 is computed where it is used."""
    fields = _fields(plan, p is not None)
    small: dict[str, jax.Array] = {}
    for names, word in zip(_words(fields), words, strict=True):
        small |= _unpack(word, names, fields)
    olds = zip(plan.slots, state.scales, strict=True)
    stored = tuple(scales.get(slot.name, old) for slot, old in olds)
    correction = small.get(_CORRECTION, state.correction)
    plain = any(slot.codec is None for slot in plan.slots)
    if plain or _WEIGHT not in small:
        update, values = reference.advanced(rule, plan, g, p, state, h)
    if p is not None and _WEIGHT in small:
        update = lax.bitcast_convert_type(small[_WEIGHT], p.dtype)
        if not plan.direct:
            update = reference.update_towards(update, p, plan.update_dtype)
    elif p is not None:
        update, correction = reference.moved(plan, p, update, correction)
    slots = tuple(small[s.name] if s.codec else values[s.name].astype(s.dtype) for s in plan.slots)
    return update, LeafState(slots, stored, correction)
