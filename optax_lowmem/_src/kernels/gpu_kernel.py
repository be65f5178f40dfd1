"""Backend-independent GPU kernels, described by what one program of a grid loads and stores.

A body is a function (program, *operands, *results) that computes in jnp. Pallas lowers it through
Triton (`gpu_pallas`); if JAX lacks this lowering, its jaxpr is translated to Triton source and
called through jax_triton (`gpu_triton`).
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays.numerics import Approximations, Elementwise
from optax_lowmem._src.arrays.typing import PyTree, T

BACKENDS = ("pallas", "triton")  # first the one that needs only JAX


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
