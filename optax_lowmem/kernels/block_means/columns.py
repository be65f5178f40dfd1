"""A leaf as columns to be summed, and how tiles cut them."""

import dataclasses
import math

from optax_lowmem._core.block import Block

_TILE = 8192  # elements of a program: 64 for each of 128 threads
_ROWS = 64  # of a tile in the first pass


@dataclasses.dataclass(frozen=True)
class Columns:
    """An array [outer, rows, width] whose rows are summed in parts, one a tile.

    Attributes:
      outer: how many such matrices lie one after the other.
      rows: summed over.
      width: columns.
      tile_rows: of a part, a power of two.
    """

    outer: int
    rows: int
    width: int
    tile_rows: int = _ROWS

    @property
    def tile_width(self) -> int:
        """Columns of a tile, a power of two."""
        return max(1, min(_TILE // self.tile_rows, _power_of_two(self.width)))

    @property
    def parts(self) -> int:
        """Rows of the result for each of the `outer`."""
        return -(-self.rows // self.tile_rows)

    @property
    def across(self) -> int:
        """Tiles beside each other."""
        return -(-self.width // self.tile_width)

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.outer * self.parts * self.across

    @property
    def even(self) -> bool:
        """Whether no tile reaches over an end."""
        return self.rows % self.tile_rows == 0 and self.width % self.tile_width == 0

    @property
    def next(self) -> "Columns":
        """The sum of this one's parts: all at once where a tile holds them."""
        rows = _power_of_two(self.parts)
        return Columns(self.outer, self.parts, self.width, rows if rows <= 256 else _ROWS)

    @classmethod
    def of(cls, block: Block, shape: tuple[int, ...]) -> "Columns":
        """The columns along a leaf's first averaged axis, which is not its last."""
        axis = block.fit(shape).axes[0]
        return cls(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def has_columns(block: Block, shape: tuple[int, ...]) -> bool:
    """Whether a block averages over an axis that is not the last, along which memory lies."""
    axes = block.fit(shape).axes
    return bool(axes) and axes[0] < len(shape) - 1


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
