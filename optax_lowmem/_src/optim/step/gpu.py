"""The step on a GPU: several leaves in one kernel, by Pallas or by generated Triton.

The body calls the same rule, codecs and split as the reference. Leaves that differ only in shape
share a launch: a program finds its leaf from its program id, loads a tile, steps and stores it.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.block import Block, product
from optax_lowmem._src.arrays.groups import MAX_ELEMENTS, Tile, Tiling
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.kernels import gpu_kernel, jaxpr_to_triton, platform
from optax_lowmem._src.kernels.fallback import on_one_device, with_fallback
from optax_lowmem._src.kernels.gpu_kernel import Operand, Place, Program
from optax_lowmem._src.kernels.step_arguments import scope
from optax_lowmem._src.optim.step import reference, tuning, xla
from optax_lowmem._src.optim.step.on_mesh import StepPartition
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.state import (
    Leaf,
    LeafBatch,
    aliases,
    output,
    restored,
    update_dtype,
)

_MAX_LANES = 1 << 16  # of generated Triton
_MAX_POINTERS = 480  # CUDA limits arguments to 4 KiB
_UPDATES = 1 << 20  # bytes of updates that a launch may always allocate


def is_too_large(plan: LeafPlan) -> bool:
    """Return whether a leaf has more elements than a kernel's offsets reach."""
    return math.prod(plan.shape) > MAX_ELEMENTS


def unsupported(backend: str, rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why the kernel of a backend cannot step a parameter, or None."""
    for slot in plan.slots:
        if slot.codec is not None and slot.codec.no_tile_reason is not None:
            return slot.codec.no_tile_reason
    if backend == "pallas":
        return None if platform.has_pallas_triton() else platform.NO_PALLAS_TRITON
    if not platform.has_jax_triton():
        return platform.NO_JAX_TRITON
    return triton_unsupported(rule, plan)


def triton_unsupported(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why generated Triton cannot step a leaf, or None."""
    if Tiling(plan.shape, plan.group_size, 1).lanes > _MAX_LANES:
        return f"groups of {plan.group_size}; the kernel takes up to {_MAX_LANES} elements"
    unknown = _unknown(rule, plan.shapeless)
    return unknown and f"the step uses `{unknown}`, which the Triton generator does not support"


@functools.cache
def _unknown(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return a primitive of the step that the Triton generator does not support, or None."""
    shape = Tiling((4, plan.group_size), plan.group_size, 4 * plan.group_size).tile_shape
    arithmetic = jaxpr_to_triton.APPROXIMATIONS
    return jaxpr_to_triton.missing(reference.jaxpr_of_tile(rule, plan, shape, arithmetic))


def step(
    backend: str, rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None
) -> list[Leaf]:
    """Step parameters that a backend supports, in as few launches as `tuned` allows."""
    cut = tuning.resolve(tuned, backend, len(batch.plans[0].slots), batch.plans[0].group_size)
    results: dict[int, Leaf] = {}
    for together in group_leaves(batch, cut):
        result = _step_launch(rule, backend, batch.take(together), cut.tile)
        results.update(zip(together, result, strict=True))
    return [results[i] for i in range(len(batch.plans))]


def group_leaves(batch: LeafBatch, tuned: tuning.Tuning) -> list[list[int]]:
    """Group the indices of leaves into launches; leaves of a launch differ only in path and shape.

    Launches with equal shapes compile once. Shapes that occur equally often, like those of a
    model's layers, are therefore distributed evenly, so that many launches have the same shapes.
    The remaining leaves, and shapes that occur once, are grouped in order.

    If a step returns updates, each leaf needs a new array for its weight or update. Those of a
    launch take at most 4 bytes per element of the largest leaf, or 1 MB.
    """
    plans = batch.plans
    largest = max(math.prod(plan.shape) for plan in plans)
    kinds: dict[Hashable, list[int]] = {}
    for i, (plan, leaf) in enumerate(zip(plans, batch.leaves, strict=True)):
        lanes = Tiling(plan.shape, plan.group_size, tuned.tile.elements).lanes
        kind = (plan.shapeless, lanes, jnp.dtype(leaf.g.dtype))
        kinds.setdefault(kind, []).append(i)
    done = []
    for alike in kinds.values():
        plan, p = plans[alike[0]], batch.leaves[alike[0]].p
        most = tuned.elements
        if not plan.returns_params:
            itemsize = update_dtype(plan, p).itemsize
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
    """Group leaves in order, up to a number of leaves and elements per group."""
    done: list[list[int]] = []
    elements = 0
    for i in leaves:
        elements += sizes[i]
        if not done or len(done[-1]) == most_leaves or elements > most_elements:
            done.append([])
            elements = sizes[i]
        done[-1].append(i)
    return done


def _step_launch(rule: UpdateRule, backend: str, batch: LeafBatch, tile: Tile) -> list[Leaf]:
    """Step the parameters of one launch: by the kernel, or by XLA where it cannot run."""
    paths = [plan.path for plan in batch.plans]
    plans = tuple(plan.nameless for plan in batch.plans)
    names, numbers = tuple(sorted(batch.h(0))), batch.numbers
    # one row per leaf only if hyperparameters differ between leaves
    hs = [batch.h(i) for i in range(len(batch.plans) if rule.prepares == "leaf" else 1)]
    scalars = jnp.stack([jnp.stack([h[name] for name in names]) for h in hs])

    def by_kernel(
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        leaves: list[Leaf],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[Leaf]:
        if any(map(is_too_large, plans)):  # on one device, or shards that are still too large
            return by_xla(True, plans, numbers, leaves, scalars, keys)
        arrays = tuple(leaves), names, scalars, keys, jnp.asarray(numbers, jnp.int32)
        with scope(paths, backend):
            results = launch(rule, plans, *arrays, tile, backend=backend)
        return [
            result._replace(p=reference.emit(plan, leaf.p, result.p))
            for plan, leaf, result in zip(plans, leaves, results, strict=True)
        ]

    def by_xla(
        two_passes: bool,
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        leaves: list[Leaf],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[Leaf]:
        hs = [dict(zip(names, row, strict=True)) for row in scalars]
        results = []
        for i, (plan, leaf, number) in enumerate(zip(plans, leaves, numbers, strict=True)):
            step = functools.partial(xla.plain, two_passes=two_passes and plan.quantized)
            with scope([paths[i]], "xla"):
                results.append(step(rule, plan, leaf, hs[i % len(hs)], keys[number]))
        return results

    arguments = (batch.leaves, scalars, batch.keys)
    content = f"{rule} {names} {tile}"
    # only XLA, when it partitions the program, knows the size of shards
    name = f"{backend}_or_xla" if any(map(is_too_large, plans)) else backend
    partition = StepPartition(name, content, by_kernel, paths, plans, numbers, arguments)
    run = functools.partial(by_kernel, plans, numbers)
    if batch.implementation is not None:
        result: list[Leaf] = on_one_device(run, run, *arguments, partition=partition)
        return result
    once, twice = (functools.partial(by_xla, passes, plans, numbers) for passes in (False, True))
    return with_fallback("cuda", run, once, *arguments, several=twice, partition=partition)


def _parts(plan: LeafPlan) -> Sequence[Block]:
    """Return the parts of a leaf's block, if it has one."""
    return plan.block.fit(plan.shape).parts if plan.block else ()


# of a tile: its leaf's number, its places in the arrays, in those of each slot, and in block-wise
# values, the counters of its random bits, and the arrays that are read and written
Chosen = tuple[int, Place, list[Place], list[jax.Array], jax.Array | None, Leaf, Leaf]


def _step_program(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    tilings: Sequence[Tiling],
    names: Sequence[str],
    program: Program,
    scalars: Operand,
    keys: Operand,
    lane_seeds: Operand,
    numbers: Operand,
    leaves: Sequence[Leaf],
    *results: Leaf,
) -> None:
    """Step a tile of one of several leaves, with operands in place of their arrays."""
    position, per_leaf, plan = program.index(), scalars.shape[0] > 1, plans[0].shapeless
    starts = [0, *itertools.accumulate(tiling.tiles for tiling in tilings[:-1])]
    packed = [slot.codes_per_byte for slot in plan.slots]

    def choose(i: int, shared: Sequence[int]) -> Chosen:
        tiling, tile = tilings[i], position - jnp.int32(starts[i])
        alike = [tilings[j] for j in shared]
        places = {each: Place.of(tiling, tile, each, alike) for each in {1, *packed}}
        of_slots = [places[each] for each in packed]
        of_block = [gpu_kernel.block_numbers(tiling, part, tile) for part in _parts(plans[i])]
        counters = gpu_kernel.counters(tiling, tile) if plan.noisy else None
        return i, places[1], of_slots, of_block, counters, leaves[i], results[i]

    def run(chosen: Chosen) -> None:
        i, place, of_slots, of_block, counters, read, into = chosen
        # first what is needed last: Triton would load it where it is used
        h = {name: scalars.load(i if per_leaf else 0, j) for j, name in enumerate(names)}
        seeds = None
        if counters is not None:
            number = numbers.load(i)
            key, lanes = keys.load(number), gpu_kernel.Range(0, lane_seeds.shape[1])
            seeds = random.mix(key + counters)[:, None], lane_seeds.load(number, lanes)
        leaf = _load(plan, place, of_slots, read)
        if of_block:
            pairs = zip(of_block, jax.tree.leaves(read.of_block), strict=True)
            values = product([place.load_of_block(x, at) for at, x in pairs])
            leaf = leaf._replace(of_block=values)
        result = _step_tile(rule, plan, program.approximations, leaf, h, seeds)
        _store(place, of_slots, into, result)

    program.with_one(position, starts, choose, run)


# jitted so that equal tiles are traced once for all leaves and launches; the lowering inlines it
@functools.partial(jax.jit, static_argnames=("rule", "plan", "approximations"))
def _step_tile(
    rule: UpdateRule,
    plan: LeafPlan,
    approximations: numerics.Approximations | None,
    leaf: Leaf,
    h: Arrays,
    seeds: random.Seeds | None,
) -> Leaf:
    if approximations is None:
        return reference.step_tile(rule, plan, leaf, h, seeds)
    with numerics.kernel_arithmetic(approximations):
        return reference.step_tile(rule, plan, leaf, h, seeds)


def _load(plan: LeafPlan, place: Place, of_slots: Sequence[Place], leaf: Leaf) -> Leaf:
    """Load a tile of a leaf, without `of_block`; lanes and groups out of bounds are zero.

    `of_slots` are the tile's places in the arrays of the slots.
    """
    g, p, correction = place.load(leaf.g), None, None
    if leaf.p is not None:
        p = place.load(leaf.p)
    if leaf.correction is not None:
        correction = place.load(leaf.correction, plan.split.zero if plan.split is not None else 0)
    slots = tuple(own.load(slot) for own, slot in zip(of_slots, leaf.slots, strict=True))
    return Leaf(g, p, slots, tuple(map(place.load_scales, leaf.scales)), correction)


def _store(place: Place, of_slots: Sequence[Place], into: Leaf, result: Leaf) -> None:
    for scales, values in zip(into.scales, result.scales, strict=True):
        place.store_scales(scales, values)
    place.store(into.p, result.p)
    if result.correction is not None:
        place.store(into.correction, result.correction)
    for own, slot, values in zip(of_slots, into.slots, result.slots, strict=True):
        own.store(slot, values)


@functools.partial(
    jax.jit, static_argnames=("rule", "plans", "names", "tile", "backend"), inline=False
)
def launch(
    rule: UpdateRule,
    plans: tuple[LeafPlan, ...],
    leaves: tuple[Leaf, ...],
    names: tuple[str, ...],
    scalars: jax.Array,
    keys: jax.Array,
    leaf_numbers: jax.Array,
    tile: Tile,
    backend: str = "pallas",
) -> list[Leaf]:
    """Step leaves whose plans differ only in path and shape.

    `scalars` are the hyperparameters, f32 [1, len(names)], or [len(plans), len(names)] if they
    differ between leaves. `keys` are of all leaves of the tree, uint32 [leaves], or of their
    shards, [leaves, 2]; `leaf_numbers`, int32 [len(plans)], are the indices of these leaves' keys.
    """
    codes = [_code_of(plan, tile) if backend == "triton" else None for plan in plans]
    most = _MAX_POINTERS // (2 * len(jax.tree.leaves(leaves[0])) + 1)
    row_keys, lane_keys = random.row_and_lane_keys(keys, rank=1)
    results: dict[int, Leaf] = {}
    for kind in dict.fromkeys(codes):
        alike = [i for i, other in enumerate(codes) if other == kind]
        for first in range(0, len(alike), most):
            indices = alike[first : first + most]
            at = None if len(indices) == len(plans) else jnp.asarray(indices)
            of_launch = [plans[i] for i in indices]
            tilings = _tilings(of_launch, tile.elements, backend)
            rows = zip(of_launch, tilings, [leaves[i] for i in indices], strict=True)
            viewed = [views(*row) for row in rows]
            # computed once here, since all tiles of a leaf use the same lane seeds
            lanes = lax.iota(jnp.uint32, tilings[0].lanes)[None]
            lane_seeds = random.lane_seeds(lane_keys[:, None], lanes)
            outputs = [output(plan, leaf) for plan, leaf in zip(of_launch, viewed, strict=True)]
            stepped = gpu_kernel.launch(
                functools.partial(_step_program, rule, of_launch, tilings, names),
                [
                    scalars if at is None or len(scalars) == 1 else scalars[at],
                    row_keys, lane_seeds, leaf_numbers if at is None else leaf_numbers[at], viewed,
                ],
                outputs,
                (sum(tiling.tiles for tiling in tilings),),
                warps=tile.warps,
                name="fused_update",
                backend=backend,
                in_place=aliases(of_launch[0], viewed, outputs, first=4),
            )  # fmt: skip
            for i, result in zip(indices, stepped, strict=True):
                results[i] = restored(plans[i], leaves[i], result)
    return [results[i] for i in range(len(plans))]


def views(plan: LeafPlan, tiling: Tiling, leaf: Leaf) -> Leaf:
    """Reshape the arrays of a leaf to the views that its kernel reads."""
    g, p, correction = jax.tree.map(tiling.element_view, (leaf.g, leaf.p, leaf.correction))
    pairs = zip(plan.slots, leaf.slots, strict=True)
    slots = tuple(tiling.of_bytes(slot.codes_per_byte).element_view(x) for slot, x in pairs)
    scales, of_block = jax.tree.map(lambda x: x.reshape(-1), (leaf.scales, leaf.of_block))
    return Leaf(g, p, slots, scales, correction, of_block)


def _tilings(plans: Sequence[LeafPlan], elements: int, backend: str) -> tuple[Tiling, ...]:
    """Return the tilings of the leaves of a launch, with at most this many elements per tile."""
    if backend == "triton":
        form = gpu_kernel.Form.of([Tiling(plans[0].shape, plans[0].group_size, elements)])
        # without vector loads, neighbours go to different threads; each thread then handles many
        # groups, whose offsets take registers
        elements = elements if form.flat or form.alignment == gpu_kernel.VECTOR else elements // 2
    return tuple(Tiling(plan.shape, plan.group_size, elements) for plan in plans)


def _code_of(plan: LeafPlan, tile: Tile) -> tuple[gpu_kernel.Form, tuple[bool, ...]]:
    """Return a key that is equal for leaves which can share generated Triton code."""
    tiling = Tiling(plan.shape, plan.group_size, tile.elements)
    within = tuple(gpu_kernel.within_groups(tiling, part) for part in _parts(plan))
    return gpu_kernel.Form.of([tiling])._replace(masked=True), within
