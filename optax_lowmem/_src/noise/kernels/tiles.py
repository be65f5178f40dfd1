"""Division of an array into strips, one per program of a kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Strip:
    """Strip of one program: 32 rows and some columns.

    Attributes:
      columns: a power of two, a multiple of 32.
      warps: warps, of 32 threads, that share the strip.
    """

    columns: int = 128
    warps: int = 4
