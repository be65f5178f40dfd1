"""Means over the blocks of several leaves in GPU kernels.

XLA makes a launch or two a leaf, which take longer than the bytes of most leaves. A program sums
the rows of a tile; what the tiles of a column give is summed by the next launch, and so is the next
axis of a block. Where means of rows are wanted beside those of columns, a program sums the columns
of its tile too, so that a gradient is read once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import gpu_kernel, numerics
from optax_lowmem._src.core.gpu_kernel import Index, Operand, Program, Run
from optax_lowmem._src.core.groups import result_like
from optax_lowmem._src.update.block_means import Columns, Passes

_WARPS = 4


def means(
    passes: Passes,
    gradients: Sequence[jax.Array],
    scale: jax.Array,
    backend: str = "pallas",
) -> list[tuple[jax.Array, ...]]:
    """Means of (scale g)^2 over each block of leaves that are alike, f32, flat.

    Args:
      passes: of each leaf, see `block_means.passes`.
      gradients: f32 or 16-bit; of any one shape with so many elements.
      scale: f32 scalar.
      backend: as of `gpu_kernel.launch`.

    Returns:
      For each leaf the means of its block's parts; of rows a matrix after the other.
    """
    first = _launch(passes.first, passes.row, tuple(gradients), scale, True, backend)
    found = []
    for sums, rest in zip(first, passes.rest, strict=True):
        for columns in rest:
            (sums,) = _launch(columns, None, sums, scale, False, backend)
        found.append(tuple(x.reshape(-1) for x in sums))
    return list(zip(*found, strict=True))


@functools.partial(jax.jit, static_argnames=("columns", "row", "first", "backend"), inline=False)
def _launch(
    columns: Columns,
    row: int | None,
    arrays: tuple[jax.Array, ...],
    scale: jax.Array,
    first: bool,
    backend: str,
) -> list[tuple[jax.Array, ...]]:
    """Sums of the parts of each array, f32 [outer * parts, width]; of squares at first.

    Before them, where rows of `row` elements are averaged too, sums of the parts of these,
    f32 [outer * across, rows].
    """
    shapes = [(columns.outer * columns.parts, columns.width)]
    if row is not None:
        shapes.insert(0, (columns.outer * columns.across, columns.rows))
    viewed = [x.reshape(columns.outer * columns.rows, columns.width) for x in arrays]
    sums = gpu_kernel.launch(
        functools.partial(_body, columns, row, first, len(arrays)),
        [scale.reshape(1), *viewed],
        [result_like(x, shape, jnp.float32) for shape in shapes for x in viewed],
        (len(arrays) * columns.tiles,),
        warps=_WARPS,
        name="block_means",
        backend=backend,
    )
    return [tuple(sums[i : i + len(arrays)]) for i in range(0, len(sums), len(arrays))]


def _body(
    columns: Columns,
    row: int | None,
    first: bool,
    count: int,
    program: Program,
    scale_at: Operand,
    *arrays: Operand,
) -> None:
    each = jnp.int32(columns.tiles)
    leaf, tile = lax.div(program.index(), each), lax.rem(program.index(), each)

    def run(x_at: Operand, *sums_at: Operand) -> None:
        across, parts = jnp.int32(columns.across), jnp.int32(columns.parts)
        part, turn = lax.div(tile, across), lax.rem(tile, across)
        outer, down = lax.div(part, parts), lax.rem(part, parts)
        top, start = down * jnp.int32(columns.tile_rows), turn * jnp.int32(columns.tile_width)
        x = _load(columns, x_at, outer, top, start)
        share, k = 1 / columns.rows if columns.begins else 1.0, 0
        if first:
            # sums of 4^-k of the squares are finite where the mean is; exact, and once a program
            k = (max(columns.rows, row or 1) - 1).bit_length() + 1 >> 1
            program.keep_early()
            x = numerics.widen(x) * (scale_at.load(0) * jnp.float32(2.0**-k))
            x = x * x
        elif columns.begins:
            x, share = x * jnp.float32(share), 1.0
        if row is not None:
            sums = jnp.sum(x, axis=1) * jnp.float32(4.0**k / row)
            _store(columns, sums_at[0], outer * across + turn, top, sums, columns.rows)
        sums = jnp.sum(x, axis=0) * jnp.float32(4.0**k * share)
        _store(columns, sums_at[-1], part, start, sums, columns.width)

    program.with_one(leaf, [arrays[i::count] for i in range(count)], run)


def _load(
    columns: Columns, x_at: Operand, outer: jax.Array, top: jax.Array, start: jax.Array
) -> jax.Array:
    """[tile_rows, tile_width] of an array; 0 beyond its ends."""
    shape, above = (columns.tile_rows, columns.tile_width), outer * jnp.int32(columns.rows) + top
    where: tuple[Index, ...]
    if columns.even:
        where, mask = (Run(above, shape[0]), Run(start, shape[1])), None
    else:
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        mask = (top + row < columns.rows) & (start + lane < columns.width)
        where = (above + row, start + lane)
    return x_at.load(*where, mask=mask, early=True)


def _store(
    columns: Columns, sums_at: Operand, line: jax.Array, start: jax.Array, sums: jax.Array, end: int
) -> None:
    """Write along a line of sums, which ends where a tile may not."""
    if columns.even:
        sums_at.store(line, Run(start, sums.size), values=sums)
        return
    lane = start + lax.iota(jnp.int32, sums.size)
    sums_at.store(jnp.full_like(lane, line), lane, values=sums, mask=lane < end)
