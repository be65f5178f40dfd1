"""Large arrays in blocks of rows, for XLA on a TPU: a loop whose copies stay on the chip.

Groups and square blocks lie along the lanes of a TPU's registers. XLA transposes whatever it
reduces along them, and keeps copies of large arrays in HBM; those of a block of rows fit into the
chip's own memory, so that HBM has nothing but what is read and written.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import platform

ELEMENTS = 1 << 20  # of a block; with 2^22 some copies of it go to HBM, with 2^18 loops are slow
TILE = 32  # rows of a tile of 8-bit numbers: blocks of other sizes are cut through it


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether an array and its copies fit into the chip's own memory."""
    return len(shape) < 2 or math.prod(shape) <= ELEMENTS


def rows_of(shape: tuple[int, ...], axis: int, elements: int) -> int | None:
    """Rows of a block along an axis: whole tiles that divide it, or None where there are none.

    For rows left over XLA would lay out the whole array in another way, and copy it.

    Args:
      shape: of the array.
      axis: not the last one.
      elements: of a block, at most, but for one of the fewest rows.
    """
    unit = TILE if axis == len(shape) - 2 else 1
    if shape[axis] % unit:
        return None
    most = max(1, elements // math.prod(shape[axis + 1 :]) // unit)
    units = shape[axis] // unit
    return unit * max(n for n in range(1, min(most, units) + 1) if units % n == 0)


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """Blocks of an array [..., m, n], each of some rows of one of its matrices.

    Attributes:
      shape: of the array.
      rows: of a block; they divide m.
    """

    shape: tuple[int, ...]
    rows: int

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.shape[:-1]) // self.rows

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of a block, with axes of 1 before its rows."""
        return (*(1,) * (len(self.shape) - 2), self.rows, self.shape[-1])

    def starts(self, block: jax.Array) -> list[jax.Array]:
        """The first index of a block along each axis but the last."""
        each = jnp.int32(self.shape[-2] // self.rows)
        found, rest = [lax.rem(block, each) * self.rows], lax.div(block, each)
        for size in reversed(self.shape[:-2]):
            found.append(lax.rem(rest, jnp.int32(size)))
            rest = lax.div(rest, jnp.int32(size))
        return found[::-1]

    def map(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """The results of a function of each block.

        Args:
          function: (number of the block, its part of each array) -> arrays.
          *arrays: trees of arrays [..., rows, columns] in as many axes as `shape`, each with a part
            of its rows for every block.

        Returns:
          Arrays with as many axes as a part, joined along their rows; others as [blocks, ...].
        """

        def step(given: Any) -> Any:
            # each part is read once, whatever takes it
            block, parts = given[0], lax.optimization_barrier(given[1])
            return function(block, *parts)

        numbers = lax.iota(jnp.int32, self.count)
        found = lax.map(step, (numbers, jax.tree.map(self._in_blocks, arrays)))
        return jax.tree.map(self._joined, found)

    def _in_blocks(self, x: jax.Array) -> jax.Array:
        rows = math.prod(x.shape[:-1]) // self.count
        return x.reshape(self.count, *(1,) * (x.ndim - 2), rows, x.shape[-1])

    def _joined(self, x: jax.Array) -> jax.Array:
        if x.ndim != len(self.shape) + 1:
            return x
        return x.reshape(*self.shape[:-2], -1, x.shape[-1])


def on_tpu(
    x: jax.Array, shape: tuple[int, ...] | None = None, elements: int | None = None
) -> RowBlocks | None:
    """The blocks that an array is taken in where a TPU may run what is traced, or None.

    On several devices XLA would gather what is sharded along its rows, but in a `shard_map`.

    Args:
      x: the array; or, with `shape`, one that lies where it does.
      shape: of the array.
      elements: of a block, at most, but for one of the fewest rows; None for `ELEMENTS`.
    """
    own = x.shape if shape is None else shape
    if fits(own) or not platform.may_be_tpu(x) or platform.no_tpu_kernel_reason(x) is not None:
        return None
    rows = rows_of(own, len(own) - 2, elements or ELEMENTS)
    return None if rows is None else RowBlocks(own, rows)
