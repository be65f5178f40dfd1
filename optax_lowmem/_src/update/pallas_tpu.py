"""The step of a leaf in one TPU kernel: Pallas, lowered through Mosaic.

The body (`pallas_tpu_kernel.py`) calls the rule, the codecs and the split that the reference calls,
on registers (`core/lanes.py`) instead of whole arrays. XLA keeps groups on lanes, where a maximum
over each is a shuffle for every power of two; those of many registers are reduced together instead.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_lowmem._src.codecs import GroupCodec
from optax_lowmem._src.core import lanes, numerics, random
from optax_lowmem._src.core.lanes import LANES, ROWS, Blocks
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.update.operands import (
    AnyHyperparameters,
    Leaf,
    Result,
    aliases,
    output,
    restored,
    step_tile,
    update_dtype,
)
from optax_lowmem._src.update.pallas_tpu_kernel import ARITHMETIC, Kernel, several_in_a_byte
from optax_lowmem._src.update.plan import LeafPlan

_BUFFERS = 12 << 20  # bytes of a core's memory, of 16 MB, for blocks that come and go

# ---- leaves that it takes ------------------------------------------------------------------------

# What the rules, codecs and splits here are made of, and Mosaic has.
_KNOWN = frozenset(
    (
        "abs add and bitcast_convert_type broadcast_in_dim convert_element_type div eq exp "
        "exp2 floor ge gt integer_pow iota is_finite le log lt max min mul ne neg not or "
        "reduce_max reduce_min reduce_sum rem reshape rsqrt select_n shift_left "
        "shift_right_arithmetic shift_right_logical sign sqrt square sub tanh xor"
    ).split()
)


def unsupported(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why this kernel cannot take a leaf, or None."""
    reason = lanes.unsupported(plan.shape, plan.group_size) or _block_reason(plan)
    if reason is not None:
        return reason
    for several in map(several_in_a_byte, plan.slots):
        if several > 1 and plan.shape[-1] % (several * LANES):
            return f"its last axis is not a multiple of {several * LANES}, a register of bytes"
    kept = [slot.codec.scale for slot in plan.slots if slot.codec]
    if jnp.float16 in (plan.dtype, plan.update_dtype, *(scale.dtype for scale in kept)):
        return "Mosaic has no float16"
    unknown = _unknown(rule, plan.shapeless)
    return unknown and f"the step uses `{unknown}`, which Mosaic is not known to have"


def _block_reason(plan: LeafPlan) -> str | None:
    if plan.block is None:
        return None
    *leading, rows, columns = plan.block.mean_shape(plan.shape)
    if columns == 1 or rows == 1 and (math.prod(leading) == 1 or plan.shape[-2] % LANES == 0):
        return None
    return "its blocks have values along both of its last axes"


@functools.cache
def _unknown(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return a primitive of the step that is not known to be Mosaic's, or None."""
    for slot in plan.slots:
        if slot.codec is not None and type(slot.codec).pack is not GroupCodec.pack:
            return f"{type(slot.codec).__name__}.pack"

    def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    shape = (ROWS, plan.group_size)
    form = dataclasses.replace(plan, shape=shape).storage
    arrays: Any = (
        like(shape, jnp.float32),
        like(shape, plan.dtype),
        None if plan.split is None else like(shape, plan.split.dtype),
        tuple(slot.codes for slot in form),
        tuple(like((ROWS,), slot.scales.dtype) for slot in form if slot.scales.ndim),
    )
    leaf = Leaf(*arrays)
    bits = like((ROWS, 1), jnp.uint32), like((plan.group_size,), jnp.uint32)

    def step(leaf: Leaf, noise: Any) -> Result:
        given = noise if plan.noisy else None
        with numerics.kernel_arithmetic(ARITHMETIC):
            return step_tile(rule, plan, leaf, AnyHyperparameters(), given, None)

    traced = jax.make_jaxpr(step)(leaf, bits)
    return next((name for name in _primitives(traced.jaxpr) if name not in _KNOWN), None)


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        if not inner:
            yield equation.primitive.name
        for own in inner:
            yield from _primitives(getattr(own, "jaxpr", own))


# ---- the call ------------------------------------------------------------------------------------


def _scale_view(blocks: Blocks, scales: jax.Array) -> jax.Array:
    """The scales as XLA keeps them: [rows, groups], or [n, groups, rows]."""
    if not blocks.transposed:
        return scales.reshape(-1, blocks.groups)
    shape = (-1, *scales.shape[-2:]) if blocks.stacked else (1, -1, blocks.groups)
    return scales.reshape(shape).swapaxes(-1, -2)


def _scales_of_view(blocks: Blocks, view: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_scale_view`."""
    return (view.swapaxes(-1, -2) if blocks.transposed else view).reshape(like.shape)


def _scale_spec(blocks: Blocks) -> pl.BlockSpec:
    rows, groups = blocks.block_rows, blocks.block_groups
    if not blocks.transposed:
        return pl.BlockSpec((rows, groups), lambda i, j: (i, j))
    if not blocks.stacked:
        return pl.BlockSpec((None, groups, rows), lambda i, j: (0, j, i))
    each = blocks.shape[-2] // rows
    return pl.BlockSpec((None, groups, rows), lambda i, j: (lax.div(i, each), j, lax.rem(i, each)))


def _of_block(plan: LeafPlan, values: jax.Array | None) -> tuple[jax.Array | None, bool, bool]:
    """Return values of blocks of each row [1, rows], or of each column [n, 1, columns].

    Returns:
      (values, whether they are of rows, whether blocks of a kernel must be within one matrix).
    """
    if plan.block is None or values is None:
        return None, False, False
    if values.shape[-1] == 1:
        spread = plan.block.spread(values, (*plan.shape[:-1], 1))
        return spread.reshape(1, -1), True, False
    alike = math.prod(values.shape[:-1]) == 1  # in all matrices
    leading = values.shape[:-1] if alike else (*plan.shape[:-2], 1)
    spread = plan.block.spread(values, (*leading, plan.shape[-1]))
    return spread.reshape(-1, 1, plan.shape[-1]), False, not alike


def _specs(plan: LeafPlan, blocks: Blocks, viewed: Leaf) -> Leaf:
    """The blocks of a leaf's arrays."""

    def elements(several: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.block_rows, blocks.width // several), lambda i, j: (i, j))

    of_block = None
    if blocks.of_rows:
        of_block = pl.BlockSpec((1, blocks.block_rows), lambda i, j: (0, i))
    elif viewed.of_block is not None:
        each = plan.shape[-2] // blocks.block_rows if blocks.within else 0
        of_block = pl.BlockSpec(
            (None, 1, blocks.width), lambda i, j: (lax.div(i, each) if each else 0, 0, j)
        )
    specs: Any = (
        elements(),
        None if viewed.p is None else elements(),
        None if viewed.correction is None else elements(),
        tuple(elements(several_in_a_byte(slot)) for slot in plan.slots),
        tuple(_scale_spec(blocks) for _ in viewed.scales),
        of_block,
    )
    return Leaf(*specs)


def register_bits(lane_keys: jax.Array, group_size: int) -> jax.Array:
    """C of the lanes of a register, uint32 [leaves, 128], of keys [leaves]."""
    lane = lax.iota(jnp.uint32, LANES) % jnp.uint32(group_size)
    return random.lane_bits(lane_keys[:, None], lane[None])


def _bytes(*trees: Any) -> int:
    """Bytes per element of arrays of one shape."""
    return sum(x.dtype.itemsize for x in jax.tree.leaves(trees))


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
    lane_bits: jax.Array,
    elements: int,
    interpret: Any = False,
) -> Result:
    """The step of a leaf.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's.
      leaf: its arrays.
      names: of the hyperparameters.
      scalars: the hyperparameters, f32 [len(names)].
      row_key: of the random bits R, uint32 [].
      lane_bits: the random bits C of a register, of `register_bits`.
      elements: of a block, at most.
      interpret: run as plain JAX, on any device: True, or `pltpu.InterpretParams`.
    """
    moving = _bytes(leaf.g, leaf.p, leaf.correction, leaf.slots)
    moving += _bytes(leaf.correction, leaf.slots) + update_dtype(plan, leaf.p).itemsize
    of_block, of_rows, within = _of_block(plan, leaf.of_block)
    blocks = Blocks(
        plan.shape, plan.group_size, min(elements, _BUFFERS // (2 * moving)),
        max(map(several_in_a_byte, plan.slots)), of_rows, within,
    )  # fmt: skip
    kernel = Kernel(rule, plan, blocks, names)
    # Mosaic has no float16
    g = numerics.widen(leaf.g) if leaf.g.dtype == jnp.float16 else leaf.g
    g, p, correction, slots = jax.tree.map(
        lambda x: x.reshape(blocks.rows, -1), (g, leaf.p, leaf.correction, leaf.slots)
    )
    viewed = Leaf(
        g, p, correction, slots, tuple(_scale_view(blocks, x) for x in leaf.scales), of_block
    )
    results = output(plan, viewed)
    specs = _specs(plan, blocks, viewed)
    out_specs = Result(specs.g, *specs[2:5])
    scratch = kernel.scratch()
    trees = viewed, results, scratch
    flat = [jax.tree.leaves(tree) for tree in trees]
    together = jax.tree.structure(trees)

    def body(scalars: Any, key: Any, lane_bits: Any, *refs: Any) -> None:
        kernel.run(scalars, key, lane_bits, *jax.tree.unflatten(together, refs))

    in_scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    outputs = pl.pallas_call(
        body,
        out_shape=flat[1],
        grid=blocks.grid,
        in_specs=[
            in_scalars,
            in_scalars,
            pl.BlockSpec((1, LANES), lambda i, j: (0, 0)),
            *jax.tree.leaves(specs),
        ],
        out_specs=jax.tree.leaves(out_specs),
        input_output_aliases=aliases(plan, [viewed], [results], first=3),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in flat[2]],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="fused_update",
    )(scalars, row_key[None], lane_bits[None], *flat[0])
    found: Result = jax.tree.unflatten(jax.tree.structure(results), outputs)
    scales = zip(found.scales, leaf.scales, strict=True)
    found = found._replace(scales=tuple(_scales_of_view(blocks, *pair) for pair in scales))
    return restored(plan, leaf, found)
