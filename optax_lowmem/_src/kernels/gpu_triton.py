"""GPU kernels as generated Triton source, called through jax_triton.

A body is traced with `_Traced` arrays, whose loads and stores are primitives that `jaxpr_to_triton`
translates to calls of `triton_library`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.groups import result_like
from optax_lowmem._src.kernels import jax_triton_call, jaxpr_to_triton, platform
from optax_lowmem._src.kernels.gpu_kernel import Body, Index, Operand, Program, Run

# ---- tracing -------------------------------------------------------------------------------------

_load = jex.core.Primitive("load_tile")
_load.def_abstract_eval(lambda at, *_, dtype, **__: jax.core.ShapedArray(at.shape, dtype))
# has a result, so that no store is dropped from a jaxpr
_store = jex.core.Primitive("store_tile")
_store.def_abstract_eval(lambda *_, **__: jax.core.ShapedArray((), jnp.int32))
_barrier = jex.core.Primitive("barrier")  # has a result, as `_store`
_barrier.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.int32))
_program = jex.core.Primitive("program_id")
_program.def_abstract_eval(lambda *, axis: jax.core.ShapedArray((), jnp.int32))


class _Traced(Operand):
    """An array, or one of several with equal shapes and dtypes, by the names of their pointers.

    Attributes:
      names: names of the pointers.
      number: index of the array among them; None if there is only one.
      stored: results of all stores.
    """

    def __init__(
        self,
        like: Any,
        names: tuple[str, ...],
        stored: list[jax.Array],
        number: jax.Array | None = None,
    ) -> None:
        self.shape, self.dtype = like.shape, like.dtype
        self.names, self.number, self.stored = names, number, stored

    @property
    def _which(self) -> list[jax.Array]:
        return [] if self.number is None else [self.number]

    def _offsets(self, index: tuple[Index, ...]) -> jax.Array:
        """Return the offset of each element in memory, int32."""
        spans = [i.size for i in index if isinstance(i, Run)]
        stride, offsets, axis = 1, jnp.int32(0), len(spans)
        for size, place in reversed(list(zip(self.shape, index, strict=True))):
            if isinstance(place, Run):
                axis -= 1
                along = place.start + lax.iota(jnp.int32, place.size)
                place = lax.broadcast_in_dim(along, spans, (axis,))
            term = jnp.asarray(place, jnp.int32) * jnp.int32(stride)
            shape = np.broadcast_shapes(offsets.shape, term.shape)
            offsets = jnp.broadcast_to(offsets, shape) + jnp.broadcast_to(term, shape)
            stride *= size
        return offsets

    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        """Load elements."""
        at = self._offsets(index)
        masks = [] if mask is None else [jnp.broadcast_to(mask, at.shape)]
        return _load.bind(
            at, *masks, *self._which, names=self.names, masked=mask is not None, other=other,
            early=early, dtype=jnp.dtype(self.dtype),
        )  # fmt: skip

    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        """Store elements."""
        at = self._offsets(index)
        if values.dtype != self.dtype:
            raise TypeError(f"a kernel stores {values.dtype} in an array of {self.dtype}")
        masks = [] if mask is None else [jnp.broadcast_to(mask, at.shape)]
        values = jnp.broadcast_to(values, at.shape)
        done = _store.bind(
            at, values, *masks, *self._which, names=self.names, masked=mask is not None
        )
        self.stored.append(done)


class _TracedProgram(Program):
    def __init__(self, stored: list[jax.Array]) -> None:
        self.stored = stored

    def index(self, axis: int = 0) -> jax.Array:
        return _program.bind(axis=axis)

    def with_one(
        self,
        number: jax.Array,
        choices: Sequence[tuple[Operand, ...]],
        branch: Callable[..., None],
    ) -> None:
        columns: Any = zip(*choices, strict=True)
        branch(*(
            _Traced(column[0], tuple(x.names[0] for x in column), column[0].stored, number)
            for column in columns
        ))  # fmt: skip

    def keep_early(self) -> None:
        """Add a barrier, which no load is moved across."""
        self.stored.append(_barrier.bind())


def traced(body: Body, names: Sequence[str], arrays: Sequence[Any]) -> Any:
    """Return the closed jaxpr of a program that loads from and stores to arrays.

    Args:
      body: the function of the program.
      names: names of the arrays' pointers.
      arrays: the arrays, or their shapes and dtypes.
    """

    def run() -> list[jax.Array]:
        stored: list[jax.Array] = []
        rows = zip(arrays, names, strict=True)
        body(_TracedProgram(stored), *(_Traced(like, (name,), stored) for like, name in rows))
        return stored

    return jax.make_jaxpr(run)()


# ---- source --------------------------------------------------------------------------------------


def _pointer(op: jaxpr_to_triton.Operation, number: str | None) -> str:
    names = op.params["names"]
    if len(names) == 1:
        return names[0]
    return f"pick(({', '.join(names)}), {number}, 0, {len(names)})"


def _parts(op: jaxpr_to_triton.Operation, given: int) -> tuple[list[str], str, str]:
    """Return the first operands, the mask (a placeholder if there is none) and the pointer."""
    first, rest = op.operands[:given], list(op.operands[given:])
    mask = rest.pop(0) if op.params["masked"] else first[0]
    return list(first), mask, _pointer(op, *rest or (None,))


def _write_load(op: jaxpr_to_triton.Operation) -> str:
    (at,), mask, pointer = _parts(op, 1)
    params = op.params
    return (
        f"load({pointer}, {at}, {mask}, {params['other']}, {params['masked']}, {params['early']})"
    )


def _write_store(op: jaxpr_to_triton.Operation) -> str:
    (at, values), mask, pointer = _parts(op, 2)
    return f"store({pointer}, {at}, {values}, {mask}, {op.params['masked']})"


jaxpr_to_triton.FORMS.update({
    "load_tile": _write_load,
    "store_tile": _write_store,
    "barrier": lambda op: "tl.debug_barrier()",
    "program_id": lambda op: f"tl.program_id({op.params['axis']})",
})  # fmt: skip


def missing(body: Body, arrays: Sequence[Any]) -> str | None:
    """Return an operation of a program that has no translation to Triton, or None."""
    return jaxpr_to_triton.missing(traced(body, [f"x{i}" for i in range(len(arrays))], arrays))


def source(body: Body, name: str, names: Sequence[str], arrays: Sequence[Any]) -> str:
    """Return the source of a kernel.

    Args:
      body: the function of a program.
      name: name of the kernel.
      names: names of its pointers.
      arrays: the arrays that they point to, or their shapes and dtypes.

    Raises:
      NotImplementedError: for an operation without a translation to Triton; see `missing`.
    """
    jaxpr = traced(body, names, arrays)
    lacking = jaxpr_to_triton.missing(jaxpr)
    if lacking is not None:
        raise NotImplementedError(f"the kernel {name} uses {lacking}, not translatable to Triton")
    fp8 = platform.has_fp8_conversions()
    return jaxpr_to_triton.kernel(jaxpr, name, names, fp8)


@functools.cache
def _compiled(text: str, name: str) -> Any:
    """Return the `triton.jit` function of a source, cached for equal launches."""
    from optax_lowmem._src.kernels import triton_library

    return triton_library.compiled_from(text, name)


# ---- calls ---------------------------------------------------------------------------------------


def _as_held(x: Any) -> Any:
    """View an FP8 array, or its type, as bytes: not every GPU's Triton supports FP8 dtypes."""
    if not numerics.is_narrow(x.dtype) or x.dtype.itemsize > 1:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return result_like(x, dtype=jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8)


def launch(
    body: Body,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    name: str,
) -> list[jax.Array]:
    """`gpu_kernel.launch` through jax_triton."""
    names = [f"x{i}" for i in range(len(operands))]

    def kernel(parameters: tuple[str, ...], _: tuple[str, ...]) -> Any:
        return _compiled(source(body, name, parameters, [*operands, *results]), name)

    result = jax_triton_call.call(
        kernel,
        names,
        [_as_held(x) for x in operands],
        [_as_held(x) for x in results],
        grid=grid,
        num_warps=warps,
        num_stages=1,
        name=name,
    )
    return [
        x if x.dtype == like.dtype else lax.bitcast_convert_type(x, like.dtype)
        for x, like in zip(result, results, strict=True)
    ]
