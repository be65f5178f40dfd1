"""Means over the blocks of several leaves in GPU kernels: Pallas, lowered through Triton.

XLA makes a launch or two a leaf, which take longer than the bytes of most leaves. A program sums
the rows of a tile; what the tiles of a column give is summed by the next launch, and so is the next
axis of a block.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import numerics, pallas_tiles
from optax_lowmem._src.core.groups import result_like
from optax_lowmem._src.update.block_means import Columns

_WARPS = 4


def means(
    passes: Sequence[Sequence[Columns]],
    gradients: Sequence[jax.Array],
    scale: jax.Array,
    interpret: bool = False,
) -> list[jax.Array]:
    """Mean of (scale g)^2 over each block of each leaf, f32, flat.

    Args:
      passes: of each leaf, see `block_means.passes`.
      gradients: f32 or 16-bit; of any shape with so many elements.
      scale: f32 scalar.
      interpret: run as plain JAX, on any device.
    """
    arrays = list(gradients)
    for turn in range(max(map(len, passes))):
        left = [i for i, own in enumerate(passes) if turn < len(own)]
        columns = tuple(passes[i][turn] for i in left)
        found = _launch(columns, tuple(arrays[i] for i in left), scale, turn == 0, interpret)
        for i, sums in zip(left, found, strict=True):
            arrays[i] = sums
    return [x.reshape(-1) for x in arrays]


@functools.partial(jax.jit, static_argnames=("columns", "first", "interpret"), inline=False)
def _launch(
    columns: tuple[Columns, ...],
    arrays: tuple[jax.Array, ...],
    scale: jax.Array,
    first: bool,
    interpret: bool,
) -> list[jax.Array]:
    """Sums of the parts of each array, f32 [outer * parts, width]; of squares at first."""
    viewed = [x.reshape(c.outer * c.rows, c.width) for x, c in zip(arrays, columns, strict=True)]
    return pl.pallas_call(
        functools.partial(_kernel, columns, first),
        out_shape=[
            result_like(x, (c.outer * c.parts, c.width), jnp.float32)
            for x, c in zip(viewed, columns, strict=True)
        ],
        grid=(sum(column.tiles for column in columns),),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="block_means",
    )(scale.reshape(1), *viewed)


def _kernel(columns: tuple[Columns, ...], first: bool, scale: Any, *refs: jax.Ref) -> None:
    count, program = len(columns), pl.program_id(0)
    starts = [0, *itertools.accumulate(column.tiles for column in columns[:-1])]

    def run(i: int) -> None:
        column, tile = columns[i], program - starts[i]
        across = jnp.int32(column.across)
        part, start = lax.div(tile, across), lax.rem(tile, across) * jnp.int32(column.tile_width)
        x = numerics.widen(_load(column, refs[i], part, start))
        if first:
            x = x * scale[0]
            x = x * x
        if column.begins:
            x = x * jnp.float32(1 / column.rows)
        _store(column, refs[count + i], part, start, jnp.sum(x, axis=0))

    pallas_tiles.in_leaf(starts, program, run)


def _load(column: Columns, ref: jax.Ref, part: jax.Array, start: jax.Array) -> jax.Array:
    """[tile_rows, tile_width] of an array; 0 beyond its ends."""
    shape, parts = (column.tile_rows, column.tile_width), jnp.int32(column.parts)
    outer, first = lax.div(part, parts), lax.rem(part, parts) * jnp.int32(column.tile_rows)
    above = outer * jnp.int32(column.rows) + first
    if column.even:
        where, mask = ref.at[pl.ds(above, shape[0]), pl.ds(start, shape[1])], None
    else:
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        mask = (first + row < column.rows) & (start + lane < column.width)
        where = ref.at[above + row, start + lane]
    # volatile: as in `pallas_tiles.load`
    return plgpu.load(where, mask=mask, other=None if mask is None else 0, volatile=True)


def _store(
    column: Columns, ref: jax.Ref, part: jax.Array, start: jax.Array, sums: jax.Array
) -> None:
    if column.even:
        plgpu.store(ref.at[part, pl.ds(start, column.tile_width)], sums)
        return
    lane = start + lax.iota(jnp.int32, column.tile_width)
    plgpu.store(ref.at[jnp.full_like(lane, part), lane], sums, mask=lane < column.width)
