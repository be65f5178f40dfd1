"""A leaf as columns to be summed, one axis after the other, and how tiles cut them."""

import dataclasses
import math

from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.tiles import next_power_of_two

_TILE = 8192  # elements of a program: 64 for each of 128 threads
_ROWS, _ROWS_OF_PARTS = 64, 256  # of a tile at least, where columns are many; of sums of parts


@dataclasses.dataclass(frozen=True)
class Columns:
    """An array [outer, rows, width] whose rows are summed in parts, one a tile.

    Attributes:
      outer: how many such matrices lie one after the other.
      rows: averaged over.
      width: columns; 1 where the rows lie side by side in memory.
      begins: whether what is summed are rows, not sums of parts of them.
    """

    outer: int
    rows: int
    width: int
    begins: bool = True

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, a power of two: all, where a tile has room for them."""
        narrow = _TILE // next_power_of_two(self.width)
        rows = next_power_of_two(self.rows)
        most = max(narrow, _ROWS if self.begins else _ROWS_OF_PARTS)
        return rows if rows <= most else max(narrow, _ROWS)

    @property
    def tile_width(self) -> int:
        """Columns of a tile, a power of two."""
        return max(1, min(_TILE // self.tile_rows, next_power_of_two(self.width)))

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
        """Return whether all tiles are full: none extends past the last row or column."""
        return self.rows % self.tile_rows == 0 and self.width % self.tile_width == 0


def passes(block: Block, shape: tuple[int, ...]) -> list[Columns]:
    """Launches that leave the mean over each block: of parts and their sums, axis by axis."""
    viewed, axes = block.view(shape)
    sizes, found = list(viewed), []
    for axis in axes:
        before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
        columns = Columns(before, sizes[axis], after)
        found.append(columns)
        while columns.parts > 1:
            columns = Columns(before, columns.parts, after, begins=False)
            found.append(columns)
        sizes[axis] = 1
    return found


def has_columns(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether a block averages over an axis other than the last, contiguous one."""
    axes = block.fit(shape).axes
    return bool(axes) and axes[0] < len(shape) - 1
