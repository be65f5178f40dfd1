"""The XLA path of the step, in the form that compiles best for the platform.

XLA's CPU backend compiles one loop per output. It recomputes shared intermediates, or stores them
in f32, and an `optimization_barrier` does not prevent this (jax 0.10). A call that must not be
inlined does: the small outputs of a leaf (weight, correction, codes) are computed together in one
call, packed into 32-bit words, and unpacked outside. The calls of equal leaves are the same
computation, which XLA compiles once. Measured: docs/results/cpu_speed.md.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.codecs import GroupCodec, Layout
from optax_lowmem._src.arrays.sharding import left_to_xla, sharding_of
from optax_lowmem._src.arrays.typing import Arrays, PyTree, T
from optax_lowmem._src.kernels.step_arguments import scope
from optax_lowmem._src.optim.step import reference
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch

# traced once per shape and plan: tracing it per leaf would dominate the tracing time
plain = jax.jit(reference.fused_update, static_argnames=("rule", "plan", "two_passes"))


def step(rule: UpdateRule, batch: LeafBatch) -> list[Leaf]:
    """Step each parameter; on Explicit axes the results keep its sharding."""
    # without the barrier XLA inlines these constants, and the steps of equal leaves differ: fusions
    # contract multiply-adds differently, https://github.com/openxla/xla/issues/41579
    numbers = lax.optimization_barrier(list(map(jnp.uint32, batch.numbers)))
    results = []
    for i, number in enumerate(numbers):
        leaf = batch.leaves[i]
        like, treedef = jax.tree.flatten(leaf.result_like)
        work = functools.partial(_step_leaf, rule, batch.plans[i].nameless, batch.numbers[i])
        shardings = list(map(sharding_of, like))
        with scope([batch.plans[i].path], "xla"):
            arrays = left_to_xla(work, shardings, leaf, batch.h(i), batch.keys, number)
        results.append(jax.tree.unflatten(treedef, arrays))
    return results


def _step_leaf(
    rule: UpdateRule,
    plan: LeafPlan,
    index: int,
    leaf: Leaf,
    h: Arrays,
    keys: jax.Array,
    number: jax.Array,
) -> list[jax.Array]:
    """Return the flat results of one parameter's step with `keys[index]`.

    `number` is the index as an array, so that parameters of one kind share a compiled program.
    """
    platform = jax.default_backend()
    if packs(plan, platform):
        update = packed_in_call if plan.returns_params else packed_update
        return jax.tree.leaves(update(rule, plan, leaf, h, keys, number))
    two_passes = platform == "gpu" and plan.quantized
    return jax.tree.leaves(plain(rule, plan, leaf, h, keys[index], two_passes=two_passes))


# ---- on a CPU: small outputs in packed words -----------------------------------------------------

_WEIGHT, _CORRECTION = "weight", "correction"
Fields = tuple[tuple[str, jnp.dtype], ...]  # small outputs that share a 32-bit word


def packs(plan: LeafPlan, platform: str) -> bool:
    """Return whether `packed_update` steps a leaf, which packs weights with their corrections.

    XLA fuses the elementwise work of a leaf without codes well.
    """
    return platform == "cpu" and plan.quantized and plan.weight_format is None


def opaque(function: Callable[..., T]) -> Callable[..., T]:
    """Return a jitted function whose calls XLA neither inlines nor fuses across."""

    @functools.wraps(function)
    def call(*args: PyTree, **kwargs: PyTree) -> T:
        leaves, tree = jax.tree.flatten(function(*args, **kwargs))
        # on a value, since the context manager would also mark inner calls (no upstream issue
        # known)
        leaves[0] = xla_metadata.set_xla_metadata(leaves[0], inlineable="false")
        return jax.tree.unflatten(tree, leaves)

    return call


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def packed_update(
    rule: UpdateRule, plan: LeafPlan, leaf: Leaf, h: Arrays, keys: jax.Array, number: jax.Array
) -> Leaf:
    """Compute `reference.fused_update` with `keys[number]`, where keys are those of many leaves.

    The number is an operand: as a constant it would prevent equal leaves from sharing a program.
    """
    packed = _PackedStep(rule, plan, leaf.p is not None)
    # the rest of an update is computed outside the calls, where XLA fuses it with its consumer
    pack = packed.pack if plan.returns_params else packed.pack_jitted
    return packed.unpack(leaf, h, *pack(leaf, h, keys, number))


packed_in_call = opaque(packed_update)


class _Unpacked(Layout):
    """The layout of a whole leaf, but with codes that are not yet packed in bytes."""

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        return codes


_method = functools.partial(jax.jit, static_argnums=0)  # static: the `_PackedStep`
_inlined = functools.partial(_method, inline=True)


@dataclasses.dataclass(frozen=True)
class _PackedStep:
    """The step of a leaf whose small outputs are computed together, in packed words."""

    rule: UpdateRule
    plan: LeafPlan
    has_weight: bool

    @property
    def words(self) -> list[Fields]:
        """The small outputs in each 32-bit word, weight and correction first."""
        fields: dict[str, jnp.dtype] = {}
        if self.has_weight and self.plan.split is not None:
            fields = {_WEIGHT: jnp.dtype(jnp.uint16), _CORRECTION: self.plan.split.dtype}
        fields |= {slot.name: slot.dtype for slot in self.plan.slots if slot.codec is not None}
        words: list[Fields] = [()]
        for field in fields.items():
            if sum(dtype.itemsize for _, dtype in (*words[-1], field)) > 4:
                words.append(())
            words[-1] += (field,)
        return words

    # traced once for all outputs; its operations are inlined in each
    @_inlined
    def advance(self, leaf: Leaf, h: Arrays) -> tuple[jax.Array, Arrays]:
        return reference.advance(self.rule, self.plan, leaf, h)

    def pack(
        self, leaf: Leaf, h: Arrays, keys: jax.Array, number: jax.Array
    ) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        """Return the packed words and the stored scales."""
        measured = reference.measure(self.plan, self.advance(leaf, h)[1])
        divisors = {name: divisor for name, (_, divisor) in measured.items()}
        seeds = self.seeds(keys, number) if self.plan.noisy else None
        words = [self.word(fields, leaf, h, divisors, seeds) for fields in self.words]
        return words, {name: scale for name, (scale, _) in measured.items()}

    pack_jitted = _method(pack)  # not `opaque`: XLA may fuse its results with their consumers

    @opaque
    @_method
    def seeds(self, keys: jax.Array, number: jax.Array) -> random.Seeds:
        """Return `random.seeds` in a call, since XLA would recompute them per element."""
        key = lax.dynamic_index_in_dim(keys, number, keepdims=False)
        return random.seeds(key, self.plan.shape, self.plan.group_size)

    @opaque
    @functools.partial(jax.jit, static_argnums=(0, 1))
    def word(
        self, fields: Fields, leaf: Leaf, h: Arrays, divisors: Arrays, seeds: random.Seeds | None
    ) -> jax.Array:
        """Return the outputs named in `fields` in one uint32, the first in its low bits.

        A single output is returned as it is. XLA drops the small outputs that are not in `fields`.
        """
        small = self.small_outputs(leaf, h, divisors, seeds)
        if len(fields) == 1:
            [(name, _)] = fields
            return small[name]
        word, offset = jnp.uint32(0), 0
        for name, dtype in fields:
            width = 8 * dtype.itemsize
            unsigned = lax.bitcast_convert_type(small[name], jnp.dtype(f"uint{width}"))
            word = word | (unsigned.astype(jnp.uint32) << offset)
            offset += width
        return word

    @_inlined
    def small_outputs(
        self, leaf: Leaf, h: Arrays, divisors: Arrays, seeds: random.Seeds | None
    ) -> dict[str, jax.Array]:
        """Return the 8- and 16-bit outputs by name: codes, the weight's bits, its correction."""
        plan = self.plan
        step, values = self.advance(leaf, h)
        layout = _Unpacked(plan.group_size, plan.shape[-1])
        measured = {name: (None, divisor) for name, divisor in divisors.items()}
        slots, _ = reference.encode_slots(plan, values, seeds, layout, measured)
        small = {s.name: codes for s, codes in zip(plan.slots, slots, strict=True) if s.codec}
        if leaf.p is not None and plan.split is not None:
            random_bits = reference.master_bits(plan, seeds, layout)
            weight, correction = reference.move(plan, leaf.p, step, leaf.correction, random_bits)
            assert correction is not None  # since the plan has a split
            small[_CORRECTION] = correction
            small[_WEIGHT] = lax.bitcast_convert_type(weight, jnp.uint16)
        return small

    def unpack(self, leaf: Leaf, h: Arrays, words: Sequence[jax.Array], scales: Arrays) -> Leaf:
        """Return update and state from the packed words; f32 outputs are recomputed here."""
        plan, small = self.plan, {}
        for word, fields in zip(words, self.words, strict=True):
            offset = 0
            for name, dtype in fields:
                if len(fields) > 1:
                    part = (word >> offset).astype(jnp.dtype(f"uint{8 * dtype.itemsize}"))
                    small[name] = lax.bitcast_convert_type(part, dtype)
                    offset += 8 * dtype.itemsize
                else:
                    small[name] = word
        stored = tuple(scales[slot.name] for slot in plan.slots if slot.codec)
        correction = small.get(_CORRECTION, leaf.correction)
        if any(slot.codec is None for slot in plan.slots) or _WEIGHT not in small:
            moved, values = self.advance(leaf, h)
        if leaf.p is not None and _WEIGHT in small:
            moved = lax.bitcast_convert_type(small[_WEIGHT], leaf.p.dtype)
        elif leaf.p is not None:
            moved, correction = reference.move(plan, leaf.p, moved, correction)
        slots = tuple(
            s.codec.pack(small[s.name]) if s.codec else values[s.name].astype(s.dtype)
            for s in plan.slots
        )
        update = reference.emit(plan, leaf.p, moved)
        return Leaf(p=update, slots=slots, scales=stored, correction=correction)
