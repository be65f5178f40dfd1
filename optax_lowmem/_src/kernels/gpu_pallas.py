"""GPU kernels through Pallas and its Triton lowering."""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.typing import T
from optax_lowmem._src.kernels.gpu_kernel import (
    Body,
    Index,
    Operand,
    Program,
    Range,
    approximations,
    bisect,
)

_OF_TRITON = "jaxlib.mlir.dialects.tt"


@functools.cache
def spare_imports() -> None:
    """Register an empty module as MLIR's Python bindings of Triton's dialect, if there are none.

    Otherwise MLIR searches all of `sys.path` for this module at each operation that it creates,
    since it does not cache the failure: half of the time that lowering a kernel takes.
    """
    package = _OF_TRITON.rpartition(".")[0]
    if importlib.util.find_spec(package) and importlib.util.find_spec(_OF_TRITON) is None:
        sys.modules[_OF_TRITON] = types.ModuleType(_OF_TRITON, spare_imports.__doc__)


class Reference(Operand):
    """A reference inside a Pallas kernel."""

    def __init__(self, ref: Any) -> None:
        self.ref, self.shape, self.dtype = ref, ref.shape, ref.dtype

    def _at(self, index: tuple[Index, ...]) -> Any:
        at: list[Any] = list(index)
        for axis, i in enumerate(index):
            if isinstance(i, Range):
                at[axis] = i.indices() if jnp.ndim(i.start) else pl.ds(i.start, i.size)
        return self.ref.at[tuple(at)]

    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        """Load elements; `early` loads are volatile, so that none is moved down to its use."""
        if mask is None and not early and all(isinstance(i, int) for i in index):
            return self.ref[index]
        # Pallas' Triton lowering cannot convert integers to FP8 (no upstream issue known; jax
        # 0.10.2 and 0.12.0)
        other = float(other) if jnp.issubdtype(self.dtype, jnp.floating) else other
        nothing = None if mask is None else other
        return plgpu.load(self._at(index), mask=mask, other=nothing, volatile=early)

    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        plgpu.store(self._at(index), values, mask=mask)


def _instruction(name: str) -> numerics.Elementwise:
    """Return a function that applies a PTX instruction to one f32 operand."""

    def apply(x: jax.Array) -> jax.Array:
        (result,) = plgpu.elementwise_inline_asm(
            f"{name} $0, $1;",
            args=[x],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return result

    return apply


APPROXIMATIONS = approximations(_instruction)


class _PallasProgram(Program):
    def __init__(self, interpret: bool) -> None:
        # interpreted, the exact expressions of the reference
        self.approximations = None if interpret else APPROXIMATIONS

    def index(self, axis: int = 0) -> jax.Array:
        return pl.program_id(axis)

    def with_one(
        self,
        position: jax.Array,
        starts: Sequence[int],
        choose: Callable[[int, Sequence[int]], T],
        run: Callable[[T], None],
    ) -> None:
        # the whole code in each branch, since results of branches would be packed and unpacked
        bisect(starts, position, lambda i: run(choose(i, [i])))

    def keep_early(self) -> None:
        """Do nothing: XLA lets the assembler use registers for it (`.minnctapersm 1`)."""


def launch(
    body: Body,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    name: str,
    in_place: dict[int, int],
    interpret: bool = False,
) -> list[jax.Array]:
    """`gpu_kernel.launch` through Pallas."""
    spare_imports()

    def kernel(*refs: Any) -> None:
        body(_PallasProgram(interpret), *map(Reference, refs))

    return pl.pallas_call(
        kernel,
        out_shape=list(results),
        grid=grid,
        input_output_aliases=in_place,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
