"""An array [..., n] as tiles of groups: what a GPU program loads, computes and stores at once."""

import dataclasses
import functools
import math

import jax
from jax.typing import DTypeLike

from optax_lowmem._src.core import groups

MAX_ELEMENTS = 2**31 - 1  # offsets are 32-bit integers


def next_power_of_two(number: int) -> int:
    """The least power of two that is not under a positive number."""
    return 1 << (number - 1).bit_length()


def result_like(
    x: jax.Array, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None
) -> jax.ShapeDtypeStruct:
    """A kernel's result; how its operand `x` varies over a mesh is kept for `shard_map`."""
    shape, dtype = x.shape if shape is None else shape, x.dtype if dtype is None else dtype
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Size of the tile of one program of a kernel.

    Attributes:
      elements: elements per tile, a power of two.
      warps: warps, of 32 threads, that share a tile.
    """

    elements: int = 1024
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The groups of an array [..., n] in tiles [rows, lanes]: one group a row.

    Attributes:
      shape: of the array.
      group_size: neighbours on the last axis that share a scale.
      elements: of a tile, rows times lanes.
    """

    shape: tuple[int, ...]
    group_size: int
    elements: int

    def of_bytes(self, codes_per_byte: int) -> "Tiling":
        """The same groups of an array in which so many neighbours share a byte, in equal tiles."""
        if codes_per_byte == 1:
            return self
        shape = groups.scale_shape(self.shape, codes_per_byte)
        own = dataclasses.replace(self, shape=shape, group_size=self.group_size // codes_per_byte)
        return dataclasses.replace(own, elements=self.rows * own.lanes)

    @functools.cached_property
    def width(self) -> int:
        """Elements of a full group."""
        return min(self.group_size, self.shape[-1])

    @functools.cached_property
    def lanes(self) -> int:
        """The width, rounded up to a power of two."""
        return next_power_of_two(self.width)

    @functools.cached_property
    def rows(self) -> int:
        """Groups of a tile."""
        return max(1, self.elements // self.lanes)

    @functools.cached_property
    def groups(self) -> int:
        """Groups of the array."""
        return math.prod(groups.scale_shape(self.shape, self.group_size))

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of the array; the last one may be partial."""
        return -(-self.groups // self.rows)

    @functools.cached_property
    def flat(self) -> bool:
        """Return whether every group is full, so that the array is [groups, lanes]."""
        return self.shape[-1] % self.width == 0 and self.width == self.lanes

    @functools.cached_property
    def tile_shape(self) -> tuple[int, int]:
        """[rows, lanes]."""
        return self.rows, self.lanes

    def element_view(self, x: jax.Array) -> jax.Array:
        """The array as the kernel sees it: a reshape that moves nothing."""
        return x.reshape((-1, self.lanes if self.flat else self.shape[-1]))

    def scale_view(self, scales: jax.Array) -> jax.Array:
        """The scales, or the values of blocks, as the kernel sees them: in one row."""
        return scales.reshape(-1)
