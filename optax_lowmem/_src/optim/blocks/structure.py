"""`infer` and `describe`: the block of each leaf, from rules or from Flax's names and shapes."""

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Sequence

import optax

from optax_lowmem._src.arrays import patterns, trees
from optax_lowmem._src.arrays.block import Block, is_int
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.roles.roles import (
    Heads,
    Leaves,
    ModuleLeaf,
    is_embedding,
    leaves_of,
    whole,
)
from optax_lowmem._src.optim.blocks.kinds import classify

Rule = tuple[str, Block | Sequence[int] | str]

_BLOCK_NAMES = ("whole", "elementwise")


def infer(
    params: optax.Params,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    rules: Sequence[Rule] = (),
    default: str = "whole",
) -> dict[str, Block]:
    """Infer the block structure of each leaf, from explicit rules or Flax's names and shapes.

    Blocks are per head for query and key, per output neuron for value, projection and MLP, per row
    for embedding and output head, and the whole tensor otherwise. Names match whole path
    components. Axes that stack layers or experts are never averaged over. They are recognised by
    Flax's partition names (`layers`), by a component such as `layers` or `ScanBlock_0` whose leaves
    all have an axis of the same size, or by a rank one above the maximum for the kind of leaf.

    Args:
      params: the weights, or their `jax.eval_shape`: arrays, NNX or Linen's `nn.Partitioned`.
      heads: number of query heads; required if a query kernel is (in, heads * head_dim).
      kv_heads: number of key heads; a 2-D key beside a query takes it from the query's head_dim.
      rules: (glob pattern on the path, block) pairs; the first match applies. A block is a
        `Block`, the axes to average over, "whole" or "elementwise" (plain Adam).
      default: "whole" or "elementwise", for leaves that are not recognised; `describe` marks them.

    Returns:
      path -> `Block`, in the order of the leaves.

    Raises:
      ValueError: if an axis is out of range or repeated, a head count does not divide its axis,
        query and key have different head_dim, a rule matches no leaf, or a string is unknown.

    Deviations: Adam-mini's code matches substrings of the path, has dim^2 / heads elements per head
    (wrong for grouped queries) and uses plain Adam for biases, as does
    `rules=[("*bias", "elementwise")]`. Q-Adam-mini's code has one block per value projection, as
    does `rules=[("*/v_proj/kernel", "whole")]`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"attn": {"query": {"kernel": jnp.ones((64, 32))}}}
      >>> lowmem.blocks.infer(params, heads=4)["attn/query/kernel"].mean_shape((64, 32))
      (1, 4)
    """
    check_choice("default", default, _BLOCK_NAMES)
    return Structure(heads, kv_heads, tuple(rules), default).infer(params)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The arguments of `infer`, for an optimizer's `blocks=`; static and hashable.

    Attributes:
      heads: query heads.
      kv_heads: key heads.
      rules: (glob pattern on the path, block) pairs.
      default: "whole" or "elementwise", for leaves that are not recognised. None means "whole",
        with a warning from the optimizer's `init`.

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.q_adam_mini(1e-3, blocks=lowmem.blocks.Structure(heads=16, kv_heads=4))
    """

    heads: int | None = None
    kv_heads: int | None = None
    rules: tuple[Rule, ...] = ()
    default: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(map(_hashable, self.rules)))
        for name, count in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if count is not None and not (is_int(count) and count > 0):
                raise ValueError(f"{name} must be a number of heads >= 1 or None, got {count!r}")
        check_choice("default", self.default or "whole", _BLOCK_NAMES)
        for rule in self.rules:
            if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)):
                raise TypeError(
                    f"rules must be a sequence of (pattern, block) pairs, got {rule!r} in it: pass "
                    "for example rules=[('*/bias', 'elementwise')]."
                )
            if isinstance(rule[1], str) and rule[1] not in _BLOCK_NAMES:
                raise ValueError(
                    f"the block in rule {rule!r} must be a Block, axes, 'whole' or 'elementwise'."
                )

    def infer(self, params: optax.Params) -> dict[str, Block]:
        """Return the block of each leaf, by path."""
        leaves = leaves_of(params)
        for pattern, _ in self.rules if leaves else ():  # no leaves: a placeholder tree
            if error := patterns.unmatched(f"the rule '{pattern}'", pattern, list(leaves)):
                raise ValueError(error)
        return {leaf.path: self._block(leaf, leaves) for leaf in leaves.values()}

    def _block(self, leaf: ModuleLeaf, leaves: Leaves) -> Block:
        for pattern, value in self.rules:
            if fnmatch.fnmatchcase(leaf.path, pattern):
                return _block_of_value(leaf, value, f"rule '{pattern}'")
        result = classify(leaf, leaves, Heads(self.heads, self.kv_heads))
        if isinstance(result, Block):
            return result.fit(leaf.shape, leaf.path)
        reason = f"not recognised: {result}; or pass rules=[('{leaf.path}', axes)]"
        block = _block_of_value(leaf, self.default or "whole", reason)
        return dataclasses.replace(block, known=False)

    def embeddings(self, params: optax.Params) -> set[str]:
        """Return the paths of the embedding tables."""
        return {leaf.path for leaf in leaves_of(params).values() if is_embedding(leaf)}

    def warn(self, params: optax.Params) -> None:
        """Warn about leaves that were not recognised and have one block for the whole tensor."""
        unknown = {path: b.reason for path, b in self.infer(params).items() if not b.known}
        if self.default is None and unknown:
            path, reason = next(iter(unknown.items()))
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            warnings.warn(
                f"the blocks of '{path}'{more} are a guess, one for the whole tensor ({reason}). "
                "See lowmem.blocks.describe(params); Structure(default='whole') accepts the guess.",
                stacklevel=2,
            )


def _hashable(value: object) -> object:
    """Convert lists to tuples, recursively."""
    return tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value


def _block_of_value(leaf: ModuleLeaf, value: Block | Sequence[int] | str, reason: str) -> Block:
    if value == "elementwise":
        return Block((), description="elementwise", reason=reason)
    if isinstance(value, str):
        return whole(leaf, reason)
    block = value if isinstance(value, Block) else Block(tuple(value))
    block = block.fit(leaf.shape, leaf.path)
    return dataclasses.replace(block, reason=block.reason or reason)


_F32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """Path, shape and block of one leaf in a `Description`."""

    path: str
    shape: tuple[int, ...]
    block: Block

    @property
    def values(self) -> int:
        """Return the number of entries of its v_mean."""
        return self.block.values(self.shape)

    @property
    def words(self) -> str:
        """Return a short description of its block."""
        block = self.block
        if block.description:
            return block.description
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
        """Return the paths of the leaves that were not recognised and have the default."""
        return tuple(row.path for row in self.rows if not row.block.known)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def values(self) -> int:
        """Return the total number of entries of v_mean."""
        return sum(row.values for row in self.rows)

    @property
    def bytes(self) -> int:
        """Return the bytes of v_mean in f32."""
        return _F32_BYTES * self.values

    def __str__(self) -> str:
        """Return a line per leaf, with `?` if it was not recognised, and the totals."""
        cells = []
        for row in self.rows:
            mark, shape = " " if row.block.known else "?", "x".join(map(str, row.shape)) or "()"
            cells.append((mark, row.path, shape, row.words, str(row.values), row.block.reason))
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
    result = infer(params, heads=heads, kv_heads=kv_heads, rules=rules, default=default)
    shapes = {path: tuple(leaf.shape) for path, leaf in trees.named_leaves(params)}
    return Description(tuple(Row(path, shapes[path], block) for path, block in result.items()))
