"""Views of a leaf's arrays for the TPU kernel, in XLA's layout, so that nothing is copied."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import Block, product
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.state import Array, Leaf
from optax_lowmem._src.optim.step.tpu.lanes import LANES, ROWS, Blocks

_USUAL = 16 << 20  # default limit in bytes of a kernel's VMEM, out of 128 MB (v5e, v6e)
_BUFFERS = 12 << 20  # bytes of it for the double-buffered blocks
_SCALES = 2 << 20  # bytes of it for blocks of scales, and for spilled registers
_MOST_ROWS = 256  # maximum period of block-wise values over the rows


class OfBlock(NamedTuple):
    """Block-wise values, factored into rows and columns; an element's value is their product."""

    rows: Array  # one value per row, [1, rows], or None
    # one value per column, [n, 1, columns], the same for n = 1 or per matrix; or values that repeat
    # after `period` rows, [1, period, columns]; or None
    columns: Array


def block_reason(block: Block, shape: tuple[int, ...]) -> str | None:
    """Return the reason why block-wise values of a leaf have no view, or None."""
    for part in block.fit(shape).parts:
        *leading, rows, columns = part.mean_shape(shape)
        of_each_matrix = rows == 1 and shape[-2] % LANES == 0
        if columns > 1 and not of_each_matrix and not _period((*leading, rows, columns), shape):
            return "its blocks have values along both of its last axes"
    return None


def _period(values: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Return the number of rows after which block-wise values repeat, 1 if all rows are equal.

    A larger period is a multiple of ROWS. None if values do not repeat, or only after more than
    `_MOST_ROWS` rows.
    """
    for axis in range(len(shape) - 1, 0, -1):
        if math.prod(values[:axis]) == 1 and values[axis:-1] == shape[axis:-1]:
            rows = math.prod(shape[axis:-1])
            period = rows if rows == 1 else math.lcm(rows, ROWS)
            return period if period <= _MOST_ROWS else None
    return None


def bytes_of(*trees: PyTree) -> int:
    """Return the total bytes per element of arrays of equal shape."""
    return sum(x.dtype.itemsize for x in jax.tree.leaves(trees))


def blocks_of(plan: LeafPlan, leaf: Leaf, moving: int, elements: int) -> Blocks:
    """Return the blocks of a leaf, of at most `elements` elements.

    `moving` are the bytes per element of operands and results.
    """
    of_block = _block_values(plan, leaf.of_block)
    return Blocks(
        plan.shape, plan.group_size, min(elements, _BUFFERS // (2 * moving)),
        max((slot.codes_per_byte for slot in plan.slots), default=1),
        of_rows=of_block is not None and of_block.rows is not None,
        within=of_block is not None and of_block.columns is not None and len(of_block.columns) > 1,
    )  # fmt: skip


def compiler_params(blocks: Blocks, moving: int, scratch: PyTree) -> pltpu.CompilerParams:
    """Return compiler parameters, which raise the limit of VMEM only if the blocks need it.

    `moving` are the bytes per element of operands and results.
    """
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(scratch))
    held += 2 * moving * blocks.block_rows * blocks.width  # double buffering
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel"),
        vmem_limit_bytes=held + _SCALES if held + _SCALES > _USUAL else None,
    )


def in_hbm(arrays: list[jax.Array], interpret: bool) -> list[jax.Array]:
    """Pin the operands in HBM, since XLA might otherwise copy them to VMEM first.

    It would also copy results that are written in place back, and allocate memory for the copies.
    """
    if interpret:
        return arrays
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]


def view(plan: LeafPlan, blocks: Blocks, leaf: Leaf) -> Leaf:
    """Reshape the arrays of a leaf to matrices of all rows, as the kernel reads them."""
    # Mosaic does not support float16: https://github.com/pytorch/helion/pull/3204
    g = numerics.widen(leaf.g) if leaf.g.dtype == jnp.float16 else leaf.g
    g, p, correction, slots = jax.tree.map(
        lambda x: x.reshape(blocks.rows, -1), (g, leaf.p, leaf.correction, leaf.slots)
    )
    scales = tuple(_scale_view(blocks, x) for x in leaf.scales)
    return Leaf(g, p, slots, scales, correction, _block_values(plan, leaf.of_block))


def _scale_view(blocks: Blocks, scales: jax.Array) -> jax.Array:
    """Reshape scales to [rows, groups] or [n, groups, rows], whichever matches XLA's layout."""
    if not blocks.transposed:
        return scales.reshape(-1, blocks.groups)
    shape = (-1, *scales.shape[-2:]) if blocks.stacked else (1, -1, blocks.groups)
    return scales.reshape(shape).swapaxes(-1, -2)


def scales_of(blocks: Blocks, view: jax.Array, like: jax.Array) -> jax.Array:
    """Invert `_scale_view`, for scales of the shape of `like`."""
    return (view.swapaxes(-1, -2) if blocks.transposed else view).reshape(like.shape)


def _scale_spec(blocks: Blocks) -> pl.BlockSpec:
    rows, groups = blocks.block_rows, blocks.block_groups
    if not blocks.transposed:
        return pl.BlockSpec((rows, groups), lambda i, j: (i, j))
    if not blocks.stacked:
        return pl.BlockSpec((None, groups, rows), lambda i, j: (0, j, i))
    each = blocks.shape[-2] // rows
    return pl.BlockSpec((None, groups, rows), lambda i, j: (lax.div(i, each), j, lax.rem(i, each)))


def _block_values(plan: LeafPlan, operands: PyTree) -> OfBlock | None:
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
    """Return the `BlockSpec`s of a leaf's views."""

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
    like, slots = jax.tree.map(lambda _: elements(), viewed._replace(of_block=None)), plan.slots
    return like._replace(
        slots=tuple(elements(slot.codes_per_byte) for slot in slots),
        scales=tuple(_scale_spec(blocks) for _ in viewed.scales),
        of_block=of_block,
    )
