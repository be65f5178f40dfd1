"""Leaves as stacks of matrices, for rules whose direction is taken of whole matrices."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_lowmem._src.core import trees
from optax_lowmem._src.core.typing import Shaped

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The axes of a leaf that make the rows and the columns of its matrices; others count them.

    Attributes:
      rows: axes that are summed over in x W (`reduction_axis` of optax), not negative.
      columns: axes of the result (`output_axis`), not negative.
    """

    rows: Axes
    columns: Axes

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return (rows, columns) of each matrix: fan in and fan out."""
        rows, columns = (math.prod(shape[a] for a in axes) for axes in (self.rows, self.columns))
        return rows, columns

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of matrices of a leaf of this shape."""
        return math.prod(shape[axis] for axis in self._others(shape))

    def to_stack(self, x: jax.Array) -> jax.Array:
        """A leaf as [matrices, rows, columns]."""
        count = self.count(x.shape)
        return x.transpose(self._order(x.shape)).reshape(count, *self.fans(x.shape))

    def from_stack(self, stack: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A leaf of this shape from what `to_stack` makes of it."""
        order = self._order(shape)
        inverse = sorted(range(len(shape)), key=order.__getitem__)
        return stack.reshape([shape[axis] for axis in order]).transpose(inverse)

    def _others(self, shape: tuple[int, ...]) -> Axes:
        return tuple(a for a in range(len(shape)) if a not in (*self.rows, *self.columns))

    def _order(self, shape: tuple[int, ...]) -> Axes:
        return (*self._others(shape), *self.rows, *self.columns)


Dimensions = Any  # of optax.contrib.muon: a tree of MuonDimensionNumbers and None, or a function
Chooser = Callable[[optax.Params], dict[str, Matrices]]


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixAxes:
    """The leaves that are matrices, and along which axes.

    Attributes:
      dimensions: `muon_weight_dimension_numbers` of optax.contrib.muon: a tree like the parameters,
        or a prefix of it, of `MuonDimensionNumbers`, or None for leaves that are no matrices; a
        function of the parameters that gives one; None for all leaves of two dimensions.
    """

    dimensions: Dimensions = None

    def of(self, params: optax.Params) -> dict[str, Matrices]:
        """Return the matrices of a tree by path.

        Raises:
          ValueError: for axes that do not fit a leaf, by name, and for a tree that does not fit.
          TypeError: for something else in the place of dimension numbers.
        """
        leaves = trees.named_leaves(params)
        if self.dimensions is None:
            return {p: Matrices((0,), (1,)) for p, leaf in leaves if len(leaf.shape) == 2}
        found = _spread(trees.chosen(self.dimensions, params), params)
        rows = zip(leaves, found, strict=True)
        return {path: _checked(path, leaf, own) for (path, leaf), own in rows if own is not None}


def _is_dimensions(node: object) -> bool:
    return node is None or {"reduction_axis", "output_axis"} <= set(getattr(node, "_fields", ()))


def _spread(given: object, params: optax.Params) -> list[Any]:
    """Return the dimension numbers, or None, of each leaf, from a prefix of the tree."""

    def spread(own: object, sub: Any) -> Any:
        if not _is_dimensions(own):
            raise TypeError(
                "muon_weight_dimension_numbers takes optax.contrib.MuonDimensionNumbers for each "
                f"matrix and None for each other leaf, got {own!r}."
            )
        return jax.tree.map(lambda _: (own,), sub)

    try:
        found = jax.tree.map(spread, given, params, is_leaf=_is_dimensions)
    except ValueError as error:
        names = [name for name, _ in trees.named_leaves(params)]
        raise ValueError(
            f"muon_weight_dimension_numbers does not fit the parameters ({trees.some_of(names)}): "
            f"give a tree of their structure, a prefix of it, or a function of them. {error}"
        ) from error
    # a one-tuple each, since None is an empty tree
    is_own = lambda n: type(n) is tuple and len(n) == 1 and _is_dimensions(n[0])  # noqa: E731
    return [own for (own,) in jax.tree.leaves(found, is_leaf=is_own)]


def _checked(path: str, leaf: Shaped, own: Any) -> Matrices:
    """Return the matrices of a leaf with axes that are not negative."""
    shape = tuple(leaf.shape)
    axes = {name: _axes(path, shape, name, getattr(own, name)) for name in own._fields}
    rows, columns = axes["reduction_axis"], axes["output_axis"]
    if not rows or not columns or len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"leaf '{path}' of shape {shape}: reduction_axis={own.reduction_axis} and output_axis="
            f"{own.output_axis} must name at least one axis each, and none twice. Correct its "
            "MuonDimensionNumbers, or give None to leave the leaf to AdamW."
        )
    return Matrices(rows, columns)


def _axes(path: str, shape: tuple[int, ...], name: str, given: int | Sequence[int]) -> Axes:
    axes = (given,) if isinstance(given, int) else tuple(given)
    rank = len(shape)
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(
                f"{name} {axis} is out of range for leaf '{path}' of shape {shape}: give axes from "
                f"{-rank} to {rank - 1} in its MuonDimensionNumbers, or None to leave the leaf to "
                "AdamW."
            )
    return tuple(axis % rank for axis in axes)
