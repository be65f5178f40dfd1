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
from optax_lowmem._src.update.plan import LeafPlan, LeafState

_PlannedLeaf = tuple[LeafPlan, jax.Array, jax.Array | None, LeafState]  # with gradient, weight
_LeafArrays = tuple[jax.Array, jax.Array | None, LeafState]

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
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    states: Sequence[LeafState],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    implementation: str | None = None,
    tuned: tuning.Tuning | None = None,
) -> list[tuple[jax.Array, LeafState]]:
    """`reference.fused_update` of every leaf, by the fastest implementation for each.

    Args:
      rule: the optimizer's arithmetic.
      plans: the leaves' static choices.
      gradients: one a leaf.
      weights: parameters, or None each.
      states: stored states.
      of_leaves: the hyperparameters and operands of each leaf, as of `prepare_leaves`.
      keys: uint32 [leaves], for the rounding of each leaf in this step.
      implementation: one of `IMPLEMENTATIONS`, or None for the fastest.
      tuned: how a kernel's work is cut; None for what is known of the device.
    """
    results: dict[int, tuple[jax.Array, LeafState]] = {}
    rows: list[_PlannedLeaf] = list(zip(plans, gradients, weights, states, strict=True))
    placed = _placed(rule, plans, states, gradients, implementation)
    if placed:
        results.update(_on_mesh(rule, rows, placed, of_leaves, keys, implementation, tuned))
    chosen = [
        "done" if i in results else choose(rule, plan, implementation, g)[0]
        for i, (plan, g, *_) in enumerate(rows)
    ]
    for kernel in _KERNELS:
        mine = [i for i, name in enumerate(chosen) if name == kernel]
        if not mine:
            continue
        size = plans[mine[0]].group_size  # one for all leaves of an optimizer
        cut = tuning.resolve(tuned, kernel, rule.elementwise_slots, size)
        for batch in _batches(rows, mine, cut):
            taken, own = [rows[i] for i in batch], [of_leaves[i] for i in batch]
            found = _by_kernel(
                rule, kernel, taken, own, keys, batch, cut.tile, implementation is None
            )
            results.update(zip(batch, found, strict=True))
    by_tpu = [i for i, name in enumerate(chosen) if name == _TPU]
    if by_tpu:
        cut = tuning.resolve(tuned, _TPU, rule.elementwise_slots, plans[by_tpu[0]].group_size)
        numbered = {i: rows[i] for i in by_tpu}
        results.update(
            _by_tpu(rule, numbered, of_leaves, keys, cut.tile.elements, implementation is None)
        )
    by_xla = [i for i, name in enumerate(chosen) if name == "xla"]
    if not by_xla:
        return [results[i] for i in range(len(rows))]
    # behind a barrier, or XLA moves them into the steps of the leaves and no two are the same
    numbers = jax.lax.optimization_barrier([jnp.uint32(i) for i in range(len(rows))])
    for i in by_xla:
        results[i] = _by_xla(rule, rows[i], of_leaves[i], keys, i, numbers[i])
    return [results[i] for i in range(len(rows))]


def _by_xla(
    rule: UpdateRule,
    row: _PlannedLeaf,
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    number: int,
    traced_number: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """The step of one leaf without a kernel; on Explicit axes its results lie where it did."""
    plan, g, p, state = row

    def step(
        g: jax.Array,
        p: jax.Array | None,
        state: LeafState,
        h: Mapping[str, jax.Array],
        keys: jax.Array,
        traced: jax.Array,
    ) -> tuple[jax.Array, LeafState]:
        arguments = (rule, plan.nameless, g, p, state, h)
        if packed.supported(plan, jax.default_backend()) is None:
            return packed.fused_update_among(*arguments, keys, traced)
        return fused_update(*arguments, keys[number])

    lies = jax.tree.map(explicit.sharding_of, on_mesh.result_like(g, p, state))
    return explicit.left_to_xla(step, lies, g, p, state, h, keys, traced_number)


def _placed(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    states: Sequence[LeafState],
    gradients: Sequence[jax.Array],
    implementation: str | None,
) -> dict[int, Placement]:
    """The leaves on a mesh whose parts kernels can step."""
    if implementation == "xla":
        return {}
    gpu = platform.no_device_reason() is None
    if not gpu and not scope.is_placing() and not _may_be_tpu(gradients, implementation):
        return {}
    places = {
        i: on_mesh.place_of(*row)
        for i, row in enumerate(zip(plans, states, gradients, strict=True))
    }
    return {
        i: place
        for i, place in places.items()
        if place is not None
        and on_mesh.supported(rule, plans[i], place) is None
        and (
            (gpu and rule.prepares != "blocks")  # whose means are XLA's there
            or implementation == _TPU
            or platform.may_be_tpu(gradients[i], place.mesh)
        )
    }


def _may_be_tpu(gradients: Sequence[jax.Array], implementation: str | None) -> bool:
    return implementation == _TPU or any(map(platform.may_be_tpu, gradients))


def _on_mesh(
    rule: UpdateRule,
    rows: Sequence[_PlannedLeaf],
    placed: Mapping[int, Placement],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    implementation: str | None,
    tuned: tuning.Tuning | None,
) -> Iterator[tuple[int, tuple[jax.Array, LeafState]]]:
    """(number, result) of the leaves on a mesh, those of one mesh together."""

    def step(
        plans: Sequence[LeafPlan],
        gradients: Sequence[jax.Array],
        weights: Sequence[jax.Array | None],
        states: Sequence[LeafState],
        own: Sequence[Mapping[str, jax.Array]],
        keys: jax.Array,
    ) -> list[tuple[jax.Array, LeafState]]:
        with scope.placing(None):
            return fused_updates(
                rule, plans, gradients, weights, states, own, keys, implementation, tuned
            )  # fmt: skip

    for mesh in dict.fromkeys(place.mesh for place in placed.values()):
        mine = [i for i, place in placed.items() if place.mesh == mesh]
        columns = zip(*(rows[i] for i in mine), strict=True)
        plans, gradients, weights, states = map(list, columns)
        found = on_mesh.fused_updates(
            step, plans, [placed[i] for i in mine], gradients, weights, states,
            [of_leaves[i] for i in mine], keys[jnp.asarray(mine)],
        )  # fmt: skip
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


def _by_tpu(
    rule: UpdateRule,
    rows: Mapping[int, _PlannedLeaf],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    elements: int,
    automatic: bool,
) -> Iterator[tuple[int, tuple[jax.Array, LeafState]]]:
    """(number, result) of leaves that have a launch each: on a TPU it costs next to nothing."""
    from optax_lowmem._src.update import pallas_tpu

    # mixed once, for all leaves
    row_keys, lane_keys = random.row_and_lane_keys(keys, rank=1)
    group_size = next(iter(rows.values()))[0].group_size
    lane_bits = pallas_tpu.register_bits(lane_keys, group_size)
    for i, (named, g, p, state) in rows.items():
        plan, h = named.nameless, of_leaves[i]

        def launched(
            g: jax.Array,
            p: jax.Array | None,
            state: LeafState,
            h: Mapping[str, jax.Array],
            own: tuple[jax.Array, jax.Array, jax.Array],
            plan: LeafPlan = plan,
        ) -> tuple[jax.Array, LeafState]:
            names = tuple(sorted(set(h) - {OF_BLOCK}))
            leaf = operands.leaf_of(plan, g, p, state, h.get(OF_BLOCK))
            scalars = jnp.stack([h[name] for name in names])
            with platform.targeting(g):
                result = pallas_tpu.launch(rule, plan, leaf, names, scalars, *own[1:], elements)
            update = reference.emit(plan, p, result.update)
            return update, operands.state_of(plan, state, result)

        def plain(
            g: jax.Array,
            p: jax.Array | None,
            state: LeafState,
            h: Mapping[str, jax.Array],
            own: tuple[jax.Array, jax.Array, jax.Array],
            plan: LeafPlan = plan,
        ) -> tuple[jax.Array, LeafState]:
            return _plain(rule, plan, g, p, state, h, own[0])

        given = g, p, state, dict(h), (keys[i], row_keys[i], lane_bits[i])
        if automatic and platform.target(g) is None:
            yield i, with_fallback("tpu", launched, plain, *given)
        else:
            yield i, launched(*given)


def _batches(
    rows: Sequence[_PlannedLeaf], indices: Sequence[int], tuned: tuning.Tuning
) -> list[list[int]]:
    """Leaves that share a launch: they differ in shape alone.

    Launches of the same shapes compile once, so leaves are dealt: of shapes that occur equally
    often, as those of a model's layers do, each launch has as many. What is left over, and shapes
    of which there is one leaf, go with their neighbours.

    What an update is taken from is one new array a leaf, all of a launch at once: together at most
    4 bytes an element of the largest leaf, or 1 MB.
    """
    largest = max((math.prod(rows[i][0].shape) for i in indices), default=0)
    kinds: dict[Any, list[int]] = {}
    for i in indices:
        plan, g = rows[i][:2]
        lanes = Tiling(plan.shape, plan.group_size, tuned.tile.elements).lanes
        kind = (plan.shapeless, lanes, jnp.dtype(g.dtype))
        kinds.setdefault(kind, []).append(i)
    done = []
    for alike in kinds.values():
        plan, _, p = rows[alike[0]][:3]
        most = tuned.elements
        if not plan.direct:
            itemsize = operands.update_dtype(plan, p).itemsize
            most = min(most, max(4 * largest, _UPDATES) // itemsize)
        sizes = {i: math.prod(rows[i][0].shape) for i in alike}
        shapes: dict[tuple[int, ...], list[int]] = {}
        for i in alike:
            shapes.setdefault(rows[i][0].shape, []).append(i)
        decks: dict[int, list[int]] = {}  # the first leaf of each shape, by how many there are
        for same in shapes.values():
            decks.setdefault(len(same), []).append(same[0])
        left = decks.pop(1, [])
        for count, firsts in decks.items():
            for pack in _in_order(firsts, sizes, tuned.leaves, most):
                size = sum(sizes[i] for i in pack)
                each = max(1, min(tuned.leaves // len(pack), most // size, count))
                alike_often = [shapes[rows[i][0].shape] for i in pack]
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


def _by_kernel(
    rule: UpdateRule,
    kernel: str,
    rows: Sequence[_PlannedLeaf],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    numbers: Sequence[int],
    tile: Tile,
    automatic: bool,
) -> list[tuple[jax.Array, LeafState]]:
    """The leaves of one launch."""
    plans = tuple(plan.nameless for plan, *_ in rows)
    arrays = [row[1:] for row in rows]
    of_blocks = [h.get(OF_BLOCK) for h in of_leaves]
    names = tuple(sorted(set(of_leaves[0]) - {OF_BLOCK}))
    # a row for each leaf only where leaves differ
    own = of_leaves if rule.prepares == "leaf" else of_leaves[:1]
    scalars = jnp.stack([jnp.stack([h[name] for name in names]) for h in own])
    leaf_numbers = jnp.asarray(numbers, jnp.int32)

    def launched(
        arrays: list[_LeafArrays],
        of_blocks: list[jax.Array | None],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[tuple[jax.Array, LeafState]]:
        every = zip(plans, arrays, of_blocks, strict=True)
        leaves = tuple(
            operands.leaf_of(plan, g, p, state, own) for plan, (g, p, state), own in every
        )
        if kernel == "pallas":
            from optax_lowmem._src.update.pallas_triton import launch
        else:
            from optax_lowmem._src.update.jax_triton import launch
        found = launch(rule, plans, leaves, names, scalars, keys, leaf_numbers, tile)
        return [
            (reference.emit(plan, row[1], result.update), operands.state_of(plan, row[2], result))
            for plan, row, result in zip(plans, arrays, found, strict=True)
        ]

    def plain(
        arrays: list[_LeafArrays],
        of_blocks: list[jax.Array | None],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[tuple[jax.Array, LeafState]]:
        hs = [dict(zip(names, row, strict=True)) for row in scalars]
        found = []
        every = zip(plans, arrays, of_blocks, numbers, strict=True)
        for i, (plan, row, own, number) in enumerate(every):
            h = {**hs[i % len(hs)], **({} if own is None else {OF_BLOCK: own})}
            found.append(_plain(rule, plan, *row, h, keys[number]))
        return found

    if not automatic:
        return launched(arrays, of_blocks, scalars, keys)
    return with_fallback("cuda", launched, plain, arrays, of_blocks, scalars, keys)
