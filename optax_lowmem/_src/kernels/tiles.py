"""Loads and stores of tiles inside a GPU kernel, for every backend (see `gpu_kernel`)."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import groups, random
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.groups import Tiling
from optax_lowmem._src.kernels.gpu_kernel import Index, Operand, Run

VECTOR = 8  # neighbours that a thread loads at once


class Form(NamedTuple):
    """The static properties of tiles that a kernel's code depends on, besides their size.

    Attributes:
      flat: whether all groups are full, so that the array is [groups, lanes].
      alignment: a divisor of the offsets and sizes of all groups.
      masked: whether the last tile is partial.
    """

    flat: bool
    alignment: int
    masked: bool

    @classmethod
    def of(cls, *tilings: Tiling) -> "Form":
        """Return a form of the tiles of several arrays, all or none of which are flat."""
        flat = all(tiling.flat for tiling in tilings)
        lengths = [n for tiling in tilings for n in (tiling.shape[-1], tiling.group_size)]
        partial = any(tiling.groups % tiling.rows for tiling in tilings)
        return cls(flat, math.gcd(VECTOR, *lengths), partial or not flat)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "count", "begin", "size"],
    meta_fields=["rows", "lanes", "vector", "form"],
)
@dataclasses.dataclass(frozen=True)
class Place:
    """The elements of a tile [rows, lanes], with one group per row, in a view of an array.

    The view is [groups, lanes] if the form is flat, else 1-d; see `Tiling.element_view`.

    Attributes:
      rows: rows of the tile.
      lanes: lanes of the tile.
      vector: most neighbours that a thread loads at once.
      form: the form of the tile.
      first: index of its first group.
      count: number of groups in the array.
      begin: [rows] offset of each group in units of `form.alignment`; None if the form is flat.
      size: [rows] number of its elements in these units; 0 beyond the end of the array.
    """

    rows: int
    lanes: int
    vector: int
    form: Form
    first: jax.Array
    count: jax.Array
    begin: jax.Array | None
    size: jax.Array | None

    @classmethod
    def of(
        cls, tiling: Tiling, tile: jax.Array, form: Form | None = None, vector: int = VECTOR
    ) -> "Place":
        """Return the place of a tile.

        Args:
          tiling: tiling of the array.
          tile: number of the tile.
          form: form of the tiles of several arrays that share code.
          vector: most neighbours that a thread loads at once.
        """
        form = form or Form.of(tiling)
        first, count = tile * jnp.int32(tiling.rows), jnp.int32(tiling.groups)
        begin = size = None
        if not form.flat:
            group = _group_numbers(tiling, tile)
            units, length = (n // form.alignment for n in (tiling.group_size, tiling.shape[-1]))
            per_row = jnp.int32(groups.group_count(length, units))
            column = lax.rem(group, per_row) * jnp.int32(units)
            begin = lax.div(group, per_row) * jnp.int32(length) + column
            size = jnp.minimum(jnp.int32(length) - column, jnp.int32(units))
            if form.masked:
                size = jnp.where(group < count, size, 0)
        vector = min(vector, tiling.lanes)
        return cls(tiling.rows, tiling.lanes, vector, form, first, count, begin, size)

    @property
    def row_mask(self) -> jax.Array | None:
        """A mask of the groups that exist, or None if all do."""
        if not self.form.masked:
            return None
        return self.first + lax.iota(jnp.int32, self.rows) < self.count

    @property
    def elements(self) -> tuple[tuple[Index, ...], jax.Array | None]:
        """The index of the elements, and a mask of those that exist."""
        shape = self.rows, self.lanes
        if self.begin is None or self.size is None:
            mask = self.row_mask
            whole = None if mask is None else jnp.broadcast_to(mask[:, None], shape)
            return (Run(self.first, self.rows), Run(0, self.lanes, self.vector)), whole
        unit, lane = jnp.int32(self.form.alignment), lax.broadcasted_iota(jnp.int32, shape, 1)
        mask = lane < jnp.broadcast_to((self.size * unit)[:, None], shape)
        return (Run(self.begin * unit, self.lanes, self.vector),), mask

    @property
    def _scales(self) -> Run:
        return Run(self.first, self.rows)

    def load(self, x: Operand, other: int = 0) -> jax.Array:
        """Load the elements; `other` where there are none."""
        where, mask = self.elements
        return x.load(*where, mask=mask, other=other, early=True)

    def store(self, x: Operand, values: jax.Array) -> None:
        """Store the elements."""
        where, mask = self.elements
        x.store(*where, values=values, mask=mask)

    def load_scales(self, x: Operand) -> jax.Array:
        """Load the scales of the groups, [rows]; 0 where there are none."""
        return x.load(self._scales, mask=self.row_mask)

    def load_of_block(self, x: Operand, numbers: jax.Array) -> jax.Array:
        """Load a value per group or element, by `block_numbers`; 1 where there are none."""
        mask = self.row_mask
        if numbers.shape[1] > 1:
            mask = self.elements[1]
        elif mask is not None:
            mask = mask[:, None]
        return x.load(numbers, mask=mask, other=1)

    def store_scales(self, x: Operand, values: jax.Array) -> None:
        """Store the scales of the groups."""
        x.store(self._scales, values=values, mask=self.row_mask)


def _group_numbers(tiling: Tiling, tile: jax.Array) -> jax.Array:
    return tile * jnp.int32(tiling.rows) + lax.iota(jnp.int32, tiling.rows)


def _coordinates(tiling: Tiling, tile: jax.Array) -> list[jax.Array]:
    """Return the coordinates of a tile's groups, [rows] per axis; the last one counts groups."""
    axes = groups.scale_shape(tiling.shape, tiling.group_size)
    rest, coordinates = _group_numbers(tiling, tile), []
    for size in reversed(axes[1:]):
        coordinates.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    return [rest, *reversed(coordinates)]


def counters(tiling: Tiling, tile: jax.Array) -> jax.Array:
    """Return the counters from which a tile's groups draw R, uint32 [rows]; see `random.mix`."""
    coordinates = [index.astype(jnp.uint32) for index in _coordinates(tiling, tile)]
    return random.counter(jnp.uint32(0), coordinates)


def noise(tiling: Tiling, tile: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `random.noise_bits` of a tile: [rows, 1] and [lanes]."""
    lane_bits = random.lane_bits(key, lax.iota(jnp.uint32, tiling.lanes))
    return random.mix(key + counters(tiling, tile))[:, None], lane_bits


def part(x: Operand, *axes: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the index of a part, from indices along each axis, and a mask of those that exist.

    The index has arrays, since JAX rejects slices that leave an array even if they are masked.
    """
    shape = tuple(axis.size for axis in axes)
    grid = tuple(lax.broadcast_in_dim(axis, shape, (d,)) for d, axis in enumerate(axes))
    inside = [index < size for index, size in zip(grid, x.shape, strict=True)]
    return grid, functools.reduce(jnp.logical_and, inside)


def within_groups(tiling: Tiling, block: Block) -> bool:
    """Return whether elements of one group belong to several blocks of a part of a block."""
    count = block.mean_shape(tiling.shape)[-1]
    return count > 1 and tiling.shape[-1] // count % tiling.group_size != 0


def block_numbers(tiling: Tiling, block: Block, tile: jax.Array) -> jax.Array:
    """Return the number of each group's block, [rows, 1], or of each element's, [rows, lanes].

    Args:
      tiling: tiling of the leaf.
      block: one of the parts of the leaf's block.
      tile: number of the tile.
    """
    values, size = block.mean_shape(tiling.shape), tiling.group_size
    positions = [index[:, None] for index in _coordinates(tiling, tile)]
    # number of neighbours along each axis that share a value
    widths = [length // count for length, count in zip(tiling.shape, values, strict=True)]
    if within_groups(tiling, block):
        lane = lax.broadcasted_iota(jnp.int32, tiling.tile_shape, 1)
        positions[-1] = positions[-1] * jnp.int32(size) + lane
    else:
        widths[-1] = max(1, widths[-1] // size)
    index, stride = jnp.zeros((tiling.rows, 1), jnp.int32), 1
    for position, width, count in reversed(list(zip(positions, widths, values, strict=True))):
        if count > 1:
            along = position if width == 1 else lax.div(position, jnp.int32(width))
            index = index + along * jnp.int32(stride)
            stride *= count
    return index
