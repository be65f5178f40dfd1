"""Leaves as stacks of matrices, for a `MatrixRule`."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.roles.roles import roles
from optax_lowmem._src.arrays.typing import PyTree, Shaped

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The row and column axes of the matrices in a leaf; all other axes are batch axes."""

    rows: Axes  # non-negative axes that x W sums over (`reduction_axis` of optax)
    columns: Axes  # non-negative axes of the result of x W (`output_axis` of optax)

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of rows and columns of each matrix: fan-in and fan-out."""
        rows, columns = (math.prod(shape[a] for a in axes) for axes in (self.rows, self.columns))
        return rows, columns

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of matrices in a leaf of this shape."""
        return math.prod(shape[axis] for axis in self._others(shape))

    def to_stack(self, x: jax.Array) -> jax.Array:
        """Transpose and reshape a leaf to [matrices, rows, columns]."""
        count = self.count(x.shape)
        return x.transpose(self._order(x.shape)).reshape(count, *self.fans(x.shape))

    def from_stack(self, stack: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Invert `to_stack` for a leaf of this shape."""
        order = self._order(shape)
        inverse = sorted(range(len(shape)), key=order.__getitem__)
        return stack.reshape([shape[axis] for axis in order]).transpose(inverse)

    def _others(self, shape: tuple[int, ...]) -> Axes:
        return tuple(a for a in range(len(shape)) if a not in (*self.rows, *self.columns))

    def _order(self, shape: tuple[int, ...]) -> Axes:
        return (*self._others(shape), *self.rows, *self.columns)


Dimensions = PyTree  # as in optax.contrib.muon: tree of MuonDimensionNumbers or None, or a function
Chooser = Callable[[optax.Params], dict[str, Matrices]]


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixAxes:
    """Selects the leaves that are matrices, and their axes.

    `dimensions` are `muon_weight_dimension_numbers` as in optax.contrib.muon; with None, the role
    of each leaf decides.
    """

    dimensions: Dimensions = None

    def of(self, params: optax.Params) -> dict[str, Matrices]:
        """Return the axes of the leaves that are matrices, by path; raises if they do not fit."""
        if self.dimensions is None:
            matrices = {path: role.axes for path, role in roles(params).items() if role.is_matrix}
            return {path: Matrices((row,), (column,)) for path, (row, column) in matrices.items()}
        leaves = trees.named_leaves(params)
        result = _spread(trees.chosen(self.dimensions, params), params)
        rows = zip(leaves, result, strict=True)
        return {
            path: _checked(path, leaf, entry) for (path, leaf), entry in rows if entry is not None
        }

    def dimension_numbers(self, params: optax.Params) -> Dimensions:
        """Return `muon_weight_dimension_numbers` with the same result for these parameters."""
        axes, numbers = self.of(params), optax.contrib.MuonDimensionNumbers
        return jax.tree.unflatten(
            jax.tree.structure(params),
            [
                numbers(axes[path].rows, axes[path].columns) if path in axes else None
                for path, _ in trees.named_leaves(params)
            ],
        )


def _is_dimensions(node: object) -> bool:
    return node is None or {"reduction_axis", "output_axis"} <= set(getattr(node, "_fields", ()))


def _spread(prefix: object, params: optax.Params) -> list[PyTree]:
    """Expand a prefix tree to the dimension numbers, or None, of each leaf."""

    def spread(entry: object, sub: PyTree) -> PyTree:
        if not _is_dimensions(entry):
            raise TypeError(
                "muon_weight_dimension_numbers takes optax.contrib.MuonDimensionNumbers for each "
                f"matrix and None for each other leaf, got {entry!r}."
            )
        return jax.tree.map(lambda _: (entry,), sub)

    try:
        result = jax.tree.map(spread, prefix, params, is_leaf=_is_dimensions)
    except ValueError as error:
        names = [name for name, _ in trees.named_leaves(params)]
        raise ValueError(
            f"muon_weight_dimension_numbers does not fit the parameters ({trees.some_of(names)}): "
            f"give a tree of their structure, a prefix of it, or a function of them. {error}"
        ) from error
    # one-tuples, since None would be an empty tree
    is_entry = lambda n: type(n) is tuple and len(n) == 1 and _is_dimensions(n[0])  # noqa: E731
    return [entry for (entry,) in jax.tree.leaves(result, is_leaf=is_entry)]


def _checked(path: str, leaf: Shaped, entry: PyTree) -> Matrices:
    """Return the matrix axes of a leaf as non-negative axes, or raise if they do not fit."""
    shape = tuple(leaf.shape)
    axes = {name: _axes(path, shape, name, getattr(entry, name)) for name in entry._fields}
    rows, columns = axes["reduction_axis"], axes["output_axis"]
    if not rows or not columns or len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"leaf '{path}' of shape {shape}: reduction_axis={entry.reduction_axis} and "
            f"output_axis={entry.output_axis} must name at least one axis each, and no axis twice. "
            "Correct its MuonDimensionNumbers, or give None to leave the leaf to AdamW."
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
