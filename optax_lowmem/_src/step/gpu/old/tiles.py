"""Loads and stores of tiles inside a GPU kernel, for every backend (see `gpu_kernel`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import groups, random
from optax_lowmem._src.core.block import Block, product
from optax_lowmem._src.core.groups import Tiling
from optax_lowmem._src.kernels.gpu_kernel import Index, Operand, Run


def _group_numbers(tiling: Tiling, tile: jax.Array) -> jax.Array:
    return tile * tiling.rows + lax.iota(jnp.int32, tiling.rows)


def _row_mask(tiling: Tiling, tile: jax.Array) -> jax.Array | None:
    """Return a mask of the groups of a tile that exist, or None if all do."""
    if tiling.groups % tiling.rows == 0:
        return None
    return _group_numbers(tiling, tile) < tiling.groups


def noise(
    tiling: Tiling, tile: jax.Array, key: jax.Array, lane_bits: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return `random.noise_bits` of a tile: [rows, 1] and [lanes] (`lane_bits`, if given)."""
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


def _elements(tiling: Tiling, tile: jax.Array) -> tuple[tuple[Index, ...], jax.Array | None]:
    """Return the index of the elements of a tile [rows, lanes], and a mask of those that exist."""
    shape = tiling.tile_shape
    if tiling.flat:
        mask = _row_mask(tiling, tile)
        whole = None if mask is None else jnp.broadcast_to(mask[:, None], shape)
        return (Run(tile * tiling.rows, tiling.rows), Run(0, tiling.lanes)), whole
    per_row = jnp.int32(groups.group_count(tiling.shape[-1], tiling.group_size))
    group = _group_numbers(tiling, tile)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    row = jnp.broadcast_to(lax.div(group, per_row)[:, None], shape)
    column = lax.rem(group, per_row)[:, None] * jnp.int32(tiling.group_size) + lane
    mask = (column < tiling.shape[-1]) & (lane < tiling.width) & (group < tiling.groups)[:, None]
    return (row, column), mask


def _scales(tiling: Tiling, tile: jax.Array) -> Run:
    return Run(tile * tiling.rows, tiling.rows)


def part(x: Operand, *axes: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the index of a part, from indices along each axis, and a mask of those that exist.

    The index has arrays, since JAX rejects slices that leave an array even if they are masked.
    """
    shape = tuple(axis.size for axis in axes)
    grid = tuple(lax.broadcast_in_dim(axis, shape, (d,)) for d, axis in enumerate(axes))
    inside = [index < size for index, size in zip(grid, x.shape, strict=True)]
    return grid, functools.reduce(jnp.logical_and, inside)


def load(tiling: Tiling, x: Operand, tile: jax.Array, other: int = 0) -> jax.Array:
    """Load the elements of a tile; `other` where there are none."""
    where, mask = _elements(tiling, tile)
    return x.load(*where, mask=mask, other=other, early=True)


def store(tiling: Tiling, x: Operand, tile: jax.Array, values: jax.Array) -> None:
    """Store the elements of a tile."""
    where, mask = _elements(tiling, tile)
    x.store(*where, values=values, mask=mask)


def load_scales(tiling: Tiling, x: Operand, tile: jax.Array) -> jax.Array:
    """Load the scales of a tile, [rows]; 0 where there are none."""
    return x.load(_scales(tiling, tile), mask=_row_mask(tiling, tile))


def load_of_block(tiling: Tiling, block: Block, operands: Any, tile: jax.Array) -> jax.Array:
    """Load the block-wise values of a tile: [rows, 1], or [rows, lanes] where lanes differ.

    Args:
      tiling: tiling of the leaf.
      block: the leaf's block.
      operands: operands from `Block.operands`.
      tile: number of the tile.
    """
    parts = block.fit(tiling.shape).parts
    pairs = zip(parts, jax.tree.leaves(operands), strict=True)
    return product([_load_of_part(tiling, part, x, tile) for part, x in pairs])


def _load_of_part(tiling: Tiling, block: Block, x: Operand, tile: jax.Array) -> jax.Array:
    values, size = block.mean_shape(tiling.shape), tiling.group_size
    positions = [index[:, None] for index in _coordinates(tiling, tile)]
    # number of neighbours along each axis that share a value
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
    return x.load(jnp.minimum(index, jnp.int32(stride - 1)))


def store_scales(tiling: Tiling, x: Operand, tile: jax.Array, values: jax.Array) -> None:
    """Store the scales of a tile."""
    x.store(_scales(tiling, tile), values=values, mask=_row_mask(tiling, tile))
