"""Second moments shared by elements of a leaf: blocks (Adam-mini), rows and columns."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays.typing import PyTree

_PART, _COLUMNS = 64, 8192


@dataclasses.dataclass(frozen=True)
class Block:
    """Sharing of one leaf's second moment: v_mean = mean of g^2 over each block.

    Static and hashable; blocks with the same axes and heads are equal, whatever their reason.

    Attributes:
      axes: axes to average over; v_mean has size 1 there. () is one value per element, as in Adam.
      heads: (axis, count): this axis has count x head_dim entries, is viewed as (count, head_dim)
        and averaged within each head; v_mean has `count` entries there.
      description: a short description, such as `per row`.
      reason: why the leaf has this block.
      known: False if the leaf was not recognised and has the default block.

    Example:
      >>> Block(axes=(0,), heads=(1, 4)).mean_shape((64, 32))
      (1, 4)
    """

    axes: tuple[int, ...] = ()
    heads: tuple[int, int] | None = None
    description: str = dataclasses.field(default="", compare=False)
    reason: str = dataclasses.field(default="", compare=False)
    known: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self) -> None:
        axes = tuple(self.axes) if isinstance(self.axes, tuple | list) else self.axes
        if not isinstance(axes, tuple) or not all(map(is_int, axes)):
            raise TypeError(f"Block.axes is a tuple of axis numbers, got {self.axes!r}")
        heads = None if self.heads is None else tuple(self.heads)
        if heads is not None and not (len(heads) == 2 and all(map(is_int, heads)) and heads[1] > 0):
            raise ValueError(f"Block.heads is (axis, number of heads >= 1), got {self.heads!r}")
        object.__setattr__(self, "axes", axes)  # lists would not be hashable
        object.__setattr__(self, "heads", heads)

    @property
    def elementwise(self) -> bool:
        """Return whether every element has its own second moment, as in Adam."""
        return not self.axes and self.heads is None

    @property
    def parts(self) -> "tuple[Block, ...]":
        """The blocks whose means `joined` combines into v_mean; here only the block itself."""
        return (self,)

    def joined(self, means: Sequence[jax.Array]) -> jax.Array:
        """Combine the means over `parts` into v_mean."""
        (mean,) = means
        return mean

    @property
    def shapeless(self) -> "Block":
        """A representative, equal for all blocks with as many `parts`."""
        return Block()

    def operands(self, v: jax.Array, shape: tuple[int, ...]) -> PyTree:
        """Split v_mean into the operands of a leaf's step: one array for each of `parts`."""
        del shape
        return v

    def of_elements(self, operands: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Broadcast `operands` to the elements of a leaf, and multiply them."""
        fitted = self.fit(shape)
        arrays = jax.tree.leaves(operands)
        pairs = zip(fitted.parts, arrays, strict=True)
        return product([part.spread(x, shape) for part, x in pairs])

    def fit(self, shape: tuple[int, ...], path: str = "") -> "Block":
        """Return the block with sorted, nonnegative axes, checked against a leaf's shape.

        Raises:
          ValueError: an axis out of range or named twice, or a head count that does not divide.
        """
        rank, where = len(shape), f"leaf '{path}' of shape {tuple(shape)}" if path else f"{shape}"
        named = [*self.axes, *([self.heads[0]] if self.heads else [])]
        for axis in named:
            if not -rank <= axis < rank:
                raise ValueError(
                    f"block axis {axis} is out of range for {where}: give axes from {-rank} to "
                    f"{rank - 1}."
                )
        if len({axis % rank for axis in named}) < len(named):
            raise ValueError(
                f"a block axis is named twice for {where}, in axes={self.axes} and "
                f"heads={self.heads}: name each axis once."
            )
        if not self.heads:
            return dataclasses.replace(self, axes=tuple(sorted(axis % rank for axis in self.axes)))
        axis, count = self.heads[0] % rank, self.heads[1]
        if shape[axis] % count:
            raise ValueError(
                f"{count} heads do not divide axis {axis} ({shape[axis]}) of {where}: give the "
                "number of heads that this axis holds."
            )
        axes = tuple(sorted(a % rank for a in self.axes))
        return dataclasses.replace(self, axes=axes, heads=(axis, count))

    def mean_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of v_mean for a leaf of this shape."""
        block = self.fit(shape)
        kept = [1 if axis in block.axes else size for axis, size in enumerate(shape)]
        if block.heads:
            kept[block.heads[0]] = block.heads[1]
        return tuple(kept)

    def values(self, shape: tuple[int, ...]) -> int:
        """Return the number of entries of v_mean."""
        return math.prod(self.mean_shape(shape))

    def mean(self, x: ArrayLike, in_parts: bool = True) -> jax.Array:
        """Return the f32 mean of `x` over each block, with shape `mean_shape(x.shape)`.

        Args:
          x: an array whose shape fits the block.
          in_parts: whether to sum one axis after the other, long columns in parts first, which is
            fastest with XLA on a GPU; else all axes at once.
        """
        x = jnp.asarray(x, jnp.float32)
        shape, block = self.mean_shape(x.shape), self.fit(x.shape)
        if x.size == 0:  # an empty leaf has no mean: its v stays 0, not NaN
            return x if self.elementwise else jnp.zeros(shape, jnp.float32)
        x = _mean_along(x, block.axes, in_parts)
        # heads after whole axes: to split an axis, XLA would materialise the elements to be summed
        heads = dataclasses.replace(block, axes=())
        viewed, axes = heads.view(x.shape)
        return _mean_along(x.reshape(viewed), axes, in_parts).reshape(shape)

    def spread(self, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcast `v`, one value per block, to the elements of a leaf of this shape."""
        viewed, axes = self.view(shape)
        kept = [1 if axis in axes else size for axis, size in enumerate(viewed)]
        return jnp.broadcast_to(v.reshape(kept), viewed).reshape(shape)

    def view(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape with the head axis split in two, and its sorted axes to average over."""
        block = self.fit(shape)
        if not block.heads:
            return tuple(shape), block.axes
        at, count = block.heads
        viewed = (*shape[:at], count, shape[at] // count, *shape[at + 1 :])
        axes = (*(axis + (axis > at) for axis in block.axes), at + 1)
        return viewed, tuple(sorted(axes))


@dataclasses.dataclass(frozen=True)
class Factors(Block):
    r"""Row and column means of matrices (the two `axes`), whose product approximates v (Adafactor).

    .. math:: R_i = \mathrm{mean}_j\, v_{ij}, \quad C_j = \mathrm{mean}_i\, v_{ij}, \quad
      v_{ij} \approx R_i C_j / \mathrm{mean}_i R_i

    The approximation has the row and column means of v, and is exact if v has rank one (Shazeer &
    Stern, 2018, arXiv 1804.04235, section 3). v_mean concatenates R and C along its last axis,
    after the leaf's other axes.

    Example:
      >>> Factors(axes=(1, 2)).mean_shape((12, 256, 512))
      (12, 768)
    """

    @property
    def parts(self) -> tuple[Block, ...]:
        """The block of R, and that of C."""
        one, other = self.axes
        return Block((other,)), Block((one,))

    def joined(self, means: Sequence[jax.Array]) -> jax.Array:
        """Concatenate R and C."""
        one, other = self.axes
        vectors = [
            jnp.moveaxis(mean.squeeze(averaged), kept, -1)
            for mean, averaged, kept in zip(means, (other, one), (one, other - 1), strict=True)
        ]
        rows, columns = vectors
        # no `concatenate`: on a mesh XLA would give the result R's sharding, and communicate
        # see also https://github.com/openxla/xla/issues/34710
        both = jnp.zeros((*rows.shape[:-1], rows.shape[-1] + columns.shape[-1]), rows.dtype)
        both = lax.dynamic_update_slice_in_dim(both, rows, 0, axis=-1)
        return lax.dynamic_update_slice_in_dim(both, columns, rows.shape[-1], axis=-1)

    @property
    def shapeless(self) -> "Block":
        """A representative, equal for all leaves with row and column means."""
        return Factors((0, 1))

    def operands(self, v: jax.Array, shape: tuple[int, ...]) -> PyTree:
        """Return R over its mean, and C, in the leaf's rank; NaN if an R is infinite or NaN."""
        one, other = self.fit(shape).axes
        # hide the offsets from XLA: it would give v the sharding of R and communicate, though v is
        # replicated (no upstream issue known)
        first, second = lax.optimization_barrier((jnp.int32(0), jnp.int32(shape[one])))
        rows = lax.dynamic_slice_in_dim(v, first, shape[one], axis=-1)
        columns = lax.dynamic_slice_in_dim(v, second, shape[other], axis=-1)
        share = self.share(rows, jnp.mean(rows, axis=-1, keepdims=True))
        kept = (share, one, other), (columns, other - 1, one)
        return tuple(jnp.expand_dims(jnp.moveaxis(x, -1, to), at) for x, to, at in kept)

    @staticmethod
    def share(rows: jax.Array, mean: jax.Array) -> jax.Array:
        """Return R over its mean: NaN if the mean is infinite or NaN, 0 if it is 0."""
        # R / inf would be 0, and the steps of the finite rows would be far too large
        mean = jnp.where(mean < jnp.inf, mean, mean - mean)  # NaN
        return rows / jnp.where(mean == 0, jnp.float32(1), mean)

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the shape as [outer, rows, between, columns], if columns are its last axis."""
        one, other = self.fit(shape).axes
        between = math.prod(shape[one + 1 : other])
        return math.prod(shape[:one]), shape[one], between, shape[other]

    def mean_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of R and C concatenated."""
        axes = self.fit(shape).axes
        others = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        return (*others, sum(shape[axis] for axis in axes))

    def mean(self, x: ArrayLike, in_parts: bool = True) -> jax.Array:
        """Return R and C of v, concatenated; see `Block.mean`."""
        fitted = self.fit(jnp.shape(x))
        return fitted.joined([part.mean(x, in_parts) for part in fitted.parts])

    def spread(self, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return R C over the mean of R for each element."""
        return self.of_elements(self.operands(v, shape), shape)

    def view(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Raise: rows and columns are two means; the `parts` have the views."""
        raise NotImplementedError("Factors have two means: use the views of their parts")


def _mean_along(x: jax.Array, axes: tuple[int, ...], in_parts: bool) -> jax.Array:
    """Average over axes, kept with size 1; in parts, over one axis after the other."""
    if in_parts or not axes:
        return functools.reduce(_mean_along_one, axes, x)
    length = math.prod(x.shape[axis] for axis in axes)
    return jnp.sum(x * jnp.float32(1 / length), axis=axes, keepdims=True)


def _mean_along_one(x: jax.Array, axis: int) -> jax.Array:
    """Average over one axis, kept with size 1; in two stages if there are few columns.

    XLA on a GPU materialises the elements of such columns before it sums them, unless in parts.
    The factor is applied before the sum, where it needs no kernel launch.
    """
    length = x.shape[axis]
    columns = axis < x.ndim - 1 and x.shape[-1] < _COLUMNS
    if columns and length % _PART == 0 and _PART < length:
        parts = x.reshape(*x.shape[:axis], length // _PART, _PART, *x.shape[axis + 1 :])
        x, length = jnp.sum(parts * jnp.float32(1 / _PART), axis=axis + 1), length // _PART
    return jnp.sum(x * jnp.float32(1 / length), axis=axis, keepdims=True)


def product(values: Sequence[jax.Array]) -> jax.Array:
    """Multiply the operands of a block's parts."""
    return functools.reduce(operator.mul, values)


class BlockStructure(Protocol):
    """Infers the blocks and embedding tables of a tree of parameters."""

    def infer(self, params: optax.Params) -> dict[str, Block]:
        """Return the block of each leaf, by path."""

    def embeddings(self, params: optax.Params) -> set[str]:
        """Return the paths of the embedding tables."""

    def warn(self, params: optax.Params) -> None:
        """Warn of leaves whose block is a guess."""


def is_int(number: object) -> bool:
    """Return whether a value is an int and not a bool."""
    return isinstance(number, int) and not isinstance(number, bool)
