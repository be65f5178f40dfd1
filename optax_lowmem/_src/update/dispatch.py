"""Choice of the implementation that steps a leaf, made while tracing.

It depends on `supported`, never on caught errors.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import explicit, platform, random, scope
from optax_lowmem._src.core.fallback import with_fallback
from optax_lowmem._src.core.gpu_kernel import BACKENDS
from optax_lowmem._src.core.groups import MAX_ELEMENTS, Tile, Tiling
from optax_lowmem._src.core.placement import Placement
from optax_lowmem._src.core.rules import OF_BLOCK, UpdateRule
from optax_lowmem._src.update import (
    on_mesh,
    operands,
    packed,
    reference,
    tuning,
)
from optax_lowmem._src.update.batch import LeafBatch, Stepped
from optax_lowmem._src.update.plan import LeafPlan, LeafState

_LeafArrays = tuple[jax.Array, jax.Array | None, LeafState]  # gradient, weight, state

IMPLEMENTATIONS = ("xla", *BACKENDS, "pallas_tpu")
_KERNELS = BACKENDS
_TPU = "pallas_tpu"
_ELEMENTWISE = "no slot is compressed: plain elementwise work, which XLA fuses well"
_UPDATES = 1 << 20  # bytes that the updates of a launch may take, however small the leaves
_SMALL = 1 << 16  # elements; XLA launches a kernel for each leaf without codes, small or not


def _unsupported(kernel: str, rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why a kernel cannot take a leaf on any machine, or None."""
    size = math.prod(plan.shape)
    if not plan.shape or size == 0:
        return "a 0-d or empty leaf has no tiles"
    if size > MAX_ELEMENTS:
        return f"{size} elements, more than a kernel's 32-bit offsets reach"
    if kernel == _TPU:
        from optax_lowmem._src.update import pallas_tpu

        return pallas_tpu.unsupported(rule, plan)
    for slot in plan.slots:
        if slot.codec is not None and slot.codec.bits < 8 and slot.codec.no_tile_reason:
            return slot.codec.no_tile_reason
    if kernel == "pallas":
        return None if platform.has_pallas_triton() else platform.NO_PALLAS_TRITON
    if not platform.has_jax_triton():
        return platform.NO_JAX_TRITON
    from optax_lowmem._src.update import jax_triton

    return jax_triton.supported(rule, plan)


def choose(
    rule: UpdateRule, plan: LeafPlan, implementation: str | None = None, g: jax.Array | None = None
) -> tuple[str, str]:
    """(implementation of a leaf, why).

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's.
      implementation: the caller's choice, or None.
      g: the leaf's gradient, for where it lies.

    Raises:
      ValueError: where the caller's choice cannot take the leaf.
    """
    if implementation == "xla":
        return "xla", "asked for"
    if implementation is not None:
        return _asked_for(rule, plan, implementation, g)
    tpu = platform.may_be_tpu(g)
    if not plan.grouped and (math.prod(plan.shape) > _SMALL or tpu):
        return "xla", _ELEMENTWISE  # on a TPU, small leaves too: it launches nothing
    if tpu:
        nowhere = platform.no_tpu_kernel_reason(g)
        reason = nowhere or _unsupported(_TPU, rule, plan)
        if reason is None:
            return _TPU, "fused kernel"
        return "xla", nowhere or f"{_TPU}: {reason}"
    nowhere = platform.no_kernel_reason(g)
    if nowhere is not None:
        return "xla", nowhere if platform.no_device_reason() is None else platform.not_tpu_reason(g)
    reasons: list[str] = []
    for kernel in _KERNELS:
        reason = _unsupported(kernel, rule, plan)
        if reason is None:
            return kernel, "; ".join(["fused kernel", *reasons])
        reasons.append(f"{kernel}: {reason}")
    return "xla", "; ".join(reasons)


def _asked_for(
    rule: UpdateRule, plan: LeafPlan, kernel: str, g: jax.Array | None
) -> tuple[str, str]:
    elsewhere = platform.no_device_reason()
    if kernel == _TPU:
        elsewhere = None if platform.may_be_tpu(g) else platform.not_tpu_reason(g)
    reason = elsewhere or platform.explicit_axes_reason(g) or _unsupported(kernel, rule, plan)
    small = kernel != _TPU and math.prod(plan.shape) <= _SMALL
    if reason is None and (plan.grouped or small):
        return kernel, "asked for"
    if not plan.grouped and elsewhere is None:
        return "xla", reason or _ELEMENTWISE
    raise ValueError(
        f"implementation={kernel!r} cannot take leaf '{plan.path}': {reason}. Pass "
        "implementation=None to use what can."
    )


def fused_updates(
    rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None = None
) -> list[Stepped]:
    """`reference.fused_update` of every parameter, by the fastest implementation for each.

    Args:
      rule: the optimizer's arithmetic.
      batch: the parameters, with the hyperparameters and operands that `prepare_leaves` gives.
      tuned: how a kernel's work is cut; None for what is known of the device.
    """
    results: dict[int, Stepped] = {}
    placed = _placed(rule, batch)
    if placed:
        results.update(_on_mesh(rule, batch, placed, tuned))
    by_implementation: dict[str, list[int]] = {}
    for i, (plan, g) in enumerate(zip(batch.plans, batch.gradients, strict=True)):
        if i not in results:
            name, _ = choose(rule, plan, batch.implementation, g)
            by_implementation.setdefault(name, []).append(i)
    for name, indices in by_implementation.items():
        if name == "xla":
            continue
        size = batch.plans[indices[0]].group_size  # one for all parameters of an optimizer
        cut = tuning.resolve(tuned, name, rule.elementwise_slots, size)
        if name == _TPU:
            found = _by_tpu(rule, batch.take(indices), cut.tile.elements)
            results.update(zip(indices, found, strict=True))
            continue
        for together in _launches(batch, indices, cut):
            found = _by_kernel(rule, name, batch.take(together), cut.tile)
            results.update(zip(together, found, strict=True))
    if "xla" in by_implementation:
        # behind a barrier, or XLA moves them into the steps of the leaves and no two are the same
        numbers = jax.lax.optimization_barrier(list(map(jnp.uint32, batch.numbers)))
        for i in by_implementation["xla"]:
            results[i] = _by_xla(rule, batch, i, numbers[i])
    return [results[i] for i in range(len(batch))]


def _by_xla(rule: UpdateRule, batch: LeafBatch, i: int, number: jax.Array) -> Stepped:
    """The step of one parameter without a kernel; on Explicit axes its results keep its sharding.

    Args:
      rule: the optimizer's arithmetic.
      batch: the parameters.
      i: which of them.
      number: `batch.numbers[i]`, as an array.
    """
    plan = batch.plans[i]

    def step(
        g: jax.Array,
        p: jax.Array | None,
        state: LeafState,
        h: Mapping[str, jax.Array],
        keys: jax.Array,
        number: jax.Array,
    ) -> Stepped:
        arguments = (rule, plan.nameless, g, p, state, h)
        if packed.supported(plan, jax.default_backend()) is None:
            return packed.fused_update_among(*arguments, keys, number)
        return fused_update(*arguments, keys[batch.numbers[i]])

    arrays = batch.gradients[i], batch.weights[i], batch.states[i]
    shardings = jax.tree.map(explicit.sharding_of, on_mesh.result_like(*arrays))
    return explicit.left_to_xla(step, shardings, *arrays, batch.h(i), batch.keys, number)


def _placed(rule: UpdateRule, batch: LeafBatch) -> dict[int, Placement]:
    """The parameters on a mesh whose parts kernels can step."""
    if batch.implementation == "xla":
        return {}
    gpu = platform.no_device_reason() is None
    asks_tpu = batch.implementation == _TPU
    may_be_tpu = asks_tpu or any(map(platform.may_be_tpu, batch.gradients))
    if not gpu and not scope.is_placing() and not may_be_tpu:
        return {}
    rows = zip(batch.plans, batch.states, batch.gradients, strict=True)
    places = {i: on_mesh.place_of(*row) for i, row in enumerate(rows)}
    return {
        i: place
        for i, place in places.items()
        if place is not None
        and on_mesh.supported(rule, batch.plans[i], place) is None
        and (
            (gpu and rule.prepares != "blocks")  # whose means are XLA's there
            or asks_tpu
            or platform.may_be_tpu(batch.gradients[i], place.mesh)
        )
    }


def _on_mesh(
    rule: UpdateRule,
    batch: LeafBatch,
    placed: Mapping[int, Placement],
    tuned: tuning.Tuning | None,
) -> Iterator[tuple[int, Stepped]]:
    """(index, result) of the parameters on a mesh, those of one mesh together."""

    def step(part: LeafBatch) -> list[Stepped]:
        with scope.placing(None):
            return fused_updates(rule, part, tuned)

    for mesh in dict.fromkeys(place.mesh for place in placed.values()):
        mine = [i for i, place in placed.items() if place.mesh == mesh]
        found = on_mesh.fused_updates(step, batch.take(mine), [placed[i] for i in mine])
        yield from zip(mine, found, strict=True)


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """`reference.fused_update` in the form that XLA compiles best for the backend.

    Compiled once for leaves of one shape and plan, also outside of a jit.
    """
    backend = jax.default_backend()
    if packed.supported(plan, backend) is None:
        return packed.fused_update(rule, plan, g, p, state, h, key)
    two_passes = backend == "gpu" and plan.grouped
    return reference.fused_update(rule, plan, g, p, state, h, key, two_passes)


# once for leaves of one shape and plan: tracing it for each leaf takes longer than all else
_plain = jax.jit(reference.fused_update, static_argnames=("rule", "plan"))


def _by_tpu(rule: UpdateRule, batch: LeafBatch, elements: int) -> list[Stepped]:
    """Parameters that have a launch each: on a TPU it costs next to nothing."""
    from optax_lowmem._src.update import pallas_tpu

    # mixed once, for all parameters
    row_keys, lane_keys = random.row_and_lane_keys(batch.keys, rank=1)
    lane_bits = pallas_tpu.register_bits(lane_keys, batch.plans[0].group_size)
    results = []
    rows = zip(batch.plans, batch.gradients, batch.weights, batch.states, strict=True)
    for i, (named, g, p, state) in enumerate(rows):
        number, h = batch.numbers[i], batch.h(i)

        def launched(
            g: jax.Array,
            p: jax.Array | None,
            state: LeafState,
            h: Mapping[str, jax.Array],
            keys: tuple[jax.Array, jax.Array, jax.Array],
            plan: LeafPlan = named.nameless,
        ) -> Stepped:
            names = tuple(sorted(set(h) - {OF_BLOCK}))
            leaf = operands.leaf_of(plan, g, p, state, h.get(OF_BLOCK))
            scalars = jnp.stack([h[name] for name in names])
            with platform.targeting(g):
                result = pallas_tpu.launch(rule, plan, leaf, names, scalars, *keys[1:], elements)
            update = reference.emit(plan, p, result.update)
            return update, operands.state_of(plan, state, result)

        def plain(
            g: jax.Array,
            p: jax.Array | None,
            state: LeafState,
            h: Mapping[str, jax.Array],
            keys: tuple[jax.Array, jax.Array, jax.Array],
            plan: LeafPlan = named.nameless,
        ) -> Stepped:
            return _plain(rule, plan, g, p, state, h, keys[0])

        keys = batch.keys[number], row_keys[number], lane_bits[number]
        if batch.implementation is None and platform.target(g) is None:
            results.append(with_fallback("tpu", launched, plain, g, p, state, dict(h), keys))
        else:
            results.append(launched(g, p, state, dict(h), keys))
    return results


def _launches(batch: LeafBatch, indices: Sequence[int], tuned: tuning.Tuning) -> list[list[int]]:
    """Leaves that share a launch: they differ in shape alone.

    Launches of the same shapes compile once, so leaves are dealt: of shapes that occur equally
    often, as those of a model's layers do, each launch has as many. What is left over, and shapes
    of which there is one leaf, go with their neighbours.

    What an update is taken from is one new array a leaf, all of a launch at once: together at most
    4 bytes an element of the largest leaf, or 1 MB.
    """
    plans = batch.plans
    largest = max((math.prod(plans[i].shape) for i in indices), default=0)
    kinds: dict[Any, list[int]] = {}
    for i in indices:
        plan, g = plans[i], batch.gradients[i]
        lanes = Tiling(plan.shape, plan.group_size, tuned.tile.elements).lanes
        kind = (plan.shapeless, lanes, jnp.dtype(g.dtype))
        kinds.setdefault(kind, []).append(i)
    done = []
    for alike in kinds.values():
        plan, p = plans[alike[0]], batch.weights[alike[0]]
        most = tuned.elements
        if not plan.direct:
            itemsize = operands.update_dtype(plan, p).itemsize
            most = min(most, max(4 * largest, _UPDATES) // itemsize)
        sizes = {i: math.prod(plans[i].shape) for i in alike}
        shapes: dict[tuple[int, ...], list[int]] = {}
        for i in alike:
            shapes.setdefault(plans[i].shape, []).append(i)
        decks: dict[int, list[int]] = {}  # the first leaf of each shape, by how many there are
        for same in shapes.values():
            decks.setdefault(len(same), []).append(same[0])
        left = decks.pop(1, [])
        for count, firsts in decks.items():
            for pack in _in_order(firsts, sizes, tuned.leaves, most):
                size = sum(sizes[i] for i in pack)
                each = max(1, min(tuned.leaves // len(pack), most // size, count))
                alike_often = [shapes[plans[i].shape] for i in pack]
                equal = count // each if count >= 2 * each else 0
                for first in range(0, equal * each, each):
                    done.append([i for same in alike_often for i in same[first:][:each]])
                left += [i for same in alike_often for i in same[equal * each :]]
        done += _in_order(sorted(left), sizes, tuned.leaves, most)
    return done


def _in_order(
    leaves: Sequence[int], sizes: Mapping[int, int], most_leaves: int, most_elements: int
) -> list[list[int]]:
    """Neighbours together, until there are too many leaves or elements."""
    done: list[list[int]] = []
    elements = 0
    for i in leaves:
        elements += sizes[i]
        if not done or len(done[-1]) == most_leaves or elements > most_elements:
            done.append([])
            elements = sizes[i]
        done[-1].append(i)
    return done


def _by_kernel(rule: UpdateRule, kernel: str, batch: LeafBatch, tile: Tile) -> list[Stepped]:
    """The parameters of one launch."""
    plans = batch.nameless.plans
    arrays = list(zip(batch.gradients, batch.weights, batch.states, strict=True))
    of_blocks = [own.get(OF_BLOCK) for own in batch.operands]
    names = tuple(sorted(set(batch.h(0)) - {OF_BLOCK}))
    # a row for each leaf only where leaves differ
    hs = [batch.h(i) for i in range(len(batch) if rule.prepares == "leaf" else 1)]
    scalars = jnp.stack([jnp.stack([h[name] for name in names]) for h in hs])
    numbers = jnp.asarray(batch.numbers, jnp.int32)

    def launched(
        arrays: list[_LeafArrays],
        of_blocks: list[jax.Array | None],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[Stepped]:
        every = zip(plans, arrays, of_blocks, strict=True)
        leaves = tuple(operands.leaf_of(plan, *row, of_block) for plan, row, of_block in every)
        if kernel == "pallas":
            from optax_lowmem._src.update.pallas_triton import launch
        else:
            from optax_lowmem._src.update.jax_triton import launch
        found = launch(rule, plans, leaves, names, scalars, keys, numbers, tile)
        return [
            (reference.emit(plan, row[1], result.update), operands.state_of(plan, row[2], result))
            for plan, row, result in zip(plans, arrays, found, strict=True)
        ]

    def plain(
        arrays: list[_LeafArrays],
        of_blocks: list[jax.Array | None],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[Stepped]:
        hs = [dict(zip(names, row, strict=True)) for row in scalars]
        found = []
        every = zip(plans, arrays, of_blocks, batch.numbers, strict=True)
        for i, (plan, row, of_block, number) in enumerate(every):
            h = {**hs[i % len(hs)], **({} if of_block is None else {OF_BLOCK: of_block})}
            found.append(_plain(rule, plan, *row, h, keys[number]))
        return found

    if batch.implementation is not None:
        return launched(arrays, of_blocks, scalars, batch.keys)
    return with_fallback("cuda", launched, plain, arrays, of_blocks, scalars, batch.keys)
