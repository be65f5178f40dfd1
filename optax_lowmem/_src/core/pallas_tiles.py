"""Loads and stores of tiles inside a Pallas kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import groups, numerics, random
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.groups import Tiling
from optax_lowmem._src.core.typing import T

Ref = jax.Ref | jax.Array  # to a mypy that knows the NamedTuple of references by its arrays


def in_leaf(starts: list[int], program: jax.Array, branch: Callable[[int], T]) -> T:
    """branch(i) for the leaf i that a program belongs to, found by halving.

    (The Triton lowering of a `switch` asks for one case after another.)
    """

    def between(low: int, high: int) -> T:
        if high - low == 1:
            return branch(low)
        middle = (low + high) // 2
        return lax.cond(
            program < starts[middle], lambda: between(low, middle), lambda: between(middle, high)
        )

    return between(0, len(starts))


def _group_numbers(tiling: Tiling, tile: jax.Array) -> jax.Array:
    return tile * tiling.rows + lax.iota(jnp.int32, tiling.rows)


def _row_mask(tiling: Tiling, tile: jax.Array) -> jax.Array | None:
    """Return a mask of the groups of a tile that exist, or None where all do."""
    if tiling.groups % tiling.rows == 0:
        return None
    return _group_numbers(tiling, tile) < tiling.groups


def noise(
    tiling: Tiling, tile: jax.Array, key: jax.Array, lane_bits: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`random.noise_bits` of a tile: [rows, 1] and [lanes]; those of the lanes may be given."""
    coordinates = [index.astype(jnp.uint32) for index in _coordinates(tiling, tile)]
    if lane_bits is None:
        lane_bits = random.lane_bits(key, lax.iota(jnp.uint32, tiling.lanes))
    return random.row_bits(key, coordinates)[:, None], lane_bits


def _coordinates(tiling: Tiling, tile: jax.Array) -> list[jax.Array]:
    """Return the coordinates of a tile's groups, [rows] per axis; the last one counts groups."""
    axes = groups.scale_shape(tiling.shape, tiling.group_size)
    rest, coordinates = _group_numbers(tiling, tile), []
    for size in reversed(axes[1:]):
        coordinates.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    return [rest, *reversed(coordinates)]


def _elements(tiling: Tiling, ref: Ref, tile: jax.Array) -> tuple[Any, jax.Array | None]:
    """Reference to the elements of a tile [rows, lanes], and which of them exist."""
    shape = tiling.tile_shape
    if tiling.flat:
        mask = _row_mask(tiling, tile)
        whole = None if mask is None else jnp.broadcast_to(mask[:, None], shape)
        return ref.at[pl.ds(tile * tiling.rows, tiling.rows), pl.ds(0, tiling.lanes)], whole
    per_row = jnp.int32(groups.group_count(tiling.shape[-1], tiling.group_size))
    group = _group_numbers(tiling, tile)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    row = jnp.broadcast_to(lax.div(group, per_row)[:, None], shape)
    column = lax.rem(group, per_row)[:, None] * jnp.int32(tiling.group_size) + lane
    mask = (column < tiling.shape[-1]) & (lane < tiling.width) & (group < tiling.groups)[:, None]
    return ref.at[row, column], mask


def _scales(tiling: Tiling, ref: Ref, tile: jax.Array) -> Any:
    return ref.at[pl.ds(tile * tiling.rows, tiling.rows)]


def part(ref: Ref, *axes: jax.Array) -> tuple[Any, jax.Array]:
    """A reference to elements by the indices of each axis, and which of them exist.

    By indices, since JAX refuses slices that leave an array, also where they are masked.
    """
    shape = tuple(axis.size for axis in axes)
    grid = [lax.broadcast_in_dim(axis, shape, (d,)) for d, axis in enumerate(axes)]
    inside = [index < size for index, size in zip(grid, ref.shape, strict=True)]
    return ref.at[tuple(grid)], functools.reduce(jnp.logical_and, inside)


def exists(tiling: Tiling, ref: Ref, tile: jax.Array) -> jax.Array | None:
    """Return a mask [rows, lanes] of the elements of a tile that exist, or None where all do.

    `ref` may be of any array with this tiling.
    """
    return _elements(tiling, ref, tile)[1]


def load(tiling: Tiling, ref: Ref, tile: jax.Array, other: int = 0) -> jax.Array:
    """Elements of a tile; `other` where there are none."""
    where, mask = _elements(tiling, ref, tile)
    # volatile: else the assembler moves loads down to their use, and their latency shows
    return plgpu.load(where, mask=mask, other=None if mask is None else other, volatile=True)


def store(tiling: Tiling, ref: Ref, tile: jax.Array, values: jax.Array) -> None:
    """Writes the elements of a tile."""
    where, mask = _elements(tiling, ref, tile)
    plgpu.store(where, values, mask=mask)


def load_scales(tiling: Tiling, ref: Ref, tile: jax.Array) -> jax.Array:
    """Scales of a tile, [rows]; 0 where there are none."""
    mask = _row_mask(tiling, tile)
    return plgpu.load(_scales(tiling, ref, tile), mask=mask, other=None if mask is None else 0)


def load_of_block(tiling: Tiling, block: Block, ref: Any, tile: jax.Array) -> jax.Array:
    """Load the block-wise values of a tile: [rows, 1], or [rows, lanes] where lanes differ."""
    values, size = block.mean_shape(tiling.shape), tiling.group_size
    positions = [index[:, None] for index in _coordinates(tiling, tile)]
    # neighbours along each axis with one value
    widths = [length // count for length, count in zip(tiling.shape, values, strict=True)]
    if widths[-1] % size == 0:  # no group has elements of two blocks
        widths[-1] //= size
    else:
        lane = lax.broadcasted_iota(jnp.int32, tiling.tile_shape, 1)
        positions[-1] = positions[-1] * jnp.int32(size) + lane
    index, stride = jnp.zeros((tiling.rows, 1), jnp.int32), 1
    for position, width, count in reversed(list(zip(positions, widths, values, strict=True))):
        if count > 1:
            along = position if width == 1 else lax.div(position, jnp.int32(width))
            index = index + along * jnp.int32(stride)
            stride *= count
    # groups and lanes that do not exist read any value
    return plgpu.load(ref.at[jnp.minimum(index, jnp.int32(stride - 1))])


def store_scales(tiling: Tiling, ref: Ref, tile: jax.Array, values: jax.Array) -> None:
    """Writes the scales of a tile."""
    plgpu.store(_scales(tiling, ref, tile), values, mask=_row_mask(tiling, tile))


def _instruction(name: str) -> numerics.Elementwise:
    """A PTX instruction of one f32 operand."""

    def apply(x: jax.Array) -> jax.Array:
        (result,) = plgpu.elementwise_inline_asm(
            f"{name} $0, $1;",
            args=[x],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return result

    return apply


# The reciprocal is 0 above 2^126; a division as it is lowered takes eight instructions, a
# logarithm six, a power of two four.
APPROXIMATIONS = numerics.Approximations(
    reciprocal=_instruction("rcp.approx.ftz.f32"),
    log2=_instruction("lg2.approx.ftz.f32"),
    exp2=_instruction("ex2.approx.ftz.f32"),
)
