"""The mean that a rule prepares with, over a leaf, in one read of what it takes (a TPU kernel).

XLA moves every group to where it can be decoded, and stores what it decodes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_lowmem._src.core import lanes, numerics, platform
from optax_lowmem._src.core.groups import result_like
from optax_lowmem._src.core.lanes import LANES, ROWS, Blocks
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.core.varying import mean_of_leaf
from optax_lowmem._src.update import pallas_tpu_views as views
from optax_lowmem._src.update import reference, tuning
from optax_lowmem._src.update.operands import Leaf, leaf_of
from optax_lowmem._src.update.pallas_tpu_kernel import (
    ARITHMETIC,
    Kernel,
    Registers,
    Rows,
    Scratch,
)
from optax_lowmem._src.update.plan import LeafPlan, LeafState

_SUBLANES = 8


def _measure(rows: Rows, sums: Any) -> None:
    """Add what is measured of some rows of a block."""
    kernel = rows.kernel
    plan, nothing = kernel.plan, (None,) * len(kernel.plan.slots)
    units = jax.tree.map(lambda ref: ref[rows.rows, :], rows.scratch.units)

    def step(j: jax.Array) -> None:
        for layout in rows.registers_of(j):
            leaf = rows.load(layout)
            correction = jnp.zeros((), jnp.int8) if leaf.correction is None else leaf.correction
            scales: Any = nothing
            state = LeafState(leaf.slots, scales, correction)
            values = reference.decode(plan, state, layout, units)
            g, _ = reference.gradient_and_weight(plan, leaf.g, leaf.p, correction, rows.h)
            found = kernel.rule.measured(g, values, rows.h)
            sums[...] += _existing(kernel.blocks, rows, layout, found)

    rows.every(step)


def _existing(blocks: Blocks, rows: Rows, layout: Registers, x: jax.Array) -> jax.Array:
    """The values of elements that exist, and 0 for what a block has beyond the array."""
    (i, j), exists = rows.block, None
    if blocks.rows % blocks.block_rows:
        row = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
        exists = row < blocks.rows - (i * blocks.block_rows + rows.i * ROWS)
    if blocks.columns % (LANES * blocks.at_once):
        column = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        own = column < blocks.columns - (j * blocks.width + layout.register * LANES)
        exists = own if exists is None else exists & own
    return x if exists is None else jnp.where(exists, x, jnp.float32(0))


@functools.partial(
    jax.jit,
    static_argnames=("rule", "plan", "names", "elements", "axes", "interpret"),
    inline=False,
)
def mean(
    rule: UpdateRule,
    plan: LeafPlan,
    leaf: Leaf,
    names: tuple[str, ...],
    scalars: jax.Array,
    elements: int,
    interpret: Any = False,
    axes: tuple[str, ...] | None = None,
) -> jax.Array:
    """The mean over a leaf of what `rule.measured` gives, f32 [].

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's, with the slots that the rule `measures`.
      leaf: arrays of those; a weight only where the gradient takes weight decay.
      names: of the hyperparameters.
      scalars: the hyperparameters, f32 [len(names)].
      elements: of a block, at most.
      interpret: as of `pallas_tpu.launch`.
      axes: of a mesh, over which parts of the leaf lie; None where JAX knows it.
    """
    moving = views.bytes_of(leaf.g, leaf.p, leaf.correction, leaf.slots)
    blocks = views.blocks_of(plan, leaf, moving, elements)
    kernel, viewed = Kernel(rule, plan, blocks, names), views.view(plan, blocks, leaf)
    units = kernel.scratch().units
    given = jax.tree.leaves(viewed)
    structure = jax.tree.structure((viewed, units))

    def body(scalars: Any, *refs: Any) -> None:
        *arrays, sums = refs
        out = arrays.pop(len(given))
        read, own = jax.tree.unflatten(structure, arrays)
        scratch = Scratch(own, {}, {}, {})
        h = {name: scalars[j] for j, name in enumerate(names)}
        block = pl.program_id(0), pl.program_id(1)
        sums[...] = jnp.zeros_like(sums)
        with numerics.kernel_arithmetic(ARITHMETIC):
            kernel.decode(read, scratch)

            def step(i: jax.Array, nothing: None) -> None:
                _measure(Rows(kernel, block, i, h, None, None, read, None, scratch), sums)

            lax.fori_loop(0, blocks.block_rows // ROWS, step, None)
        parts = [sums[k : k + _SUBLANES] for k in range(0, ROWS, _SUBLANES)]
        out[...] = functools.reduce(jnp.add, parts)

    along = blocks.grid[1]
    tile = (_SUBLANES, LANES)
    sums = pl.pallas_call(
        body,
        out_shape=result_like(leaf.g, (blocks.grid[0] * along, *tile), jnp.float32),
        grid=blocks.grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *jax.tree.leaves(views.specs(plan, blocks, viewed)),
        ],
        out_specs=pl.BlockSpec((None, *tile), lambda i, j: (i * along + j, 0, 0)),
        scratch_shapes=[
            *(pltpu.VMEM(x.shape, x.dtype) for x in jax.tree.leaves(units)),
            pltpu.VMEM((ROWS, LANES), jnp.float32),
        ],
        compiler_params=views.compiler_params(blocks, moving, units),
        interpret=interpret,
        name="leaf_mean",
    )(scalars, *views.in_hbm(given, interpret))
    share = jnp.float32(sums.size / leaf.g.size)
    if axes is None:
        return mean_of_leaf(sums) * share
    of_part = jnp.mean(sums) * share
    return lax.pmean(of_part, axes) if axes else of_part


def array_reason(g: jax.Array) -> str | None:
    """Return the reason why `mean_of_array` does not take an array, or None."""
    if g.dtype == jnp.float16:
        return "Mosaic has no float16"
    return lanes.unsupported(g.shape, LANES)


def mean_of_array(
    rule: UpdateRule, g: jax.Array, scale: jax.Array | None, otherwise: Callable[..., jax.Array]
) -> jax.Array:
    """The mean over an array of what a rule without slots measures of scale g, f32 [].

    Args:
      rule: which `measures`.
      g: what `array_reason` has no reason against.
      scale: an f32 factor; None for 1.
      otherwise: (g, scale) -> the same, for a program that turns out to be for no TPU.
    """
    wide = jnp.dtype(jnp.float32)
    plan = LeafPlan("", g.shape, g.dtype, LANES, (), None, wide, decays=False)
    names = () if scale is None else ("gradient_scale",)
    cut = tuning.resolve(None, "pallas_tpu", 0, LANES)

    def by_kernel(g: jax.Array, scale: jax.Array | None) -> jax.Array:
        scalars = jnp.stack([jnp.ones((), wide) if scale is None else scale])
        leaf = Leaf(g, None, None, (), ())
        with platform.targeting(g):
            return mean(rule, plan, leaf, names, scalars, cut.tile.elements)

    if platform.target(g) is None:
        return lax.platform_dependent(g, scale, tpu=by_kernel, default=otherwise)
    return by_kernel(g, scale)


def prepared(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    axes: tuple[str, ...] | None = None,
    otherwise: Callable[..., Mapping[str, jax.Array]] | None = None,
) -> Mapping[str, jax.Array]:
    """`reference.prepare` of a leaf by the kernel.

    Args:
      rule: the optimizer's arithmetic, which `measures`.
      plan: the leaf's.
      g: gradient.
      p: parameter, or None.
      state: stored slots, scales, correction.
      h: hyperparameters.
      axes: as of `mean`.
      otherwise: (g, p, state, h) -> the same, for a program that turns out to be for no TPU; None
        where the caller asked for the kernel.
    """
    mine = [i for i, slot in enumerate(plan.slots) if slot.name in rule.measures]
    own = dataclasses.replace(plan, slots=tuple(plan.slots[i] for i in mine))
    names = tuple(sorted(h))
    cut = tuning.resolve(None, "pallas_tpu", rule.elementwise_slots, plan.group_size)

    def by_kernel(
        g: jax.Array, p: jax.Array | None, state: LeafState, h: Mapping[str, jax.Array]
    ) -> Mapping[str, jax.Array]:
        slots, scales = (tuple(x[i] for i in mine) for x in (state.slots, state.scales))
        weight = p if plan.decays and "l2" in h else None
        leaf = leaf_of(own, g, weight, LeafState(slots, scales, state.correction))
        scalars = jnp.stack([h[name] for name in names])
        with platform.targeting(g):
            found = mean(rule, own, leaf, names, scalars, cut.tile.elements, axes=axes)
        return {**h, **rule.of_mean(found, h)}

    arguments = g, p, state, dict(h)
    if otherwise is not None and platform.target(g) is None:
        return lax.platform_dependent(*arguments, tpu=by_kernel, default=otherwise)
    return by_kernel(*arguments)
