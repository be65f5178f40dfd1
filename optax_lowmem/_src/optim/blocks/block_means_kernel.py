"""Means over the blocks of several leaves in GPU kernels.

XLA makes one or two launches per leaf, which take longer than reading most leaves. A program sums
the rows of a tile; the next launch adds up the sums of a column's tiles, and further launches
average over the block's other axes. If a block has means of rows and of columns, a program sums its
tile along both axes, so that a gradient is read once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import Block, Factors
from optax_lowmem._src.arrays.groups import next_power_of_two
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel
from optax_lowmem._src.kernels.gpu_kernel import Index, Operand, Program, Range

# ---- the launches that sum a leaf's columns, one axis after the other, and their tiles -----------

TILE = 8192  # elements of a program: 64 for each of 128 threads
_ROWS = 64  # rows of a tile; more if a tile with all columns has room for them
_MOST_PARTS = 256  # up to this many sums of parts are added in one tile


@dataclasses.dataclass(frozen=True)
class Columns:
    """An array [outer, rows, width] whose rows are summed in parts, one part per tile."""

    outer: int  # number of matrices
    rows: int  # averaged
    width: int  # number of columns; 1 if the averaged axis is contiguous
    begins: bool = True  # whether the input is the array itself, not sums of parts of its rows
    # for means of rows and columns, the length of a row, which divides the width; else None
    row: int | None = None

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile, a power of two: all of them if they fit in a tile."""
        of_all_columns = TILE // next_power_of_two(self.width)
        rows = next_power_of_two(self.rows)
        most = max(of_all_columns, _ROWS if self.begins else _MOST_PARTS)
        return rows if rows <= most else max(of_all_columns, _ROWS)

    @property
    def tile_width(self) -> int:
        """Number of columns of a tile, a power of two."""
        return max(1, min(TILE // self.tile_rows, next_power_of_two(self.width)))

    @property
    def partial_sums(self) -> int:
        """Number of tiles along the rows of one matrix, each with a partial sum per column."""
        return -(-self.rows // self.tile_rows)

    @property
    def across(self) -> int:
        """Number of tiles side by side along a row."""
        return -(-self.width // self.tile_width)

    @property
    def tiles(self) -> int:
        return self.outer * self.partial_sums * self.across

    @property
    def even(self) -> bool:
        """Return whether all tiles are full: none extends past the last row or column."""
        return self.rows % self.tile_rows == 0 and self.width % self.tile_width == 0

    @property
    def left(self) -> "Sides | None":
        """The partial sums of rows and columns that this launch writes, if it computes both."""
        if self.row is None:
            return None
        between = self.width // self.row
        return Sides(
            self.outer * between, self.rows, self.row, self.across // between, self.partial_sums
        )

    @property
    def result(self) -> tuple[int, int]:
        """The shape of the sums that this launch writes."""
        left = self.left
        return (self.outer * self.partial_sums, self.width) if left is None else left.shape


@dataclasses.dataclass(frozen=True)
class Sides:
    """Partial sums of the rows of matrices, then those of their columns, which tiles add up."""

    matrices: int  # number of matrices, with [of_rows * rows + of_columns * columns] sums each
    rows: int  # of a matrix
    columns: int
    of_rows: int  # number of partial sums per row
    of_columns: int

    @property
    def partial_sums(self) -> int:
        """The largest number of partial sums per row or column."""
        return max(self.of_rows, self.of_columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices, self.of_rows * self.rows + self.of_columns * self.columns

    @property
    def tile_parts(self) -> int:
        """Number of partial sums that a tile adds up, a power of two."""
        parts = next_power_of_two(self.partial_sums)
        return parts if parts <= _MOST_PARTS else _ROWS

    @property
    def tile_width(self) -> int:
        """Number of rows, or columns, of a tile, a power of two."""
        return min(TILE // self.tile_parts, next_power_of_two(max(self.rows, self.columns)))

    @property
    def left(self) -> "Sides":
        """The partial sums that this launch writes."""
        of_rows, of_columns = (-(-n // self.tile_parts) for n in (self.of_rows, self.of_columns))
        return dataclasses.replace(self, of_rows=of_rows, of_columns=of_columns)

    @property
    def result(self) -> tuple[int, int]:
        return self.left.shape

    @property
    def across(self) -> tuple[int, int]:
        """Numbers of tiles side by side, for rows and for columns."""
        return -(-self.rows // self.tile_width), -(-self.columns // self.tile_width)

    @property
    def tiles_of_rows(self) -> int:
        return self.left.of_rows * self.across[0]

    @property
    def tiles(self) -> int:
        return self.tiles_of_rows + self.left.of_columns * self.across[1]


def passes(block: Block, shape: tuple[int, ...]) -> list[Columns | Sides]:
    """Return the launches that compute the means over each block, axis by axis."""
    results: list[Columns | Sides] = []
    if isinstance(block, Factors):
        outer, rows, between, row = block.matrices(shape)
        first = Columns(outer, rows, between * row, row=row)
        results, sides = [first], first.left
        while sides is not None and sides.partial_sums > 1:
            results.append(sides)
            sides = sides.left
        return results
    viewed, axes = block.view(shape)
    sizes = list(viewed)
    for axis in axes:
        before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
        columns = Columns(before, sizes[axis], after)
        results.append(columns)
        while columns.partial_sums > 1:
            columns = Columns(before, columns.partial_sums, after, begins=False)
            results.append(columns)
        sizes[axis] = 1
    return results


# ---- means ---------------------------------------------------------------------------------------

_WARPS = 4


def means(
    passes: Sequence[Columns | Sides],
    gradients: Sequence[jax.Array],
    scale: jax.Array,
    backend: str = "pallas",
) -> list[jax.Array]:
    """Return the mean of (scale g)^2 over each block of equal leaves, f32 and flat."""
    arrays = tuple(gradients)
    for i, one in enumerate(passes):
        arrays = tuple(_run_pass(one, arrays, scale, i == 0, backend))
    return [x.reshape(-1) for x in arrays]


@functools.partial(jax.jit, static_argnames=("one", "first", "backend"), inline=False)
def _run_pass(
    one: Columns | Sides, arrays: tuple[jax.Array, ...], scale: jax.Array, first: bool, backend: str
) -> list[jax.Array]:
    """Return partial sums of each array, f32 of shape `one.result`; `first` squares the array."""
    body: Callable[..., None]
    if isinstance(one, Sides):
        viewed, programs = [*arrays], one.matrices * one.tiles
        body = functools.partial(_sides_body, one)
    else:
        viewed = [x.reshape(one.outer * one.rows, one.width) for x in arrays]
        programs, body = one.tiles, functools.partial(_columns_body, one, first)
    return gpu_kernel.launch(
        functools.partial(_body, body, programs),
        [scale.reshape(1), *viewed],
        [result_like(x, one.result, jnp.float32) for x in viewed],
        (len(arrays) * programs,),
        # with more elements per thread, Triton loads more at once
        warps=2 if backend == "triton" else _WARPS,
        name="block_means",
        backend=backend,
    )


def _body(
    body: Callable[..., None], each: int, program: Program, scale_at: Operand, *arrays: Operand
) -> None:
    """Run `body` for the leaf that a program belongs to, with the program's index in the leaf."""
    count = len(arrays) // 2
    leaf, tile = _divmod(program.index(), each)
    program.with_one(
        leaf,
        range(count),
        lambda i, _: (arrays[i], arrays[count + i]),
        lambda pair: body(program, tile, scale_at, *pair),
    )


def _divmod(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _columns_body(
    columns: Columns,
    first: bool,
    program: Program,
    tile: jax.Array,
    scale_at: Operand,
    x_at: Operand,
    sums_at: Operand,
) -> None:
    part, column_tile = _divmod(tile, columns.across)
    outer, down = _divmod(part, columns.partial_sums)
    top, start = down * jnp.int32(columns.tile_rows), column_tile * jnp.int32(columns.tile_width)
    x = _load(columns, x_at, outer, top, start)
    share = 1 / columns.rows if columns.begins else 1.0
    if first:
        # squares times 4^-k, which is exact, have a finite sum if their mean is finite
        k = (max(columns.rows, columns.row or 1) - 1).bit_length() + 1 >> 1
        program.keep_early()
        x = numerics.widen(x) * (scale_at.load(0) * jnp.float32(2.0**-k))
        x, share = x * x, 4.0**k * share
    elif columns.begins:
        x, share = x * jnp.float32(share), 1.0
    sums = jnp.sum(x, axis=0) * jnp.float32(share)
    left = columns.left
    if left is None:
        _store(columns.even, sums_at, part, start, sums, columns.width)
        return
    of_rows = jnp.sum(x, axis=1) * jnp.float32(4.0**k / left.columns)
    among, within = _divmod(start, left.columns)
    matrix = outer * jnp.int32(columns.width // left.columns) + among
    column_tile = lax.div(within, jnp.int32(columns.tile_width))
    above = column_tile * jnp.int32(left.rows)
    _store(columns.even, sums_at, matrix, above + top, of_rows, above + jnp.int32(left.rows))
    above = jnp.int32(left.of_rows * left.rows) + down * jnp.int32(left.columns)
    _store(columns.even, sums_at, matrix, above + within, sums, above + jnp.int32(left.columns))


def _load(
    columns: Columns, x_at: Operand, outer: jax.Array, top: jax.Array, start: jax.Array
) -> jax.Array:
    """Load a tile [tile_rows, tile_width] of an array; elements out of bounds are 0."""
    shape, above = (columns.tile_rows, columns.tile_width), outer * jnp.int32(columns.rows) + top
    where: tuple[Index, ...]
    if columns.even:
        where, mask = (Range(above, shape[0]), Range(start, shape[1])), None
    else:
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        mask = (top + row < columns.rows) & (start + lane < columns.width)
        where = (above + row, start + lane)
    return x_at.load(*where, mask=mask, early=True)


def _store(
    even: bool,
    sums_at: Operand,
    line: jax.Array,
    start: jax.Array,
    sums: jax.Array,
    end: jax.Array | int,
) -> None:
    """Store sums along a row of the array of sums, up to `end` if tiles are not `even`."""
    if even:
        sums_at.store(line, Range(start, sums.size), values=sums)
        return
    lane = start + lax.iota(jnp.int32, sums.size)
    sums_at.store(jnp.full_like(lane, line), lane, values=sums, mask=lane < end)


def _sides_body(
    sides: Sides,
    program: Program,
    tile: jax.Array,
    scale_at: Operand,
    x_at: Operand,
    sums_at: Operand,
) -> None:
    del program, scale_at
    left = sides.left
    matrix, tile = _divmod(tile, sides.tiles)
    of_rows = tile < sides.tiles_of_rows

    def either(row: int, column: int) -> jax.Array:
        """Select a number by whether the tile has sums of rows or of columns."""
        return jnp.where(of_rows, jnp.int32(row), jnp.int32(column))

    across, width = either(*sides.across), either(sides.rows, sides.columns)
    tile = tile - either(0, sides.tiles_of_rows)
    down, column_tile = lax.div(tile, across), lax.rem(tile, across)
    part, lane = (
        lax.broadcasted_iota(jnp.int32, (sides.tile_parts, sides.tile_width), axis)
        for axis in (0, 1)
    )
    part, lane = (
        part + down * jnp.int32(sides.tile_parts),
        lane + column_tile * jnp.int32(sides.tile_width),
    )
    mask = (part < either(sides.of_rows, sides.of_columns)) & (lane < width)
    index = either(0, sides.of_rows * sides.rows) + part * width + lane
    x = x_at.load(jnp.full_like(index, matrix), index, mask=mask, early=True)
    above = either(0, left.of_rows * left.rows) + down * width
    start = above + column_tile * jnp.int32(sides.tile_width)
    _store(False, sums_at, matrix, start, jnp.sum(x, axis=0), above + width)


# ---- the operands of a step from means of rows and columns ---------------------------------------

_PART = 1024  # elements per program


def factors(
    block: Factors, shape: tuple[int, ...], values: Sequence[jax.Array], backend: str = "pallas"
) -> list[tuple[jax.Array, ...]]:
    """Return `Factors.operands` of equal leaves from R and C, concatenated, in one launch."""
    outer, rows, between, _ = block.matrices(shape)
    viewed = tuple(v.reshape(outer * between, -1) for v in values)
    results = _launch_factors(viewed, between, rows, backend)
    shapes = [part.mean_shape(shape) for part in block.fit(shape).parts]
    pairs = zip(results[: len(values)], results[len(values) :], strict=True)
    return [tuple(x.reshape(s) for x, s in zip(pair, shapes, strict=True)) for pair in pairs]


@functools.partial(jax.jit, static_argnames=("between", "rows", "backend"), inline=False)
def _launch_factors(
    values: tuple[jax.Array, ...], between: int, rows: int, backend: str
) -> list[jax.Array]:
    """Return R over its mean of each leaf, [outer * rows, between], then C of each leaf.

    The value of a leaf is [outer * between, rows + columns], R and C side by side, and its C is
    [outer * between, columns]. The sizes are those of `Factors.matrices`.
    """
    matrices, width = values[0].shape
    shapes = (matrices // between * rows, between), (matrices, width - rows)
    return gpu_kernel.launch(
        functools.partial(_factors_body, between, rows),
        values,
        [result_like(v, shape, jnp.float32) for shape in shapes for v in values],
        (len(values) * matrices * -(-width // _PART),),
        warps=_WARPS,
        name="block_factors",
        backend=backend,
    )


def _factors_body(between: int, rows: int, program: Program, *arrays: Operand) -> None:
    count = len(arrays) // 3
    matrices, width = arrays[0].shape
    tiles = -(-width // _PART)
    leaf, rest = _divmod(program.index(), tiles * matrices)
    matrix, tile = _divmod(rest, tiles)

    def run(chosen: tuple[Operand, ...]) -> None:
        v_at, share_at, columns_at = chosen
        all_rows = lax.iota(jnp.int32, next_power_of_two(rows))
        r = v_at.load(jnp.full_like(all_rows, matrix), all_rows, mask=all_rows < rows)
        mean = jnp.sum(r * jnp.float32(1 / rows))
        lane = tile * jnp.int32(_PART) + lax.iota(jnp.int32, _PART)
        v = v_at.load(jnp.full_like(lane, matrix), lane, mask=lane < width)
        outer, among = _divmod(matrix, between)
        row, share = outer * jnp.int32(rows) + lane, Factors.share(v, mean)
        share_at.store(row, jnp.full_like(lane, among), values=share, mask=lane < rows)
        column = jnp.maximum(lane - jnp.int32(rows), 0)
        inside = (lane >= rows) & (lane < width)
        columns_at.store(jnp.full_like(lane, matrix), column, values=v, mask=inside)

    program.with_one(leaf, range(count), lambda i, _: arrays[i::count], run)
