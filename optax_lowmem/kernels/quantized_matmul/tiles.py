"""How a quantised product is cut between programs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ProductTile:
    """How a product is cut.

    Attributes:
      rows: of a program's part of the result.
      columns: of it.
      depth: of the sum, at a time.
      warps: of a program.
      stages: loads under way.
      together: row tiles whose column tiles are taken in turn, so that the L2 cache has them.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 128
    warps: int = 8
    stages: int = 3
    together: int = 8

    @property
    def cuts(self) -> tuple[int, int, int]:
        """What the sizes of a product (rows, columns, length of the sum) are multiples of."""
        return self.rows, self.columns, self.depth
