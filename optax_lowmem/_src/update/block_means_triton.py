"""Means over the blocks of several leaves in GPU kernels.

XLA makes a launch or two a leaf, which take longer than the bytes of most leaves. A program sums
the rows of a tile; what the tiles of a column give is summed by the next launch, and so is the next
axis of a block.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import gpu_kernel, numerics
from optax_lowmem._src.core.gpu_kernel import Index, Operand, Program, Run
from optax_lowmem._src.core.groups import result_like
from optax_lowmem._src.update.block_means import Columns

_WARPS = 4


def means(
    passes: Sequence[Columns],
    gradients: Sequence[jax.Array],
    scale: jax.Array,
    backend: str = "pallas",
) -> list[jax.Array]:
    """Mean of (scale g)^2 over each block of leaves that are alike, f32, flat.

    Args:
      passes: of each leaf, see `block_means.passes`.
      gradients: f32 or 16-bit; of any one shape with so many elements.
      scale: f32 scalar.
      backend: as of `gpu_kernel.launch`.
    """
    arrays = tuple(gradients)
    for turn, columns in enumerate(passes):
        arrays = tuple(_launch(columns, arrays, scale, turn == 0, backend))
    return [x.reshape(-1) for x in arrays]


@functools.partial(jax.jit, static_argnames=("columns", "first", "backend"), inline=False)
def _launch(
    columns: Columns,
    arrays: tuple[jax.Array, ...],
    scale: jax.Array,
    first: bool,
    backend: str,
) -> list[jax.Array]:
    """Sums of the parts of each array, f32 [outer * parts, width]; of squares at first."""
    shape = (columns.outer * columns.parts, columns.width)
    viewed = [x.reshape(columns.outer * columns.rows, columns.width) for x in arrays]
    return gpu_kernel.launch(
        functools.partial(_body, columns, first),
        [scale.reshape(1), *viewed],
        [result_like(x, shape, jnp.float32) for x in viewed],
        (len(arrays) * columns.tiles,),
        warps=_WARPS,
        name="block_means",
        backend=backend,
    )


def _body(
    columns: Columns, first: bool, program: Program, scale_at: Operand, *arrays: Operand
) -> None:
    count, each = len(arrays) // 2, jnp.int32(columns.tiles)
    leaf, tile = lax.div(program.index(), each), lax.rem(program.index(), each)

    def run(x_at: Operand, sums_at: Operand) -> None:
        across = jnp.int32(columns.across)
        part, start = lax.div(tile, across), lax.rem(tile, across) * jnp.int32(columns.tile_width)
        x = _load(columns, x_at, part, start)
        if first:
            program.keep_early()
            x = numerics.widen(x) * scale_at.load(0)
            x = x * x
        if columns.begins:
            x = x * jnp.float32(1 / columns.rows)
        _store(columns, sums_at, part, start, jnp.sum(x, axis=0))

    program.with_one(leaf, list(zip(arrays[:count], arrays[count:], strict=True)), run)


def _load(columns: Columns, x_at: Operand, part: jax.Array, start: jax.Array) -> jax.Array:
    """[tile_rows, tile_width] of an array; 0 beyond its ends."""
    shape, parts = (columns.tile_rows, columns.tile_width), jnp.int32(columns.parts)
    outer, first = lax.div(part, parts), lax.rem(part, parts) * jnp.int32(columns.tile_rows)
    above = outer * jnp.int32(columns.rows) + first
    where: tuple[Index, ...]
    if columns.even:
        where, mask = (Run(above, shape[0]), Run(start, shape[1])), None
    else:
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        mask = (first + row < columns.rows) & (start + lane < columns.width)
        where = (above + row, start + lane)
    return x_at.load(*where, mask=mask, early=True)


def _store(
    columns: Columns, sums_at: Operand, part: jax.Array, start: jax.Array, sums: jax.Array
) -> None:
    if columns.even:
        sums_at.store(part, Run(start, columns.tile_width), values=sums)
        return
    lane = start + lax.iota(jnp.int32, columns.tile_width)
    sums_at.store(jnp.full_like(lane, part), lane, values=sums, mask=lane < columns.width)
