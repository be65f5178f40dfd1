"""An array [..., n] in the registers of a TPU: rows on sublanes, its groups side by side on lanes.

A register has 128 lanes, the elements of 128 / G groups, or part of one larger group. A unit, G
registers along a row, has 128 groups, whose scales are one register. A block, what a program of a
kernel takes, is some rows of a unit, or of whole rows where those are shorter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
ROWS = 32  # that are stepped together: a tile of 8-bit numbers
_SUBLANES = 8
_MOST_ROWS = 1024  # of a block: each takes registers for scales
_AT_ONCE = 8  # registers along a row
_WASTE = 1 / 8  # of a row, by such steps


def unsupported(shape: tuple[int, ...], group_size: int) -> str | None:
    """Return the reason why an array does not lie in registers as `Blocks` says, or None."""
    if len(shape) < 2:
        return "a TPU keeps vectors in other tiles than matrices"
    if shape[-1] % LANES:
        return f"its last axis, {shape[-1]}, is not a multiple of {LANES}, so XLA transposes it"
    if len(shape) > 2 and shape[-2] % _SUBLANES:
        return f"its second-last axis, {shape[-2]}, is not a multiple of {_SUBLANES}"
    if group_size & (group_size - 1) or group_size > LANES * _AT_ONCE:
        return f"groups of {group_size}, and registers hold powers of two up to {LANES * _AT_ONCE}"
    if shape[-1] % group_size:
        return f"groups of {group_size} do not divide its last axis, {shape[-1]}"
    return None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of an array, whose rows are those of all its leading axes.

    Attributes:
      shape: of the array, which is not `unsupported`.
      group_size: neighbours on the last axis that share a scale.
      elements: of a block, about.
      least_registers: along a row that are stepped together.
      of_rows: whether there is an array of values of rows, which lie on lanes.
      within: whether no block may have rows of two matrices.
    """

    shape: tuple[int, ...]
    group_size: int
    elements: int
    least_registers: int = 1
    of_rows: bool = False
    within: bool = False

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the array."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @functools.cached_property
    def at_once(self) -> int:
        """Registers along a row that are stepped together, a power of two."""
        last = (self.columns - 1) % (LANES * self.group_size) // LANES + 1
        size = min(_AT_ONCE, self.group_size)
        least = max(self.least_registers, self.of_group)
        while _rounded_up(last, size) > last * (1 + _WASTE) and size > least:
            size //= 2
        return size

    @functools.cached_property
    def width(self) -> int:
        """Elements along a row of a block; they may reach beyond the array."""
        columns = _rounded_up(self.columns, self.at_once * LANES)
        width = min(columns, LANES * self.group_size)
        # scales on lanes come 128 at a time, and on sublanes 8
        part = max(self.at_once * LANES, _SUBLANES * self.group_size)
        while self.transposed and width * LANES > self.elements and width % (2 * part) == 0:
            width //= 2
        return width

    @functools.cached_property
    def block_rows(self) -> int:
        """Rows of a block."""
        least = LANES if self.transposed or self.of_rows else ROWS
        most = max(least, min(self.elements // self.width, _MOST_ROWS) // least * least)
        if self.stacked or self.within:
            most = math.gcd(most, self.shape[-2])
        return min(most, _rounded_up(self.rows, least))

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Blocks along the rows, and along a row."""
        return -(-self.rows // self.block_rows), -(-self.columns // self.width)

    def steps(self, block: jax.Array) -> jax.Array | int:
        """Return the number of steps along a row of a block; the last block may have fewer."""
        size = self.at_once * LANES
        every, last = self.width // size, -(-((self.columns - 1) % self.width + 1) // size)
        if every == last:
            return every
        return jnp.where(block == self.grid[1] - 1, jnp.int32(last), jnp.int32(every))

    # ---- groups ------------------------------------------------------------------------------

    @property
    def of_group(self) -> int:
        """Registers that a group fills, or is part of."""
        return max(1, self.group_size // LANES)

    @property
    def lanes_of_group(self) -> int:
        """Lanes of a register that a group has."""
        return min(self.group_size, LANES)

    @property
    def per_register(self) -> int:
        """Groups of a register; 1 of which it is part."""
        return LANES // self.lanes_of_group

    @property
    def parts(self) -> int:
        """Registers, or groups of several, that a step along a row has."""
        return self.at_once // self.of_group

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.columns // self.group_size

    @functools.cached_property
    def block_groups(self) -> int:
        """Groups along a row of a block."""
        return min(self.groups, self.width // self.group_size)

    @functools.cached_property
    def transposed(self) -> bool:
        """Return whether XLA keeps scales with the rows on lanes, which wastes fewer of them."""
        rows = self.shape[-2]
        as_they_are = _rounded_up(rows, _SUBLANES) * _rounded_up(self.groups, LANES)
        return _rounded_up(rows, LANES) * _rounded_up(self.groups, _SUBLANES) < as_they_are

    @functools.cached_property
    def stacked(self) -> bool:
        """Return whether transposed scales are so within each matrix of the leading axes."""
        return self.transposed and len(self.shape) > 2 and self.shape[-2] % LANES == 0

    # ---- inside a kernel ---------------------------------------------------------------------

    def group_of_lane(self, register: jax.Array) -> jax.Array:
        """int32 [ROWS, LANES]: the number in its block of the group of each lane of a register."""
        first = _div(register, self.of_group) * self.per_register
        return _div(_lane(), self.lanes_of_group) + first

    def coordinates(self, row: jax.Array, block: jax.Array) -> list[jax.Array]:
        """Indices uint32 of the groups of ROWS rows along each axis of the scales.

        Args:
          row: the first row.
          block: of the row.
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
        """`tree`'s result with the groups of a row in their order."""
        lane = _lane()
        in_register, register = _rem(lane, self.per_register), _div(lane, self.per_register)
        return gather(ends, in_register * self.lanes_of_group + register)


def bytes_of_lane(register: int, several: int) -> jax.Array:
    """int32 [ROWS, LANES]: the lane of the byte of each of `several` codes in one byte.

    Args:
      register: of codes, among those whose bytes are one register.
      several: codes in a byte.
    """
    return _div(_lane(), several) + register * (LANES // several)


def in_bytes(registers: Sequence[jax.Array], several: int) -> jax.Array:
    """Sums of neighbours, `several` at a time, of as many registers: one register."""
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
    """Of each row [n, 128] what is at the given lanes."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(gather(_signed(x), lanes), jnp.uint32)
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


def tree(
    parts: Sequence[jax.Array | None],
    of_two: Callable[[jax.Array, jax.Array], jax.Array],
    step: int = 1,
) -> jax.Array:
    """Reduce groups of lanes, of many registers in about one shuffle each.

    Args:
      parts: as many as a power of two, [n, 128]; None where there is none.
      of_two: the reduction of two arrays.
      step: how many registers each of them has in it already.

    Returns:
      [n, 128]: lane i, of those whose lowest bits are i // step, has the reduction of part i over
      the lanes that differ in these bits.
    """
    found = list(parts)
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [_merged(one, other, of_two, step) for one, other in pairs]
        step *= 2
    assert found[0] is not None
    return found[0]


def _merged(
    one: jax.Array | None,
    other: jax.Array | None,
    of_two: Callable[[jax.Array, jax.Array], jax.Array],
    step: int,
) -> jax.Array | None:
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
    """x // y of numbers that are not negative, which `lax` need not look at."""
    return lax.div(x, jnp.int32(y)) if y > 1 else x


def _rem(x: jax.Array, y: int) -> jax.Array:
    return lax.rem(x, jnp.int32(y))


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _rounded_up(length: int, tile: int) -> int:
    return -(-length // tile) * tile
