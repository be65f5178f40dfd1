"""Groups of neighbours on the last axis; the last group of a row may be partial.

Groups never span rows, so that codes shard like the parameter, without collectives.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp


def group_count(length: int, group_size: int) -> int:
    """Return the number of groups along a last axis of `length`."""
    return -(-length // group_size)


def scale_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """Return the shape of an array's scales: shape[:-1] + (groups,)."""
    return shape[:-1] + (group_count(shape[-1], group_size),)


def to_groups(x: jax.Array, group_size: int) -> jax.Array:
    """Reshape [..., n] to [..., groups, lanes]; pad a partial last group with zeros."""
    length = x.shape[-1]
    if length <= group_size:
        return x[..., None, :]
    groups = group_count(length, group_size)
    padding = groups * group_size - length
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(x.shape[:-1] + (groups, group_size))


def from_groups(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `to_groups`."""
    flat = x.reshape(x.shape[:-2] + (x.shape[-2] * x.shape[-1],))
    return flat if flat.shape == shape else flat[..., : shape[-1]]


def spread(x: jax.Array, length: int, group_size: int) -> jax.Array:
    """Repeat each group's value for its elements: [..., groups] to [..., length]."""
    if group_size == 1:
        return x
    if x.shape[-1] == 1:
        return jnp.broadcast_to(x, x.shape[:-1] + (length,))
    repeated = jnp.broadcast_to(x[..., None], x.shape + (group_size,))
    return repeated.reshape(x.shape[:-1] + (x.shape[-1] * group_size,))[..., :length]


# ---- tiles: the groups that one program of a GPU kernel processes --------------------------------

MAX_ELEMENTS = 2**31 - 1  # offsets are 32-bit integers


def next_power_of_two(number: int) -> int:
    """Return the least power of two >= `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Tile:
    """Size of the tile of one program of a kernel: elements, a power of two, and warps."""

    elements: int = 1024
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Division of an array [..., n] into tiles [rows, lanes], with one group per row."""

    shape: tuple[int, ...]
    group_size: int
    elements: int

    def of_bytes(self, codes_per_byte: int) -> "Tiling":
        """Return the tiling of packed codes, several per byte, with the same groups per tile."""
        if codes_per_byte == 1:
            return self
        shape = scale_shape(self.shape, codes_per_byte)
        size = self.group_size // codes_per_byte
        return Tiling(shape, size, self.rows * Tiling(shape, size, 1).lanes)

    @functools.cached_property
    def width(self) -> int:
        """Number of elements in a full group."""
        return min(self.group_size, self.shape[-1])

    @functools.cached_property
    def lanes(self) -> int:
        """The width, rounded up to a power of two."""
        return next_power_of_two(self.width)

    @functools.cached_property
    def rows(self) -> int:
        """Number of groups per tile."""
        return max(1, self.elements // self.lanes)

    @functools.cached_property
    def groups(self) -> int:
        return math.prod(scale_shape(self.shape, self.group_size))

    @functools.cached_property
    def tiles(self) -> int:
        """Number of tiles in the array; the last one may be partial."""
        return -(-self.groups // self.rows)

    @functools.cached_property
    def flat(self) -> bool:
        """Return whether every group is full, so that the array is [groups, lanes]."""
        return self.shape[-1] % self.width == 0 and self.width == self.lanes

    @functools.cached_property
    def tile_shape(self) -> tuple[int, int]:
        """Shape of a tile: [rows, lanes]."""
        return self.rows, self.lanes

    def element_view(self, x: jax.Array) -> jax.Array:
        """Reshape the array as the kernel indexes it, without moving data."""
        return x.reshape((-1, self.lanes) if self.flat else -1)
