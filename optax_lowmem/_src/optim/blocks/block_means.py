"""The mean of squares over each block of a leaf, the input of a block-wise second moment.

The choice of the implementation is made while tracing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import Block, Factors
from optax_lowmem._src.arrays.groups import MAX_ELEMENTS, next_power_of_two
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS

# ---- in plain jnp: the specification, and the path without a kernel ------------------------------


def mean_of_squares(
    block: Block, g: jax.Array, scale: jax.Array | None = None, in_parts: bool = True
) -> jax.Array:
    """Return the mean of (scale g)^2 over each block, f32, with shape `block.mean_shape`."""
    x = numerics.widen(g)
    return block.mean(jnp.square(x if scale is None else x * scale), in_parts)


# ---- the launches that sum a leaf's columns, one axis after the other, and their tiles -----------

_TILE = 8192  # elements of a program: 64 for each of 128 threads
_ROWS, _ROWS_OF_PARTS = 64, 256  # of a tile at least, where columns are many; of sums of parts


@dataclasses.dataclass(frozen=True)
class Columns:
    """An array [outer, rows, width] whose rows are summed in parts, one part per tile."""

    outer: int  # number of matrices
    rows: int  # averaged
    width: int  # number of columns; 1 if the averaged axis is contiguous
    begins: bool = True  # whether the input is the array itself, not sums of parts of its rows
    # for means of rows and columns, the length of a row, which divides the width; else None
    row: int | None = None

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile, a power of two: all of them if they fit in a tile."""
        narrow = _TILE // next_power_of_two(self.width)
        rows = next_power_of_two(self.rows)
        most = max(narrow, _ROWS if self.begins else _ROWS_OF_PARTS)
        return rows if rows <= most else max(narrow, _ROWS)

    @property
    def tile_width(self) -> int:
        """Number of columns of a tile, a power of two."""
        return max(1, min(_TILE // self.tile_rows, next_power_of_two(self.width)))

    @property
    def partial_sums(self) -> int:
        """Number of tiles along the rows of one matrix, each with a partial sum per column."""
        return -(-self.rows // self.tile_rows)

    @property
    def across(self) -> int:
        """Number of tiles side by side along a row."""
        return -(-self.width // self.tile_width)

    @property
    def tiles(self) -> int:
        return self.outer * self.partial_sums * self.across

    @property
    def even(self) -> bool:
        """Return whether all tiles are full: none extends past the last row or column."""
        return self.rows % self.tile_rows == 0 and self.width % self.tile_width == 0

    @property
    def left(self) -> "Sides | None":
        """The partial sums of rows and columns that this launch writes, if it computes both."""
        if self.row is None:
            return None
        between = self.width // self.row
        return Sides(
            self.outer * between, self.rows, self.row, self.across // between, self.partial_sums
        )

    @property
    def result(self) -> tuple[int, int]:
        """The shape of the sums that this launch writes."""
        left = self.left
        return (self.outer * self.partial_sums, self.width) if left is None else left.shape


@dataclasses.dataclass(frozen=True)
class Sides:
    """Partial sums of the rows of matrices, then those of their columns, which tiles add up."""

    matrices: int  # number of matrices, with [of_rows * rows + of_columns * columns] sums each
    rows: int  # of a matrix
    columns: int
    of_rows: int  # number of partial sums per row
    of_columns: int

    @property
    def partial_sums(self) -> int:
        """The largest number of partial sums per row or column."""
        return max(self.of_rows, self.of_columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices, self.of_rows * self.rows + self.of_columns * self.columns

    @property
    def tile_parts(self) -> int:
        """Number of partial sums that a tile adds up, a power of two."""
        parts = next_power_of_two(self.partial_sums)
        return parts if parts <= _ROWS_OF_PARTS else _ROWS

    @property
    def tile_width(self) -> int:
        """Number of rows, or columns, of a tile, a power of two."""
        return min(_TILE // self.tile_parts, next_power_of_two(max(self.rows, self.columns)))

    @property
    def left(self) -> "Sides":
        """The partial sums that this launch writes."""
        of_rows, of_columns = (-(-n // self.tile_parts) for n in (self.of_rows, self.of_columns))
        return dataclasses.replace(self, of_rows=of_rows, of_columns=of_columns)

    @property
    def result(self) -> tuple[int, int]:
        return self.left.shape

    @property
    def across(self) -> tuple[int, int]:
        """Numbers of tiles side by side, for rows and for columns."""
        return -(-self.rows // self.tile_width), -(-self.columns // self.tile_width)

    @property
    def tiles_of_rows(self) -> int:
        return self.left.of_rows * self.across[0]

    @property
    def tiles(self) -> int:
        return self.tiles_of_rows + self.left.of_columns * self.across[1]


def passes(block: Block, shape: tuple[int, ...]) -> list[Columns | Sides]:
    """Return the launches that compute the means over each block, axis by axis."""
    results: list[Columns | Sides] = []
    if isinstance(block, Factors):
        outer, rows, between, row = block.matrices(shape)
        first = Columns(outer, rows, between * row, row=row)
        results, sides = [first], first.left
        while sides is not None and sides.partial_sums > 1:
            results.append(sides)
            sides = sides.left
        return results
    viewed, axes = block.view(shape)
    sizes = list(viewed)
    for axis in axes:
        before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
        columns = Columns(before, sizes[axis], after)
        results.append(columns)
        while columns.partial_sums > 1:
            columns = Columns(before, columns.partial_sums, after, begins=False)
            results.append(columns)
        sizes[axis] = 1
    return results


def read_once(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether one launch can read a leaf for all means of its block.

    Rows must be contiguous, and no tile may contain parts of two rows.
    """
    if not isinstance(block, Factors):
        return True
    _, rows, between, row = block.matrices(shape)
    tile = Columns(1, rows, between * row).tile_width
    return block.fit(shape).axes[1] == len(shape) - 1 and (between == 1 or row % tile == 0)


def has_columns(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether a block averages over an axis other than the last, contiguous one."""
    axes = block.fit(shape).axes
    return bool(axes) and axes[0] < len(shape) - 1


# ---- the choice of the implementation ------------------------------------------------------------

_SMALL = 1 << 16  # elements, under which a launch takes longer than its bytes
_LEAVES, _ELEMENTS = 8, 1 << 26  # of a launch, at most: it needs all its gradients at once


def _backend_of(implementation: str | None) -> str | None:
    """Return the backend of an implementation of the step; None if it does not determine one."""
    return implementation if implementation in BACKENDS else None


# traced once for leaves of one shape
_by_xla = jax.jit(mean_of_squares, static_argnames=("block", "in_parts"))


def unsupported(block: Block, g: jax.Array, implementation: str | None = None) -> str | None:
    """Return the reason why XLA averages a leaf, or None if the kernel does."""
    reason = _no_kernel_reason(g, implementation)
    if reason is not None:
        return reason
    if block.elementwise or not g.size:
        return "there is nothing to average"
    if g.size > MAX_ELEMENTS:
        return f"{g.size} elements: more than 32-bit offsets reach"
    if g.size >= _SMALL and not has_columns(block, g.shape):
        return "its blocks are contiguous in memory, and XLA sums them in one launch"
    return None


def _no_kernel_reason(x: jax.Array, implementation: str | None) -> str | None:
    """Return the reason why GPU kernels process no array here, or None."""
    if implementation == "xla":  # the other names are of kernels of the step
        return "implementation='xla' was requested"
    reason = platform.no_gpu_reason() if implementation else platform.no_kernel_reason(x)
    return reason or platform.no_backend_reason(_backend_of(implementation))


def means_of_squares(
    blocks: Sequence[Block],
    gradients: Sequence[jax.Array],
    scale: jax.Array | None = None,
    implementation: str | None = None,
) -> list[jax.Array]:
    """Return `mean_of_squares` of each leaf; `implementation` None chooses the fastest."""
    if not gradients:
        return []
    fitted = [block.fit(g.shape) for block, g in zip(blocks, gradients, strict=True)]
    at_once = [
        read_once(block, g.shape) and unsupported(block, g, implementation) is None
        for block, g in zip(fitted, gradients, strict=True)
    ]
    units = [(b,) if once else b.parts for b, once in zip(fitted, at_once, strict=True)]
    pairs = [(part, g) for parts, g in zip(units, gradients, strict=True) for part in parts]
    means: dict[int, jax.Array] = {}
    chosen = [i for i, pair in enumerate(pairs) if unsupported(*pair, implementation) is None]
    for batch in _batches(pairs, chosen):
        backend = _backend_of(implementation) or platform.backend()
        result = _by_kernel([pairs[i] for i in batch], scale, implementation is None, backend)
        means.update(zip(batch, result, strict=True))
    for i, (block, g) in enumerate(pairs):
        if i not in means:  # a TPU's compiler sums whole columns as it reads them
            means[i] = _by_xla(block, g, scale, in_parts=not platform.may_be_tpu(g))
    ordered = iter([means[i] for i in range(len(pairs))])
    return [
        next(ordered) if once else block.joined([next(ordered) for _ in block.parts])
        for block, once in zip(fitted, at_once, strict=True)
    ]


def _batches(pairs: Sequence[tuple[Block, jax.Array]], indices: Sequence[int]) -> list[list[int]]:
    """Group equal leaves, for which one kernel is compiled, into launches."""
    alike: dict[Any, list[int]] = {}
    for i in indices:
        block, g = pairs[i]
        alike.setdefault((block, g.shape, g.dtype), []).append(i)
    done = []
    for (_, shape, _), leaves in alike.items():
        size = math.prod(shape)
        if len(leaves) == 1 and size < _SMALL:
            continue  # XLA has no more launches
        most = max(1, min(_LEAVES, _ELEMENTS // size))
        done += [leaves[i : i + most] for i in range(0, len(leaves), most)]
    return done


def _by_kernel(
    pairs: Sequence[tuple[Block, jax.Array]], scale: jax.Array | None, automatic: bool, backend: str
) -> list[jax.Array]:
    from optax_lowmem._src.optim.blocks import block_means_kernel

    factor = jnp.ones((), jnp.float32) if scale is None else scale
    gradients = [g for _, g in pairs]
    block = pairs[0][0]  # all blocks and shapes are equal

    def by_kernel(gradients: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
        shape = gradients[0].shape
        launches = passes(block, shape)
        means = block_means_kernel.means(launches, gradients, factor, backend=backend)
        return [mean.reshape(block.mean_shape(shape)) for mean in means]

    def plain(gradients: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
        return [_by_xla(block, g, factor) for g in gradients]

    if not automatic:
        return by_kernel(gradients, factor)
    return with_fallback("cuda", by_kernel, plain, gradients, factor)


# ---- the operands that a step reads, from the means ----------------------------------------------


def operands(
    blocks: Sequence[Block],
    values: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    implementation: str | None = None,
) -> list[PyTree]:
    """Return what the step reads of each leaf's v_mean (`Block.operands`), by a kernel if any."""
    results: dict[int, PyTree] = {}
    alike: dict[Any, list[int]] = {}
    for i, (block, v, shape) in enumerate(zip(blocks, values, shapes, strict=True)):
        if _has_factors_kernel(block, shape) and _no_kernel_reason(v, implementation) is None:
            alike.setdefault((block, shape), []).append(i)
        else:
            results[i] = block.operands(v, shape)
    for (block, shape), leaves in alike.items():
        for first in range(0, len(leaves), _LEAVES):
            batch = leaves[first : first + _LEAVES]
            of_batch = [values[i] for i in batch]
            factors = _factors_by_kernel(block, shape, of_batch, implementation)
            results.update(zip(batch, factors, strict=True))
    return [results[i] for i in range(len(values))]


def _has_factors_kernel(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel computes `operands`: each program reads all of a matrix's R."""
    if not isinstance(block, Factors) or not math.prod(shape):
        return False
    one, other = block.fit(shape).axes
    return other == len(shape) - 1 and shape[one] <= _TILE


def _factors_by_kernel(
    block: Factors, shape: tuple[int, ...], values: Sequence[jax.Array], implementation: str | None
) -> list[tuple[jax.Array, ...]]:
    from optax_lowmem._src.optim.blocks import block_means_kernel

    backend = _backend_of(implementation) or platform.backend()

    def by_kernel(values: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return block_means_kernel.factors(block, shape, values, backend)

    def plain(values: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [block.operands(v, shape) for v in values]

    if implementation is not None:
        return by_kernel(values)
    return with_fallback("cuda", by_kernel, plain, list(values))
