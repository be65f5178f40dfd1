"""Layout of an array [..., n] in TPU registers: rows on sublanes, groups of a row on lanes.

For groups of G elements, a register of 128 lanes has 128 / G groups, or part of one group if G is
larger. A unit is G registers along a row: 128 groups, whose scales fill one register. The block of
a program is some rows of a unit, or some whole rows if these are shorter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
ROWS = 32  # rows that are stepped together: those of a tile of 8-bit dtypes
_SUBLANES = 8
_MOST_ROWS = 1024  # maximum rows per block, since each needs VMEM for scales
_AT_ONCE = 8  # maximum registers along a row that are stepped together
_WASTE = 1 / 8  # maximum fraction of a row that is padding


def unsupported(shape: tuple[int, ...], group_size: int) -> str | None:
    """Return the reason why `Blocks` does not support an array, or None."""
    if len(shape) < 2:
        return "a TPU stores vectors in other tiles than matrices"
    if shape[-1] % LANES:
        return f"its last axis, {shape[-1]}, is not a multiple of {LANES}, so XLA transposes it"
    if len(shape) > 2 and shape[-2] % _SUBLANES:
        return f"its second-last axis, {shape[-2]}, is not a multiple of {_SUBLANES}"
    if group_size & (group_size - 1) or group_size > LANES * _AT_ONCE:
        return f"groups of {group_size}; the kernel takes powers of two up to {LANES * _AT_ONCE}"
    if shape[-1] % group_size:
        return f"groups of {group_size} do not divide its last axis, {shape[-1]}"
    return None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of an array, viewed as a matrix by flattening its leading axes to rows."""

    shape: tuple[int, ...]  # shape of the array, which `unsupported` must accept
    group_size: int  # number of neighbours on the last axis that share a scale
    elements: int  # approximate number of elements per block
    least_registers: int = 1  # minimum number of registers along a row that are stepped together
    of_rows: bool = False  # whether there is an array of one value per row, with rows on lanes
    within: bool = False  # whether a block must not have rows of two matrices

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows of the array."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of elements per row."""
        return self.shape[-1]

    @functools.cached_property
    def at_once(self) -> int:
        """Number of registers along a row that are stepped together, a power of two."""
        last = (self.columns - 1) % (LANES * self.group_size) // LANES + 1
        size = min(_AT_ONCE, self.group_size)
        least = max(self.least_registers, self.registers_per_group)
        while _rounded_up(last, size) > last * (1 + _WASTE) and size > least:
            size //= 2
        return size

    @functools.cached_property
    def width(self) -> int:
        """Number of elements along a row of a block, which may extend beyond the array."""
        columns = _rounded_up(self.columns, self.at_once * LANES)
        width = min(columns, LANES * self.group_size)
        # blocks of scales need multiples of 128 on lanes, and of 8 on sublanes
        part = max(self.at_once * LANES, _SUBLANES * self.group_size)
        while self.transposed and width * LANES > self.elements and width % (2 * part) == 0:
            width //= 2
        return width

    @functools.cached_property
    def block_rows(self) -> int:
        """Number of rows per block."""
        least = LANES if self.transposed or self.of_rows else ROWS
        most = max(least, min(self.elements // self.width, _MOST_ROWS) // least * least)
        if self.stacked or self.within:
            most = math.gcd(most, self.shape[-2])  # still a multiple of `least`: `block_reason`
        return min(most, _rounded_up(self.rows, least))

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Numbers of blocks (over the rows, along a row)."""
        return -(-self.rows // self.block_rows), -(-self.columns // self.width)

    def steps(self, block: jax.Array) -> jax.Array | int:
        """Return the number of steps along a row of a block, fewer for the last block."""
        size = self.at_once * LANES
        every, last = self.width // size, -(-((self.columns - 1) % self.width + 1) // size)
        if every == last:
            return every
        return jnp.where(block == self.grid[1] - 1, jnp.int32(last), jnp.int32(every))

    # ---- groups ------------------------------------------------------------------------------

    @property
    def registers_per_group(self) -> int:
        """Number of registers per group, at least 1."""
        return max(1, self.group_size // LANES)

    @property
    def lanes_per_group(self) -> int:
        """Number of lanes of a register that belong to one group."""
        return min(self.group_size, LANES)

    @property
    def groups_per_register(self) -> int:
        """Number of groups per register, at least 1."""
        return LANES // self.lanes_per_group

    @property
    def parts(self) -> int:
        """Number of registers per step along a row, counting those of one group as one."""
        return self.at_once // self.registers_per_group

    @property
    def groups(self) -> int:
        """Number of groups per row."""
        return self.columns // self.group_size

    @functools.cached_property
    def block_groups(self) -> int:
        """Number of groups along a row of a block."""
        return min(self.groups, self.width // self.group_size)

    @functools.cached_property
    def transposed(self) -> bool:
        """Return whether XLA stores scales with rows on lanes, since that needs less padding."""
        rows = self.shape[-2]
        as_they_are = _rounded_up(rows, _SUBLANES) * _rounded_up(self.groups, LANES)
        return _rounded_up(rows, LANES) * _rounded_up(self.groups, _SUBLANES) < as_they_are

    @functools.cached_property
    def stacked(self) -> bool:
        """Return whether scales are transposed per matrix, instead of with all rows flattened."""
        return self.transposed and len(self.shape) > 2 and self.shape[-2] % LANES == 0

    # ---- inside a kernel ---------------------------------------------------------------------

    def group_of_lane(self, register: jax.Array) -> jax.Array:
        """Return each lane's group number within the block, int32 [ROWS, LANES]."""
        first = _div(register, self.registers_per_group) * self.groups_per_register
        return _div(_lane(), self.lanes_per_group) + first

    def coordinates(self, row: jax.Array, block: jax.Array) -> list[jax.Array]:
        """Return the indices, uint32, of the groups of ROWS rows along each axis of the scales.

        `block` is the number of the block along the row.
        """
        rest: jax.Array = row
        own: list[jax.Array] = [lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)]
        if self.shape[-2] % ROWS:  # rows of several matrices
            rest, own = rest + own[0], []
        places = []
        for size in reversed(self.shape[1:-1]):
            places.append(_rem(rest, size))
            rest = _div(rest, size)
        places = [rest, *reversed(places)]
        if own:
            places[-1] = places[-1] + own[0]
        places.append(_lane() + block * (self.width // self.group_size))
        return [place.astype(jnp.uint32) for place in places]

    def in_order(self, ends: jax.Array) -> jax.Array:
        """Permute the lanes of the result of `tree` to the order of the groups."""
        lane = _lane()
        in_register = _rem(lane, self.groups_per_register)
        register = _div(lane, self.groups_per_register)
        return gather(ends, in_register * self.lanes_per_group + register)


def lane_of_byte(register: int, several: int) -> jax.Array:
    """Return the lane of the byte that holds each code of a register, int32 [ROWS, LANES].

    `register` is the index among the `several` registers of codes whose bytes share one register.
    """
    return _div(_lane(), several) + register * (LANES // several)


def in_bytes(registers: Sequence[jax.Array], several: int) -> jax.Array:
    """Pack `several` registers of codes, as bits in their bytes, into one register of bytes."""
    lane = _lane()
    own, sums = _div(lane, LANES // several), []
    for i in range(several):
        place = _rem(lane, LANES // several) * several + i
        of_own = gather(registers[0], place)
        for register, x in enumerate(registers[1:], 1):
            of_own = jnp.where(own == register, gather(x, place), of_own)
        sums.append(of_own)
    return functools.reduce(jnp.add, sums)


def gather(x: jax.Array, lanes: jax.Array) -> jax.Array:
    """Gather lanes within each row of an array [n, 128]."""
    if x.dtype == jnp.uint32:
        signed = lax.bitcast_convert_type(x, jnp.int32)
        return lax.bitcast_convert_type(gather(signed, lanes), jnp.uint32)
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


def tree(
    parts: Sequence[jax.Array | None],
    of_two: Callable[[jax.Array, jax.Array], jax.Array],
    step: int = 1,
) -> jax.Array:
    """Reduce groups of lanes of many registers, with about one shuffle per register.

    `parts` are registers [n, 128], each of which already combines `step` of them; their number is a
    power of two, and missing ones are None. Lane l of the result has the reduction of part i = (l
    // step) % len(parts), over the lanes whose numbers differ from l only in the bits of i.
    """
    results = list(parts)
    while len(results) > 1:
        pairs = zip(results[::2], results[1::2], strict=True)
        results = [_merged(one, other, of_two, step) for one, other in pairs]
        step *= 2
    assert results[0] is not None
    return results[0]


def _merged(
    one: jax.Array | None,
    other: jax.Array | None,
    of_two: Callable[[jax.Array, jax.Array], jax.Array],
    step: int,
) -> jax.Array | None:
    """Reduce two registers over pairs of lanes `step` apart, into one register."""
    if one is None:
        return None
    lane = _lane()
    if other is None:
        return of_two(one, gather(one, lane ^ step))
    first = (lane & step) == 0
    kept, moved = jnp.where(first, one, other), jnp.where(first, other, one)
    return of_two(kept, gather(moved, lane ^ step))


def _lane() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)


def _div(x: jax.Array, y: int) -> jax.Array:
    """Return x // y of non-negative numbers, without the sign handling of `//`."""
    return lax.div(x, jnp.int32(y)) if y > 1 else x


def _rem(x: jax.Array, y: int) -> jax.Array:
    return lax.rem(x, jnp.int32(y))


def _rounded_up(length: int, tile: int) -> int:
    return -(-length // tile) * tile
