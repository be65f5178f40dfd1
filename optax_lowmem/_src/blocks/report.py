"""`describe`: what each leaf got, and why."""

import dataclasses
import math
from collections.abc import Sequence

import optax

from optax_lowmem._src.blocks.structure import Rule, infer
from optax_lowmem._src.core import trees
from optax_lowmem._src.core.block import Block

_F32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of a `Description`: its path, shape and block."""

    path: str
    shape: tuple[int, ...]
    block: Block

    @property
    def values(self) -> int:
        """Entries of its v_mean."""
        return self.block.values(self.shape)

    @property
    def words(self) -> str:
        """Its block in words."""
        block = self.block
        if block.words:
            return block.words
        over = f"mean over axes {block.axes}" if block.axes else ""
        of_heads = f"per head of axis {block.heads[0]} ({block.heads[1]})" if block.heads else ""
        return ", ".join(filter(None, (over, of_heads))) or "elementwise"


@dataclasses.dataclass(frozen=True)
class Description:
    """The block of each leaf, with its reason; print it for a table.

    Attributes:
      rows: one per leaf.
    """

    rows: tuple[Row, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths of the leaves that were not recognised and got the default."""
        return tuple(row.path for row in self.rows if not row.block.known)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def values(self) -> int:
        """Entries of v_mean in all."""
        return sum(row.values for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of v_mean, in f32."""
        return _F32_BYTES * self.values

    def __str__(self) -> str:
        """One line a leaf, unknown ones marked with `?`, then the totals."""
        cells = [
            (
                " " if row.block.known else "?",
                row.path,
                "x".join(map(str, row.shape)) or "()",
                row.words,
                str(row.values),
                row.block.reason,
            )
            for row in self.rows
        ]
        widths = [max((len(c[column]) for c in cells), default=0) for column in range(5)]
        lines = [
            f"{mark} {path:<{widths[1]}}  {shape:<{widths[2]}}  {words:<{widths[3]}}  "
            f"{values:>{widths[4]}}  {reason}"
            for mark, path, shape, words, values, reason in cells
        ]
        unknown = f", {len(self.unknown)} not recognised (marked ?)" if self.unknown else ""
        lines.append(
            f"{len(self.rows)} leaves{unknown}: {self.values} values of v_mean for "
            f"{self.parameters} parameters, {self.bytes / 2**20:.3f} MiB in f32"
        )
        return "\n".join(lines)


def describe(
    params: optax.Params,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    rules: Sequence[Rule] = (),
    default: str = "whole",
) -> Description:
    """Describe the block that `infer` gives each leaf, with the reason.

    The arguments and errors are those of `infer`.

    Returns:
      A `Description`; print it, or read its rows.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"embed": {"embedding": jnp.ones((50, 8))}, "odd": jnp.ones((4, 3))}
      >>> report = lowmem.blocks.describe(params)
      >>> report.values, report.unknown
      (51, ('odd',))
    """
    found = infer(params, heads=heads, kv_heads=kv_heads, rules=rules, default=default)
    shapes = {path: tuple(leaf.shape) for path, leaf in trees.named_leaves(params)}
    return Description(tuple(Row(path, shapes[path], block) for path, block in found.items()))
