"""The step of a leaf for XLA on a CPU: the reference's functions, each byte computed once.

XLA's CPU backend compiles one loop an output and repeats, or stores in f32, whatever several
outputs share; an `optimization_barrier` does not stop it (jax 0.10). What it cannot see through is
a conditional, so the small outputs of a leaf (weight, correction, codes) are computed together
inside one, packed into 32-bit words, and taken apart outside. Measured: docs/cpu_speed.md.
"""

from collections.abc import Mapping
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
    """As `reference.fused_update`; `alive` is a traced True whose value XLA must not know."""
    fields = _fields(plan, p is not None)
    values = reference.advanced(rule, plan, g, p, state, h)[1]
    measured = reference.measured(plan, values)
    divisors = {name: divisor for name, (_, divisor) in measured.items()}
    noise = None
    if plan.noisy:
        # the barrier keeps newer XLA from moving the mixing into the conditionals, once an element
        noise = lax.optimization_barrier(random.noise_bits(key, plan.shape, plan.group_size))

    def compute(g: Any, p: Any, state: Any, h: Any, divisors: Any, noise: Any) -> dict[str, Any]:
        step, values = reference.advanced(rule, plan, g, p, state, h)
        small = {s.name: _codes(plan, s, values, divisors, noise) for s in plan.slots if s.codec}
        if p is not None and plan.split is not None:
            weight, small[_CORRECTION] = reference.landed(
                plan, p, step, state.correction, reference.master_noise(plan, noise)
            )
            small[_WEIGHT] = lax.bitcast_convert_type(weight, jnp.uint16)
        return small

    operands = (g, p, state, h, divisors, noise)
    small: dict[str, jax.Array] = {}
    for names in _words(fields):
        word = lax.cond(
            alive,
            lambda *a, names=names: _pack(compute(*a), names),
            lambda g, p, state, *_, names=names: _nothing(plan, names, g, state),
            *operands,
        )
        small |= _unpack(word, names, fields)
    return _outputs(
        rule, plan, g, p, state, h, small, {name: scale for name, (scale, _) in measured.items()}
    )


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


def _outputs(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    small: Mapping[str, jax.Array],
    scales: Mapping[str, jax.Array],
) -> tuple[jax.Array, LeafState]:
    """Update and state from the unpacked fields; what is f32 is computed where it is used."""
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
