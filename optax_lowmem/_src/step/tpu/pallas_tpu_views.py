"""The arrays of a leaf as a TPU kernel sees them: as XLA keeps them, so that nothing moves."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.block import Block, product
from optax_lowmem._src.step.operands import Leaf
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.tpu.lanes import LANES, ROWS, Blocks
from optax_lowmem._src.step.tpu.pallas_tpu_kernel import several_in_a_byte

_USUAL = 16 << 20  # bytes of a core's memory, of 128 MB (v5e, v6e), that a kernel may take
_BUFFERS = 12 << 20  # of them, for blocks that come and go
_SCALES = 2 << 20  # for those of scales, and what does not stay in registers
_MOST_ROWS = 256  # that may each have values of their columns


class OfBlock(NamedTuple):
    """Values of blocks, whose product each element takes.

    Attributes:
      rows: those of each row, [1, rows].
      columns: those of each column, [n, 1, columns], of one matrix or of n; or those of so many
        rows after which they repeat, [1, period, columns].
    """

    rows: Any
    columns: Any


def block_reason(block: Block, shape: tuple[int, ...]) -> str | None:
    """Return the reason why a leaf's values of blocks have no view, or None."""
    for part in block.fit(shape).parts:
        *leading, rows, columns = part.mean_shape(shape)
        of_each_matrix = rows == 1 and shape[-2] % LANES == 0
        if columns > 1 and not of_each_matrix and not _period((*leading, rows, columns), shape):
            return "its blocks have values along both of its last axes"
    return None


def _period(values: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Return the rows after which values of columns repeat, in whole registers; 1: all have them.

    None where they do not repeat, or after too many rows.
    """
    for axis in range(len(shape) - 1, 0, -1):
        if math.prod(values[:axis]) == 1 and values[axis:-1] == shape[axis:-1]:
            rows = math.prod(shape[axis:-1])
            period = rows if rows == 1 else math.lcm(rows, ROWS)
            return period if period <= _MOST_ROWS else None
    return None


def bytes_of(*trees: Any) -> int:
    """Return the bytes per element of arrays of one shape."""
    return sum(x.dtype.itemsize for x in jax.tree.leaves(trees))


def blocks_of(plan: LeafPlan, leaf: Leaf, moving: int, elements: int) -> Blocks:
    """The blocks that a leaf is cut into.

    Args:
      plan: the leaf's.
      leaf: its arrays.
      moving: bytes per element of arrays and results.
      elements: of a block, at most.
    """
    of_block = _of_block(plan, leaf.of_block)
    return Blocks(
        plan.shape, plan.group_size, min(elements, _BUFFERS // (2 * moving)),
        max(map(several_in_a_byte, plan.slots), default=1),
        of_rows=of_block is not None and of_block.rows is not None,
        within=of_block is not None and of_block.columns is not None and len(of_block.columns) > 1,
    )  # fmt: skip


def compiler_params(blocks: Blocks, moving: int, scratch: Any) -> pltpu.CompilerParams:
    """Parameters of a kernel's compilation: more memory than is usual only where blocks ask for it.

    Args:
      blocks: of the leaf.
      moving: bytes per element of arrays and results.
      scratch: shapes and dtypes of what a block is stepped in.
    """
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(scratch))
    held += 2 * moving * blocks.block_rows * blocks.width  # one comes while another is stepped
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel"),
        vmem_limit_bytes=held + _SCALES if held + _SCALES > _USUAL else None,
    )


def in_hbm(arrays: list[jax.Array], interpret: Any) -> list[jax.Array]:
    """Pin arrays in HBM, from which the kernel reads: XLA might copy them to a core's memory first.

    It would copy what is written in place back, and need memory for its copies.
    """
    if interpret:
        return arrays
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]


def view(plan: LeafPlan, blocks: Blocks, leaf: Leaf) -> Leaf:
    """The arrays as the kernel sees them: all rows in one matrix."""
    # Mosaic has no float16
    g = numerics.widen(leaf.g) if leaf.g.dtype == jnp.float16 else leaf.g
    g, p, correction, slots = jax.tree.map(
        lambda x: x.reshape(blocks.rows, -1), (g, leaf.p, leaf.correction, leaf.slots)
    )
    scales = tuple(_scale_view(blocks, x) for x in leaf.scales)
    return Leaf(g, p, correction, slots, scales, _of_block(plan, leaf.of_block))


def _scale_view(blocks: Blocks, scales: jax.Array) -> jax.Array:
    """The scales as XLA keeps them: [rows, groups], or [n, groups, rows]."""
    if not blocks.transposed:
        return scales.reshape(-1, blocks.groups)
    shape = (-1, *scales.shape[-2:]) if blocks.stacked else (1, -1, blocks.groups)
    return scales.reshape(shape).swapaxes(-1, -2)


def scales_of(blocks: Blocks, view: jax.Array, like: jax.Array) -> jax.Array:
    """Scales in the shape of the old ones, from the kernel's view of them."""
    return (view.swapaxes(-1, -2) if blocks.transposed else view).reshape(like.shape)


def _scale_spec(blocks: Blocks) -> pl.BlockSpec:
    rows, groups = blocks.block_rows, blocks.block_groups
    if not blocks.transposed:
        return pl.BlockSpec((rows, groups), lambda i, j: (i, j))
    if not blocks.stacked:
        return pl.BlockSpec((None, groups, rows), lambda i, j: (0, j, i))
    each = blocks.shape[-2] // rows
    return pl.BlockSpec((None, groups, rows), lambda i, j: (lax.div(i, each), j, lax.rem(i, each)))


def _of_block(plan: LeafPlan, operands: Any) -> OfBlock | None:
    if plan.block is None or operands is None:
        return None
    rows, columns = [], []
    parts = plan.block.fit(plan.shape).parts
    for part, values in zip(parts, jax.tree.leaves(operands), strict=True):
        period = _period(values.shape, plan.shape)
        if values.shape[-1] == 1 and period != 1:
            rows.append(part.spread(values, (*plan.shape[:-1], 1)).reshape(1, -1))
            continue
        leading = values.shape[:-1] if period else (*plan.shape[:-2], 1)
        spread = part.spread(values, (*leading, plan.shape[-1]))
        if period is None or period == 1:
            columns.append(spread.reshape(-1, 1, plan.shape[-1]))
            continue
        once = spread.reshape(1, -1, plan.shape[-1])
        columns.append(jnp.tile(once, (1, period // once.shape[1], 1)))
    return OfBlock(product(rows) if rows else None, product(columns) if columns else None)


def specs(plan: LeafPlan, blocks: Blocks, viewed: Leaf) -> Leaf:
    """The blocks of a leaf's arrays."""

    def elements(several: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.block_rows, blocks.width // several), lambda i, j: (i, j))

    each = plan.shape[-2] // blocks.block_rows if blocks.within else 0
    of_rows = pl.BlockSpec((1, blocks.block_rows), lambda i, j: (0, i))
    of_block = viewed.of_block
    if of_block is not None:
        of_columns = (
            None
            if of_block.columns is None
            else pl.BlockSpec(
                (None, of_block.columns.shape[1], blocks.width),
                lambda i, j: (lax.div(i, each) if each else 0, 0, j),
            )
        )
        of_block = OfBlock(None if of_block.rows is None else of_rows, of_columns)
    found: Any = (
        elements(),
        None if viewed.p is None else elements(),
        None if viewed.correction is None else elements(),
        tuple(elements(several_in_a_byte(slot)) for slot in plan.slots),
        tuple(_scale_spec(blocks) for _ in viewed.scales),
        of_block,
    )
    return Leaf(*found)
