"""How an array is cut between the programs of a kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Strip:
    """What a program takes: 32 rows, and some columns.

    Attributes:
      columns: a power of two, a multiple of 32.
      warps: of 32 threads that share it.
    """

    columns: int = 128
    warps: int = 4
