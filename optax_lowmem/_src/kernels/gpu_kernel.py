"""GPU kernels described once, for several backends: what one program of a grid loads and stores.

A body is a function (program, *operands and results). What it computes is jnp. Pallas lowers it
through Triton (`gpu_pallas`); where JAX no longer does, its jaxpr is written as Triton source and
called through jax_triton (`gpu_triton`).
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

BACKENDS = ("pallas", "triton")  # the one that needs nothing beside JAX first


class Run(NamedTuple):
    """Neighbours along an axis of an array.

    Attributes:
      start: index of the first.
      size: how many, a power of two.
    """

    start: jax.Array | int
    size: int


Index = jax.Array | int | Run


class Operand(abc.ABC):
    """An array in the GPU's memory.

    An index is of `Run`s, each an axis of the result, and integers; or of arrays of one shape.

    Attributes:
      shape: of the array.
      dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: Any

    @abc.abstractmethod
    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        """Return elements.

        Args:
          *index: which, one index an axis.
          mask: of those that exist; None where all do.
          other: what stands in for those that do not.
          early: load before what follows. The assembler else moves loads down to their use, and
            their latency shows. Not for what many programs read, which each time would come from
            the same place of the L2 cache.
        """

    @abc.abstractmethod
    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        """Write elements; see `load`."""


class Program(abc.ABC):
    """One program of a grid."""

    @abc.abstractmethod
    def index(self, axis: int = 0) -> jax.Array:
        """Return the program's place along an axis of the grid, int32."""

    @abc.abstractmethod
    def with_one(
        self,
        number: jax.Array,
        choices: Sequence[tuple[Operand, ...]],
        branch: Callable[..., None],
    ) -> None:
        """Run branch(*choices[number]), of choices alike in shapes and dtypes."""

    @abc.abstractmethod
    def keep_early(self) -> None:
        """Have all that was loaded `early` on its way before what is loaded from here on.

        The assembler else may move loads below arithmetic, for fewer registers, where they are
        many. Arithmetic that needs nothing of what is loaded from here on stays free to move. All
        threads wait for each other to have begun to load, not for what they load.
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
    """Return what the programs of a grid store.

    Args:
      body: of a program: (program, *operands, *results).
      operands: arrays that it loads of.
      results: of those that it stores to; each element is stored once.
      grid: programs along each axis.
      warps: warps, of 32 threads, of a program.
      name: of the kernel.
      backend: of `BACKENDS`; or `interpret`: by Pallas as plain JAX, on any device.
    """
    if backend != "triton":
        from optax_lowmem._src.kernels import gpu_pallas

        interpret = backend == "interpret"
        return gpu_pallas.launch(body, operands, results, grid, warps, name, interpret)
    from optax_lowmem._src.kernels import gpu_triton

    return gpu_triton.launch(body, operands, results, grid, warps, name)
