"""The step of a leaf for XLA on a CPU: computes the outputs together, in packed words.

XLA's CPU backend compiles one loop per output. It recomputes shared intermediates, or stores them
in f32, and an `optimization_barrier` does not prevent this (jax 0.10). A call that must not be
inlined does: the small outputs of a leaf (weight, correction, codes) are computed together in one
call, packed into 32-bit words, and unpacked outside. The calls of equal leaves are the same
computation, which XLA compiles once. Measured: docs/results/cpu_speed.md.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata

from optax_lowmem._src.core import random
from optax_lowmem._src.step import reference
from optax_lowmem._src.step.plan import LeafPlan, LeafState
from optax_lowmem._src.step.rule import UpdateRule

_WEIGHT, _CORRECTION = "weight", "correction"


def supported(plan: LeafPlan, platform: str) -> str | None:
    """Return the reason why a leaf cannot use the packed path, or None."""
    if platform != "cpu":
        return f"the packed path is for XLA's CPU backend, not {platform}"
    if not plan.grouped:
        return "no slot is compressed: plain elementwise work, which XLA fuses well"
    if plan.rounds:
        return "the packed path packs weights with their corrections, and this weight has none"
    return None


def _fields(plan: LeafPlan, has_weight: bool) -> dict[str, jnp.dtype]:
    """Return the dtypes of the small outputs of a leaf, weight and correction first."""
    fields: dict[str, Any] = {}
    if has_weight and plan.split is not None:
        fields[_WEIGHT] = jnp.dtype(jnp.uint16)
        fields[_CORRECTION] = plan.split.dtype
    return fields | {slot.name: slot.dtype for slot in plan.slots if slot.codec is not None}


def _words(fields: Mapping[str, jnp.dtype]) -> list[list[str]]:
    """Assign the fields to 32-bit words in order; returns the names of each word's fields."""
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


def opaque(function: Any) -> Any:
    """Return a jitted function whose calls XLA neither inlines nor fuses across."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(function(*args, **kwargs))
        # on a value, since the context manager would also mark inner calls
        leaves[0] = xla_metadata.set_xla_metadata(leaves[0], inlineable="false")
        return jax.tree.unflatten(tree, leaves)

    return call


def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """Compute `reference.fused_update`."""
    return fused_update_among(rule, plan, g, p, state, h, key[None], jnp.uint32(0))


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def fused_update_among(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    number: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """Compute `reference.fused_update` with `keys[number]`, where keys are those of many leaves.

    The number is an operand: as a constant it would prevent equal leaves from sharing a program.
    """
    if plan.direct:
        return _finished(rule, plan, g, p, state, h, keys, number)
    # the rest of an update is computed outside the calls, where XLA fuses it with its consumer
    return _outputs(
        rule, plan, g, p, state, h, *_computed(rule, plan, g, p, state, h, keys, number)
    )


@opaque
@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def _finished(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    number: jax.Array,
) -> tuple[jax.Array, LeafState]:
    result = _computation(rule, plan, g, p, state, h, keys, number)
    return _outputs(rule, plan, g, p, state, h, *result)


def _computation(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    number: jax.Array,
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Return the packed words and the stored scales."""
    measured = reference.measure(plan, reference.advance(rule, plan, g, p, state, h)[1])
    divisors = {name: divisor for name, (_, divisor) in measured.items()}
    noise = _noise(plan, keys, number) if plan.noisy else None
    words = [
        _word(rule, plan, place, g, p, state, h, divisors, noise)
        for place in range(len(_words(_fields(plan, p is not None))))
    ]
    return words, {name: scale for name, (scale, _) in measured.items()}


_computed = jax.jit(_computation, static_argnames=("rule", "plan"))


@opaque
@functools.partial(jax.jit, static_argnames=("plan",))
def _noise(plan: LeafPlan, keys: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `random.noise_bits` in a call, since XLA would recompute them per element."""
    key = lax.dynamic_index_in_dim(keys, number, keepdims=False)
    return random.noise_bits(key, plan.shape, plan.group_size)


@opaque
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
    step, values = reference.advance(rule, plan, g, p, state, h)
    whole = reference.Whole(plan)
    small = {
        s.name: s.codec.quantize(
            values[s.name],
            whole.to_elements(divisors[s.name]),
            reference.slot_noise(s, noise, whole),
        )
        for s in plan.slots
        if s.codec
    }
    if p is not None and plan.split is not None:
        own = reference.master_noise(plan, noise)
        weight, correction = reference.move(plan, p, step, state.correction, own)
        assert correction is not None  # since the plan has a split
        small[_CORRECTION] = correction
        small[_WEIGHT] = lax.bitcast_convert_type(weight, jnp.uint16)
    return _pack(small, _words(_fields(plan, p is not None))[place])


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
    """Return update and state from the packed words; f32 outputs are recomputed here."""
    fields = _fields(plan, p is not None)
    small: dict[str, jax.Array] = {}
    for names, word in zip(_words(fields), words, strict=True):
        small |= _unpack(word, names, fields)
    stored = tuple(scales[slot.name] for slot in plan.slots if slot.codec)
    correction = small.get(_CORRECTION, state.correction)
    plain = any(slot.codec is None for slot in plan.slots)
    if plain or _WEIGHT not in small:
        moved, values = reference.advance(rule, plan, g, p, state, h)
    if p is not None and _WEIGHT in small:
        moved = lax.bitcast_convert_type(small[_WEIGHT], p.dtype)
    elif p is not None:
        moved, correction = reference.move(plan, p, moved, correction)
    slots = tuple(
        s.codec.pack(small[s.name]) if s.codec else values[s.name].astype(s.dtype)
        for s in plan.slots
    )
    return reference.emit(plan, p, moved), LeafState(slots, stored, correction)
