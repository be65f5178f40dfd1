"""Groups leaves into launches of the GPU kernel, by Pallas or by generated Triton."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core.groups import Tile, Tiling
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.fallback import on_one_device, with_fallback
from optax_lowmem._src.step import operands, reference, tuning, xla
from optax_lowmem._src.step.batch import Leaf, LeafBatch, Result
from optax_lowmem._src.step.gpu import kernel
from optax_lowmem._src.step.partition import StepPartition
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.rule import UpdateRule
from optax_lowmem._src.step.scopes import scope

_UPDATES = 1 << 20  # bytes of updates that a launch may always allocate


def unsupported(backend: str, rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why the kernel of a backend cannot step a parameter, or None."""
    for slot in plan.slots:
        if slot.codec is not None and slot.codec.bits < 8 and slot.codec.no_tile_reason:
            return slot.codec.no_tile_reason
    if backend == "pallas":
        return None if platform.has_pallas_triton() else platform.NO_PALLAS_TRITON
    if not platform.has_jax_triton():
        return platform.NO_JAX_TRITON
    return kernel.unsupported(rule, plan)


def step(
    backend: str, rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None
) -> list[Result]:
    """Step parameters that a backend supports, in as few launches as `tuned` allows."""
    cut = tuning.resolve(tuned, backend, rule.elementwise_slots, batch.plans[0].group_size)
    results: dict[int, Result] = {}
    for together in group_leaves(batch, cut):
        result = _step_launch(rule, backend, batch.take(together), cut.tile)
        results.update(zip(together, result, strict=True))
    return [results[i] for i in range(len(batch))]


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
    kinds: dict[Any, list[int]] = {}
    for i, (plan, g) in enumerate(zip(plans, batch.gradients, strict=True)):
        lanes = Tiling(plan.shape, plan.group_size, tuned.tile.elements).lanes
        kind = (plan.shapeless, lanes, jnp.dtype(g.dtype))
        kinds.setdefault(kind, []).append(i)
    done = []
    for alike in kinds.values():
        plan, p = plans[alike[0]], batch.weights[alike[0]]
        most = tuned.elements
        if not plan.returns_params:
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


def _step_launch(rule: UpdateRule, backend: str, batch: LeafBatch, tile: Tile) -> list[Result]:
    """Step the parameters of one launch."""
    plans, paths = batch.nameless.plans, [plan.path for plan in batch.plans]
    leaves = [batch.leaf(i) for i in range(len(batch))]
    names, numbers = tuple(sorted(batch.h(0))), batch.numbers
    # one row per leaf only if hyperparameters differ between leaves
    hs = [batch.h(i) for i in range(len(batch) if rule.prepares == "leaf" else 1)]
    scalars = jnp.stack([jnp.stack([h[name] for name in names]) for h in hs])

    def by_kernel(
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        leaves: list[Leaf],
        scalars: jax.Array,
        keys: jax.Array,
    ) -> list[Result]:
        arrays = tuple(leaves), names, scalars, keys, jnp.asarray(numbers, jnp.int32)
        with scope(paths, backend):
            results = kernel.launch(rule, plans, *arrays, tile, backend=backend)
        return [
            result._replace(update=reference.emit(plan, leaf.p, result.update))
            for plan, leaf, result in zip(plans, leaves, results, strict=True)
        ]

    def by_xla(
        two_passes: bool, leaves: list[Leaf], scalars: jax.Array, keys: jax.Array
    ) -> list[Result]:
        hs = [dict(zip(names, row, strict=True)) for row in scalars]
        results = []
        for i, (plan, leaf, number) in enumerate(zip(plans, leaves, numbers, strict=True)):
            step = functools.partial(xla.plain, two_passes=two_passes and plan.quantized)
            with scope([paths[i]], "xla"):
                results.append(step(rule, plan, leaf, hs[i % len(hs)], keys[number]))
        return results

    arguments = (leaves, scalars, batch.keys)
    content = f"{rule} {names} {tile}"
    partition = StepPartition(backend, content, by_kernel, paths, plans, numbers, arguments)
    run = functools.partial(by_kernel, plans, numbers)
    if batch.implementation is not None:
        result: list[Result] = on_one_device(run, run, *arguments, partition=partition)
        return result
    once, twice = (functools.partial(by_xla, two_passes) for two_passes in (False, True))
    return with_fallback("cuda", run, once, *arguments, several=twice, partition=partition)
