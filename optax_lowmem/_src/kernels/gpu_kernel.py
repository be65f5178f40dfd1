"""Backend-independent GPU kernels, described by what one program of a grid loads and stores.

A body is a function (program, *operands, *results) that computes in jnp. Pallas lowers it through
Triton (`gpu_pallas`); if JAX lacks this lowering, its jaxpr is translated to Triton source and
called through jax_triton (`gpu_triton`).
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

BACKENDS = ("pallas", "triton")  # first the one that needs only JAX


class Run(NamedTuple):
    """A range of indices along an axis of an array.

    Attributes:
      start: the first index.
      size: the number of indices, a power of two.
    """

    start: jax.Array | int
    size: int


Index = jax.Array | int | Run


class Operand(abc.ABC):
    """An array in the GPU's memory.

    It is indexed by `Run`s, each of which gives the result an axis, and integers; or by arrays of
    one shape.

    Attributes:
      shape: shape of the array.
      dtype: dtype of its elements.
    """

    shape: tuple[int, ...]
    dtype: Any

    @abc.abstractmethod
    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        """Load elements.

        Args:
          *index: one index per axis.
          mask: which elements exist; None if all do.
          other: value of elements that do not exist.
          early: load before the operations that follow. Otherwise the assembler moves loads down to
            their use, which exposes their latency. Not for data that many programs read: each load
            would go to the same place of the L2 cache.
        """

    @abc.abstractmethod
    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        """Store elements; see `load`."""


class Program(abc.ABC):
    """One program of a kernel's grid."""

    @abc.abstractmethod
    def index(self, axis: int = 0) -> jax.Array:
        """Return the program's index along an axis of the grid, int32."""

    @abc.abstractmethod
    def with_one(
        self,
        number: jax.Array,
        choices: Sequence[tuple[Operand, ...]],
        branch: Callable[..., None],
    ) -> None:
        """Run branch(*choices[number]); all choices have equal shapes and dtypes."""

    @abc.abstractmethod
    def keep_early(self) -> None:
        """Issue all preceding `early` loads before any later load.

        Otherwise the assembler may move loads below arithmetic to save registers, if there are
        many. Arithmetic that does not depend on later loads may still move. Threads wait for each
        other to issue their loads, not for the data.
        """


Body = Callable[..., None]


def launch(
    body: Body,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    warps: int,
    name: str,
    backend: str = "pallas",
) -> list[jax.Array]:
    """Run the programs of a grid, and return the arrays that they store to.

    Args:
      body: the function of one program: (program, *operands, *results).
      operands: arrays that it loads from.
      results: shapes and dtypes of the arrays that it stores to; each element is stored once.
      grid: number of programs along each axis.
      warps: number of warps, of 32 threads, per program.
      name: name of the kernel.
      backend: one of `BACKENDS`; or `interpret`: by Pallas as plain JAX, on any device.
    """
    if backend != "triton":
        from optax_lowmem._src.kernels import gpu_pallas

        interpret = backend == "interpret"
        return gpu_pallas.launch(body, operands, results, grid, warps, name, interpret)
    from optax_lowmem._src.kernels import gpu_triton

    return gpu_triton.launch(body, operands, results, grid, warps, name)
