"""Backend-independent GPU kernels, described by what one program of a grid loads and stores.

A body is a function (program, *operands, *results) that computes in jnp. Pallas lowers it through
Triton (`gpu_pallas`); if JAX lacks this lowering, its jaxpr is translated to Triton source and
called through jax_triton (`gpu_triton`). A body of groups loads and stores tiles (`Place`).
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import groups, random
from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.groups import Tiling
from optax_lowmem._src.arrays.numerics import Approximations, Elementwise
from optax_lowmem._src.arrays.typing import PyTree, T

BACKENDS = ("pallas", "triton")  # first the one that needs only JAX
VECTOR = 8  # neighbours that a thread loads at once


class Range(NamedTuple):
    """A range of indices along an axis of an array."""

    # the first index; or an array of them, which gives the result one more axis
    start: jax.Array | int
    size: int  # the number of indices, a power of two
    # most neighbours that a thread loads at once, so that threads hold the same elements of arrays
    # of different dtypes
    vector: int | None = None

    def indices(self) -> jax.Array:
        """Return the indices, with the shape of `start` and one more axis."""
        start = jnp.asarray(self.start, jnp.int32)
        shape = (*start.shape, self.size)
        starts = lax.broadcast_in_dim(start, shape, range(start.ndim))
        return starts + lax.broadcasted_iota(jnp.int32, shape, start.ndim)


Index = jax.Array | int | Range


class Operand(abc.ABC):
    """An array in the GPU's memory.

    It is indexed by `Range`s, each of which gives the result an axis, and integers; or by arrays of
    one shape.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype

    @abc.abstractmethod
    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        """Load elements by one index per axis: `other` where `mask` is False.

        `early` loads before the operations that follow. Otherwise the assembler moves loads down to
        their use, which exposes their latency. Not for data that many programs read: each load
        would go to the same place of the L2 cache.
        """

    @abc.abstractmethod
    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        """Store elements; see `load`."""


class Program(abc.ABC):
    """One program of a kernel's grid, with the arithmetic of its backend, if any."""

    approximations: Approximations | None

    @abc.abstractmethod
    def index(self, axis: int = 0) -> jax.Array:
        """Return the program's index along an axis of the grid, int32."""

    @abc.abstractmethod
    def with_one(
        self,
        position: jax.Array,
        starts: Sequence[int],
        choose: Callable[[int, Sequence[int]], T],
        run: Callable[[T], None],
    ) -> None:
        """Run run(choose(i, shared)) for the last i for which starts[i] <= position.

        The numbers `starts` ascend from 0. `choose` takes i and the choices that share the code of
        `run`, loads nothing, and returns a pytree of integers, arrays and operands, which differs
        between choices that share code only in values, and in the number of rows of operands.
        """

    @abc.abstractmethod
    def keep_early(self) -> None:
        """Issue all preceding `early` loads before any later load.

        Otherwise the assembler may move loads below arithmetic to save registers, if there are
        many. Arithmetic that does not depend on later loads may still move. Threads wait for each
        other to issue their loads, not for the data.
        """


Body = Callable[..., None]


def approximations(instruction: Callable[[str], Elementwise]) -> Approximations:
    """Return the arithmetic of a backend that has functions of PTX instructions of one f32 operand.

    The reciprocal is 0 above 2^126. A compiled division takes eight instructions, a logarithm six,
    a power of two four.
    """
    return Approximations(
        reciprocal=instruction("rcp.approx.ftz.f32"),
        log2=instruction("lg2.approx.ftz.f32"),
        exp2=instruction("ex2.approx.ftz.f32"),
    )


def bisect(
    starts: Sequence[int], position: jax.Array, branch: Callable[[int], T], first: int = 0
) -> T:
    """Return branch(first + i) for the last i for which starts[i] <= position.

    (The Triton lowering of a `switch` tests one case after another.)
    """
    half = len(starts) // 2
    if half == 0:
        return branch(first)
    return lax.cond(
        position < jnp.int32(starts[half]),
        lambda: bisect(starts[:half], position, branch, first),
        lambda: bisect(starts[half:], position, branch, first + half),
    )


def launch(
    body: Body,
    operands: PyTree,
    results: PyTree,
    grid: tuple[int, ...],
    *,
    warps: int,
    name: str,
    backend: str = "pallas",
    in_place: Mapping[int, int] | None = None,
) -> PyTree:
    """Run the programs of a grid, and return the arrays that they store to, each element once.

    `body` is a function of (program, *operands, *results), which may be pytrees; `results` are
    shapes and dtypes. A program has `warps` of 32 threads. `backend` is one of `BACKENDS`, or
    `interpret`: by Pallas as plain JAX, on any device. `in_place` maps the index of an operand's
    array to that of the result's array that overwrites it.
    """
    (read, structure), (written, structure2) = map(jax.tree.flatten, (operands, results))

    def flat_body(program: Program, *arrays: Operand) -> None:
        given = jax.tree.unflatten(structure, arrays[: len(read)])
        body(program, *given, *jax.tree.unflatten(structure2, arrays[len(read) :]))

    how = flat_body, read, written, grid, warps, name, dict(in_place or {})
    if backend == "triton":
        from optax_lowmem._src.kernels import gpu_triton

        outputs = gpu_triton.launch(*how)
    else:
        from optax_lowmem._src.kernels import gpu_pallas

        outputs = gpu_pallas.launch(*how, interpret=backend == "interpret")
    return list(jax.tree.unflatten(structure2, outputs))


# ---- tiles: loads and stores of groups, by `groups.Tiling` ---------------------------------------


class Form(NamedTuple):
    """The static properties of a tile, on which a kernel's code depends."""

    rows: int
    lanes: int
    vector: int  # most neighbours that a thread loads at once
    flat: bool  # whether all groups are full, so that the array is [groups, lanes]
    alignment: int  # a divisor of the offsets and sizes of all groups
    masked: bool  # whether elements of the last tile are missing

    @classmethod
    def of(cls, tilings: Sequence[Tiling], codes_per_byte: int = 1) -> "Form":
        """Return the form of the tiles of several arrays, all or none of which are flat."""
        tilings = [tiling.of_bytes(codes_per_byte) for tiling in tilings]
        rows, lanes = tilings[0].rows, tilings[0].lanes
        flat = all(tiling.flat for tiling in tilings)
        lengths = [n for tiling in tilings for n in (tiling.shape[-1], tiling.group_size)]
        partial = any(tiling.groups % tiling.rows for tiling in tilings)
        vector = min(VECTOR // codes_per_byte, lanes)
        return cls(rows, lanes, vector, flat, math.gcd(VECTOR, *lengths), partial or not flat)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "count", "begin", "size"],
    meta_fields=["form"],
)
@dataclasses.dataclass(frozen=True)
class Place:
    """The elements of a tile, with one group per row, in a view of an array.

    The view is [groups, lanes] if the form is flat, else 1-d; see `Tiling.element_view`.
    """

    form: Form
    first: jax.Array  # index of its first group
    count: jax.Array  # number of groups in the array
    # [rows] offset of each group in units of `form.alignment`; None if the form is flat
    begin: jax.Array | None
    # [rows] number of its elements in these units; 0 beyond the end of the array
    size: jax.Array | None

    @classmethod
    def of(
        cls, tiling: Tiling, tile: jax.Array, codes_per_byte: int = 1, shared: Sequence[Tiling] = ()
    ) -> "Place":
        """Return the place of a tile, by its number.

        `shared` are the tilings of all arrays whose tiles have the same code. With several codes
        per byte, `tiling` is of the values, and the place is in the packed codes.
        """
        form, tiling = Form.of(shared or [tiling], codes_per_byte), tiling.of_bytes(codes_per_byte)
        first, count = tile * jnp.int32(tiling.rows), jnp.int32(tiling.groups)
        if form.flat:
            return cls(form, first, count, None, None)
        group = first + lax.iota(jnp.int32, tiling.rows)
        units, length = (n // form.alignment for n in (tiling.group_size, tiling.shape[-1]))
        per_row = jnp.int32(groups.group_count(length, units))
        column = lax.rem(group, per_row) * jnp.int32(units)
        begin = lax.div(group, per_row) * jnp.int32(length) + column
        size = jnp.minimum(jnp.int32(length) - column, jnp.int32(units))
        return cls(form, first, count, begin, jnp.where(group < count, size, 0))

    @property
    def row_mask(self) -> jax.Array | None:
        """A mask of the groups that exist, or None if all do."""
        if not self.form.masked:
            return None
        return self.first + lax.iota(jnp.int32, self.form.rows) < self.count

    @property
    def elements(self) -> tuple[tuple[Index, ...], jax.Array | None]:
        """The index of the elements, and a mask of those that exist."""
        rows, lanes, vector = self.form[:3]
        if self.begin is None or self.size is None:
            mask = self.row_mask
            whole = None if mask is None else jnp.broadcast_to(mask[:, None], (rows, lanes))
            return (Range(self.first, rows), Range(0, lanes, vector)), whole
        unit, lane = (
            jnp.int32(self.form.alignment),
            lax.broadcasted_iota(jnp.int32, (rows, lanes), 1),
        )
        mask = lane < jnp.broadcast_to((self.size * unit)[:, None], (rows, lanes))
        return (Range(self.begin * unit, lanes, vector),), mask

    def load(self, x: Operand, other: int = 0) -> jax.Array:
        """Load the elements; `other` where there are none."""
        where, mask = self.elements
        return x.load(*where, mask=mask, other=other, early=True)

    def store(self, x: Operand, values: jax.Array) -> None:
        """Store the elements."""
        where, mask = self.elements
        x.store(*where, values=values, mask=mask)

    def load_scales(self, x: Operand) -> jax.Array:
        """Load the scales of the groups, [rows]; 0 where there are none."""
        return x.load(Range(self.first, self.form.rows), mask=self.row_mask)

    def load_of_block(self, x: Operand, numbers: jax.Array) -> jax.Array:
        """Load a value per group or element, by `block_numbers`; 1 where there are none."""
        mask = self.row_mask
        if numbers.shape[1] > 1:
            mask = self.elements[1]
        elif mask is not None:
            mask = mask[:, None]
        return x.load(numbers, mask=mask, other=1)

    def store_scales(self, x: Operand, values: jax.Array) -> None:
        """Store the scales of the groups."""
        x.store(Range(self.first, self.form.rows), values=values, mask=self.row_mask)


def _coordinates(tiling: Tiling, tile: jax.Array) -> list[jax.Array]:
    """Return the coordinates of a tile's groups, [rows] per axis; the last one counts groups."""
    axes = groups.scale_shape(tiling.shape, tiling.group_size)
    rest = tile * jnp.int32(tiling.rows) + lax.iota(jnp.int32, tiling.rows)
    coordinates = []
    for size in reversed(axes[1:]):
        coordinates.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    return [rest, *reversed(coordinates)]


def counters(tiling: Tiling, tile: jax.Array) -> jax.Array:
    """Return the counters from which a tile's groups draw R, uint32 [rows]; see `random.mix`."""
    coordinates = [index.astype(jnp.uint32) for index in _coordinates(tiling, tile)]
    return random.counter(jnp.uint32(0), coordinates)


def part(x: Operand, *axes: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the index of a part, from indices along each axis, and a mask of those that exist.

    The index has arrays, since JAX rejects slices that leave an array even if they are masked.
    """
    shape = tuple(axis.size for axis in axes)
    grid = tuple(lax.broadcast_in_dim(axis, shape, (d,)) for d, axis in enumerate(axes))
    inside = [index < size for index, size in zip(grid, x.shape, strict=True)]
    return grid, functools.reduce(jnp.logical_and, inside)


def within_groups(tiling: Tiling, block: Block) -> bool:
    """Return whether elements of one group belong to several blocks of a part of a block."""
    count = block.mean_shape(tiling.shape)[-1]
    return count > 1 and tiling.shape[-1] // count % tiling.group_size != 0


def block_numbers(tiling: Tiling, block: Block, tile: jax.Array) -> jax.Array:
    """Return the number of each group's block, [rows, 1], or of each element's, [rows, lanes].

    `block` is one of the parts of the leaf's block.
    """
    values, size = block.mean_shape(tiling.shape), tiling.group_size
    positions = [index[:, None] for index in _coordinates(tiling, tile)]
    # number of neighbours along each axis that share a value
    widths = [length // count for length, count in zip(tiling.shape, values, strict=True)]
    if within_groups(tiling, block):
        lane = lax.broadcasted_iota(jnp.int32, tiling.tile_shape, 1)
        positions[-1] = positions[-1] * jnp.int32(size) + lane
    else:
        widths[-1] = max(1, widths[-1] // size)
    index, stride = jnp.zeros((tiling.rows, 1), jnp.int32), 1
    for position, width, count in reversed(list(zip(positions, widths, values, strict=True))):
        if count > 1:
            along = position if width == 1 else lax.div(position, jnp.int32(width))
            index = index + along * jnp.int32(stride)
            stride *= count
    return index
