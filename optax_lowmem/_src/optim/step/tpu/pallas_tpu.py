"""The step of a leaf in one TPU kernel: Pallas, lowered through Mosaic.

The body (`pallas_tpu_kernel.py`) calls the same rule, codecs and split as the reference, on
registers (`lanes.py`) instead of whole arrays. Groups are on lanes, so that the maximum of a group
takes log2(G) shuffles; the kernel reduces the groups of many registers together (`lanes.tree`).
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.codecs import GroupCodec
from optax_lowmem._src.arrays.codecs.weights import WeightFormat
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.kernels.step_arguments import scope
from optax_lowmem._src.optim.step import reference, tuning, xla
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
from optax_lowmem._src.optim.step.tpu import lanes
from optax_lowmem._src.optim.step.tpu import pallas_tpu_views as views
from optax_lowmem._src.optim.step.tpu.lanes import LANES, ROWS
from optax_lowmem._src.optim.step.tpu.pallas_tpu_kernel import ARITHMETIC, Kernel, Ref

NAME = "pallas_tpu"

# Primitives of our rules, codecs and splits that Mosaic supports.
_KNOWN = frozenset(
    (
        "abs add and bitcast_convert_type broadcast_in_dim convert_element_type div eq exp "
        "exp2 floor ge gt integer_pow iota is_finite le log lt max min mul ne neg not or "
        "reduce_max reduce_min reduce_sum rem reshape rsqrt select_n shift_left "
        "shift_right_arithmetic shift_right_logical sign sqrt square sub tanh xor"
    ).split()
)


def unsupported(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why this kernel cannot step a leaf, or None."""
    reason = lanes.unsupported(plan.shape, plan.group_size)
    if reason is None and plan.block is not None:
        reason = views.block_reason(plan.block, plan.shape)
        if plan.block.elementwise:
            reason = "its second moments are elementwise, in f32: plain elementwise work"
    if reason is not None:
        return reason
    if isinstance(plan.weight_format, WeightFormat):
        return f"weights of {plan.weight_format.name} need a group's maximum before the moments"
    for several in (slot.codes_per_byte for slot in plan.slots):
        if several > 1 and plan.shape[-1] % (several * LANES):
            return f"its last axis is not a multiple of {several * LANES}, a register of bytes"
    kept = [slot.codec.scale for slot in plan.slots if slot.codec]
    if jnp.float16 in (plan.dtype, plan.update_dtype, *(scale.dtype for scale in kept)):
        return "Mosaic has no float16"
    unknown = _unknown(rule, plan.shapeless)
    return unknown and f"the step uses `{unknown}`, which Mosaic is not known to support"


@functools.cache
def _unknown(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return a primitive of the step that Mosaic is not known to support, or None."""
    for slot in plan.slots:
        if slot.codec is not None and type(slot.codec).pack is not GroupCodec.pack:
            return f"{type(slot.codec).__name__}.pack"

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # a mesh would add reshards
        traced = reference.jaxpr_of_tile(rule, plan, (ROWS, plan.group_size), ARITHMETIC)
    return next((name for name in _primitives(traced.jaxpr) if name not in _KNOWN), None)


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        if not inner:
            yield equation.primitive.name
        for own in inner:
            yield from _primitives(getattr(own, "jaxpr", own))


def register_seeds(lane_keys: jax.Array, group_size: int) -> jax.Array:
    """Return `random.lane_seeds` of the lanes of a register, or group if larger, per leaf."""
    lane = lax.iota(jnp.uint32, max(LANES, group_size)) % jnp.uint32(group_size)
    return random.lane_seeds(lane_keys[:, None], lane[None])


@functools.partial(
    jax.jit, static_argnames=("rule", "plan", "names", "elements", "interpret"), inline=False
)
def launch(
    rule: UpdateRule,
    plan: LeafPlan,
    leaf: Leaf,
    names: tuple[str, ...],
    scalars: jax.Array,
    row_key: jax.Array,
    lane_seeds: jax.Array,
    elements: int,
    interpret: bool = False,
) -> Leaf:
    """Step one leaf.

    `row_key` is the key of the random bits R, `lane_seeds` are C from `register_seeds`. A block has
    at most `elements` elements. `interpret` runs as plain JAX, on any device.
    """
    of_elements = leaf.state._replace(scales=())
    moving = views.bytes_of(leaf.g, leaf.p, of_elements)
    moving += update_dtype(plan, leaf.p).itemsize + views.bytes_of(of_elements)
    blocks = views.blocks_of(plan, leaf, moving, elements)
    kernel = Kernel(rule, plan, blocks, names)
    viewed = views.view(plan, blocks, leaf)
    results = output(plan, viewed)
    specs = views.specs(plan, blocks, viewed)
    out_specs = specs.state._replace(p=specs.g)
    scratch = kernel.scratch()
    trees = viewed, results, scratch
    flat = [jax.tree.leaves(tree) for tree in trees]
    together = jax.tree.structure(trees)

    def body(scalars: Ref, key: Ref, lane_seeds: Ref, *refs: Ref) -> None:
        kernel.run(scalars, key, lane_seeds, *jax.tree.unflatten(together, refs))

    in_scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    outputs = pl.pallas_call(
        body,
        out_shape=flat[1],
        grid=blocks.grid,
        in_specs=[
            in_scalars,
            in_scalars,
            pl.BlockSpec((1, lane_seeds.size), lambda i, j: (0, 0)),
            *jax.tree.leaves(specs),
        ],
        out_specs=jax.tree.leaves(out_specs),
        input_output_aliases=aliases(plan, [viewed], [results], first=3),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in flat[2]],
        compiler_params=views.compiler_params(blocks, moving, scratch),
        interpret=interpret,
        name="fused_update",
    )(scalars, row_key[None], lane_seeds[None], *views.in_hbm(flat[0], interpret))
    result: Leaf = jax.tree.unflatten(jax.tree.structure(results), outputs)
    pairs = zip(result.scales, leaf.scales, strict=True)
    scales = tuple(views.scales_of(blocks, *pair) for pair in pairs)
    return restored(plan, leaf, result._replace(scales=scales))


def step(rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None) -> list[Leaf]:
    """Step each parameter in a separate launch, which costs almost nothing on a TPU."""
    group_size = batch.plans[0].group_size
    elements = tuning.resolve(tuned, NAME, len(batch.plans[0].slots), group_size).tile.elements
    # computed once for all parameters
    row_keys, lane_keys = random.row_and_lane_keys(batch.keys, rank=1)
    lane_seeds = register_seeds(lane_keys, group_size)
    results = []
    for i, number in enumerate(batch.numbers):
        by_kernel = functools.partial(_step_by_kernel, rule, batch.plans[i], elements)
        by_xla = functools.partial(_step_by_xla, rule, batch.plans[i])
        keys = batch.keys[number], row_keys[number], lane_seeds[number]
        arrays = batch.leaves[i], batch.h(i), keys
        results.append(with_fallback("tpu", by_kernel, by_xla, *arrays))
    return results


Keys = tuple[jax.Array, jax.Array, jax.Array]  # a leaf's key, its key of R, its lanes' bits C


def _step_by_kernel(
    rule: UpdateRule, plan: LeafPlan, elements: int, leaf: Leaf, h: Arrays, keys: Keys
) -> Leaf:
    names = tuple(sorted(h))
    scalars = jnp.stack([h[name] for name in names])
    with platform.targeting(leaf.g), scope([plan.path], NAME):
        result = launch(rule, plan.nameless, leaf, names, scalars, *keys[1:], elements)
    return result._replace(p=reference.emit(plan, leaf.p, result.p))


def _step_by_xla(rule: UpdateRule, plan: LeafPlan, leaf: Leaf, h: Arrays, keys: Keys) -> Leaf:
    with scope([plan.path], "xla"):
        result: Leaf = xla.plain(rule, plan.nameless, leaf, h, keys[0])
    return result
