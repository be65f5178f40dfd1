"""The step of several leaves in one GPU kernel: Pallas, lowered through Triton.

The body calls the same rule, codecs and split as the reference. Leaves that differ only in shape
share a launch: a program determines its leaf from its program id, and runs the branch of that leaf,
which loads, steps and stores a tile.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import numerics, random
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.groups import Tile, Tiling
from optax_lowmem._src.kernels import gpu_pallas, tiles
from optax_lowmem._src.step.batch import Leaf, LeafState, Result
from optax_lowmem._src.step.operands import (
    aliases,
    output,
    restored,
    slot_tilings,
    step_tile,
    views,
)
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.rule import UpdateRule


def _kernel(
    rule: UpdateRule,
    plan: LeafPlan,
    tilings: tuple[Tiling, ...],
    blocks: tuple[Block | None, ...],
    names: tuple[str, ...],
    treedefs: tuple[Any, Any],
    interpret: bool,
    *refs: Any,
) -> None:
    scalars, keys, lane_bits, leaf_numbers, *arrays = refs
    sizes = [treedef.num_leaves for treedef in treedefs]
    count, inputs = len(tilings), len(tilings) * sizes[0]
    read = [arrays[i * sizes[0] : (i + 1) * sizes[0]] for i in range(count)]
    written = [arrays[inputs + i * sizes[1] : inputs + (i + 1) * sizes[1]] for i in range(count)]
    program = pl.program_id(0)
    starts = [0, *itertools.accumulate(tiling.tiles for tiling in tilings[:-1])]

    per_leaf = scalars.shape[0] > 1

    def run(i: int) -> None:
        h = {name: scalars[i if per_leaf else 0, j] for j, name in enumerate(names)}
        tiling, tile = tilings[i], program - starts[i]
        own = jax.tree.unflatten(treedefs[0], map(gpu_pallas.Reference, read[i]))
        leaf = _load(plan, tiling, blocks[i], tile, own)
        noise = None
        if plan.noisy:
            number = leaf_numbers[i]
            noise = tiles.noise(tiling, tile, keys[number], lane_bits[number, :])
        result = _step(rule, plan, interpret, leaf, h, noise)
        into = jax.tree.unflatten(treedefs[1], map(gpu_pallas.Reference, written[i]))
        _store(plan, tiling, tile, into, result)

    # the whole step in each branch, since results of branches would be packed and unpacked
    gpu_pallas.in_leaf(starts, program, run)


# jitted so that equal tiles are traced once for all leaves and launches; the lowering inlines it
@functools.partial(jax.jit, static_argnames=("rule", "plan", "interpret"))
def _step(
    rule: UpdateRule,
    plan: LeafPlan,
    interpret: bool,
    leaf: Leaf,
    h: Mapping[str, jax.Array],
    noise: tuple[jax.Array, jax.Array] | None,
) -> Result:
    with _arithmetic(interpret):
        return step_tile(rule, plan, leaf, h, noise)


def _arithmetic(interpret: bool) -> contextlib.AbstractContextManager[None]:
    """Use the GPU's approximations; interpreted, the reference's exact expressions."""
    if interpret:
        return contextlib.nullcontext()
    return numerics.kernel_arithmetic(gpu_pallas.APPROXIMATIONS)


def _load(plan: LeafPlan, tiling: Tiling, block: Block | None, tile: jax.Array, refs: Any) -> Leaf:
    """Load a tile of a leaf; lanes and groups out of bounds are zero."""
    nothing, state = plan.split.zero if plan.split is not None else 0, refs.state
    g = tiles.load(tiling, refs.g, tile)
    p = None if refs.p is None else tiles.load(tiling, refs.p, tile)
    correction = None
    if state.correction is not None:
        correction = tiles.load(tiling, state.correction, tile, nothing)
    of_slots = zip(slot_tilings(plan, tiling), state.slots, strict=True)
    slots = tuple(tiles.load(own, ref, tile) for own, ref in of_slots)
    scales = tuple(tiles.load_scales(tiling, ref, tile) for ref in state.scales)
    of_block = tiles.load_of_block(tiling, block, refs.of_block, tile) if block else None
    return Leaf(g, p, LeafState(slots, scales, correction), of_block)


def _store(plan: LeafPlan, tiling: Tiling, tile: jax.Array, refs: Any, result: Result) -> None:
    state = result.state
    for ref, scale in zip(refs.state.scales, state.scales, strict=True):
        tiles.store_scales(tiling, ref, tile, scale)
    tiles.store(tiling, refs.update, tile, result.update)
    if state.correction is not None:
        tiles.store(tiling, refs.state.correction, tile, state.correction)
    for own, *slot in zip(slot_tilings(plan, tiling), refs.state.slots, state.slots, strict=True):
        ref, value = slot
        tiles.store(own, ref, tile, value)


@functools.partial(
    jax.jit, static_argnames=("rule", "plans", "names", "tile", "interpret"), inline=False
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
    interpret: bool = False,
) -> list[Result]:
    """Step leaves whose plans differ only in path and shape.

    Args:
      rule: the optimizer's arithmetic.
      plans: one per leaf.
      leaves: the arrays of each leaf.
      names: names of the hyperparameters.
      scalars: the hyperparameters, f32 [1, len(names)], or [len(plans), len(names)] if they differ
        between leaves.
      keys: random keys of all leaves of the tree, uint32 [leaves], or of their shards, [leaves, 2].
      leaf_numbers: indices of these leaves' keys, int32 [len(plans)].
      tile: size of a tile, and its warps.
      interpret: whether to run as plain JAX, on any device.
    """
    gpu_pallas.spare_imports()
    tilings = tuple(Tiling(plan.shape, plan.group_size, tile.elements) for plan in plans)
    viewed = [views(*row) for row in zip(plans, tilings, leaves, strict=True)]
    results = [output(plan, leaf) for plan, leaf in zip(plans, viewed, strict=True)]
    # computed once here, since all tiles of a leaf use the same lane bits
    lanes = lax.iota(jnp.uint32, tilings[0].lanes)[None]
    row_keys, lane_keys = random.row_and_lane_keys(keys, rank=1)
    lane_bits = random.lane_bits(lane_keys[:, None], lanes)
    blocks = tuple(plan.block for plan in plans)
    alike = plans[0].shapeless
    flat_in, flat_out = (jax.tree.leaves(tree) for tree in (viewed, results))
    treedefs = (jax.tree.structure(viewed[0]), jax.tree.structure(results[0]))
    body = functools.partial(_kernel, rule, alike, tilings, blocks, names, treedefs, interpret)
    outputs = pl.pallas_call(
        body,
        out_shape=flat_out,
        grid=(sum(tiling.tiles for tiling in tilings),),
        input_output_aliases=aliases(alike, viewed, results, first=4),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="fused_update",
    )(scalars, row_keys, lane_bits, leaf_numbers, *flat_in)
    outcome = jax.tree.unflatten(jax.tree.structure(results), outputs)
    return [
        restored(plan, leaf, result)
        for plan, leaf, result in zip(plans, leaves, outcome, strict=True)
    ]
