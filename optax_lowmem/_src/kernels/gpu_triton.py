"""GPU kernels as generated Triton source, called through jax_triton.

A body is traced with `_Traced` arrays, whose loads and stores are primitives that `jaxpr_to_triton`
translates to calls of `triton_library`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from optax_lowmem._src.arrays import numerics, varying
from optax_lowmem._src.arrays.typing import Shaped, T
from optax_lowmem._src.kernels import jaxpr_to_triton, platform
from optax_lowmem._src.kernels.gpu_kernel import Body, Index, Operand, Program, Range, bisect

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
    """An array in the GPU's memory: a scalar that stands for its pointer, and what is stored."""

    def __init__(self, like: Shaped | Operand, pointer: jax.Array, stored: list[jax.Array]) -> None:
        self.shape, self.dtype = like.shape, like.dtype
        self.pointer, self.stored = pointer, stored

    def _offsets(self, index: tuple[Index, ...]) -> jax.Array:
        """Return the offset of each element in memory, int32."""
        ranges = {axis: i.indices() for axis, i in enumerate(index) if isinstance(i, Range)}
        spans = [size for along in ranges.values() for size in along.shape]
        stride, offsets, last = 1, jnp.int32(0), len(spans)
        for axis, size in reversed(list(enumerate(self.shape))):
            if axis in ranges:
                dims = range(last - ranges[axis].ndim, last)
                term, last = lax.broadcast_in_dim(ranges[axis], spans, dims), dims.start
            else:
                term = jnp.asarray(index[axis], jnp.int32)
            term = term * jnp.int32(stride) if stride > 1 else term
            shape = np.broadcast_shapes(offsets.shape, term.shape)
            offsets = jnp.broadcast_to(offsets, shape) + jnp.broadcast_to(term, shape)
            stride *= size
        return offsets

    def load(
        self, *index: Index, mask: jax.Array | None = None, other: float = 0, early: bool = False
    ) -> jax.Array:
        at = self._offsets(index)
        masks = [] if mask is None else [jnp.broadcast_to(mask, at.shape)]
        return _load.bind(
            at, self.pointer, *masks, other=other, early=early, vector=_vector(index),
            dtype=jnp.dtype(self.dtype),
        )  # fmt: skip

    def store(self, *index: Index, values: jax.Array, mask: jax.Array | None = None) -> None:
        at = self._offsets(index)
        if values.dtype != self.dtype:
            raise TypeError(f"a kernel stores {values.dtype} in an array of {self.dtype}")
        masks = [] if mask is None else [jnp.broadcast_to(mask, at.shape)]
        values = jnp.broadcast_to(values, at.shape)
        self.stored.append(_store.bind(at, self.pointer, values, *masks, vector=_vector(index)))


def _vector(index: tuple[Index, ...]) -> int | None:
    """Return the vector of the last index, if it is a `Range`."""
    return index[-1].vector if isinstance(index[-1], Range) else None


class _TracedProgram(Program):
    """A program that is traced to a jaxpr; `stored` keeps its stores and barriers in it."""

    approximations = jaxpr_to_triton.APPROXIMATIONS

    def __init__(self, stored: list[jax.Array]) -> None:
        self.stored = stored

    def index(self, axis: int = 0) -> jax.Array:
        return _program.bind(axis=axis)

    def with_one(
        self,
        position: jax.Array,
        starts: Sequence[int],
        choose: Callable[[int, Sequence[int]], T],
        run: Callable[[T], None],
    ) -> None:
        every, chosen = range(len(starts)), []

        def values(i: int) -> Any:
            chosen.append(choose(i, every))
            return jax.tree.map(
                lambda x: x.pointer if isinstance(x, _Traced) else jnp.asarray(x), chosen[-1]
            )

        arrays = bisect(starts, position, values)
        run(
            jax.tree.map(
                lambda like, x: _Traced(like, x, self.stored) if isinstance(like, _Traced) else x,
                chosen[0],
                arrays,
            )
        )

    def keep_early(self) -> None:
        """Add a barrier, which no load is moved across."""
        self.stored.append(_barrier.bind())


def traced(body: Body, arrays: Sequence[Shaped]) -> jex.core.ClosedJaxpr:
    """Return the closed jaxpr of a program, a function of the pointers to its arrays."""

    def run(*pointers: jax.Array) -> list[jax.Array]:
        stored: list[jax.Array] = []
        operands = [_Traced(*row, stored) for row in zip(arrays, pointers, strict=True)]
        body(_TracedProgram(stored), *operands)
        return stored

    return jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct((), jnp.int32)] * len(arrays))


# ---- source --------------------------------------------------------------------------------------


def _access(op: jaxpr_to_triton.Operation, values: int) -> tuple[str, ...]:
    """Return the offsets, the pointer, the values to store if any, and the mask or None."""
    at, pointer, *rest = op.operands
    vector = op.params["vector"]
    if vector is not None:
        at = f"tl.max_contiguous({at}, (1, {vector}))"
    return at, pointer, *rest, *(["None"] if len(rest) == values else [])


def _write_load(op: jaxpr_to_triton.Operation) -> str:
    at, pointer, mask = _access(op, 0)
    return f"load({pointer}, {at}, {mask}, {op.params['other']}, {op.params['early']})"


def _write_store(op: jaxpr_to_triton.Operation) -> str:
    at, pointer, values, mask = _access(op, 1)
    return f"store({pointer}, {at}, {values}, {mask})"


jaxpr_to_triton.FORMS.update({
    "load_tile": _write_load,
    "store_tile": _write_store,
    "barrier": lambda op: "tl.debug_barrier()",
    "program_id": lambda op: f"tl.program_id({op.params['axis']})",
})  # fmt: skip


def missing(body: Body, arrays: Sequence[Shaped]) -> str | None:
    """Return an operation of a program that has no translation to Triton, or None."""
    return jaxpr_to_triton.missing(traced(body, arrays))


def source(
    body: Body, name: str, parameters: Sequence[str], names: Sequence[str], arrays: Sequence[Shaped]
) -> str:
    """Return the source of a kernel; raise for an operation that is `missing` in Triton.

    `parameters` are the names of its pointers, `names` that of the pointer to each of the arrays.
    """
    jaxpr = traced(body, arrays)
    lacking = jaxpr_to_triton.missing(jaxpr)
    if lacking is not None:
        raise NotImplementedError(f"the kernel {name} uses {lacking}, not translatable to Triton")
    fp8 = platform.has_fp8_conversions()
    return jaxpr_to_triton.kernel(jaxpr, name, parameters, names, fp8)


@functools.cache
def _compiled(text: str, name: str) -> Any:
    """Return the `triton.jit` function of a source, cached for equal launches."""
    from optax_lowmem._src.kernels import triton_library

    return triton_library.compiled_from(text, name)


# ---- calls ---------------------------------------------------------------------------------------


def _triton_call() -> Callable[..., Any]:
    """Import jax_triton when it is used: it requires JAX for GPUs."""
    import jax_triton

    return jax_triton.triton_call


# A call that contains references. `sequential_vmap` of a function with references fails in JAX
# before 0.11.2, which jax_triton 0.4 accepts (no upstream issue known).
_references = jex.core.Primitive("triton_call_with_references")
_references.multiple_results = True
_references.def_impl(lambda *operands, run, **_: run(*operands))
_references.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(
    _references,
    lambda ctx, *operands, run, **_: mlir.lower_fun(run, multiple_results=True)(ctx, *operands),
)


def _call_triton(
    kernel: Callable[[tuple[str, ...], tuple[str, ...]], Any],
    names: Sequence[str],
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    in_place: Mapping[int, int] | None = None,
    **options: Any,
) -> list[jax.Array]:
    """Call a kernel through jax_triton, whose conventions depend on its version.

    jax_triton 0.3 passes pointers to every operand, then to every result; aliases have equal
    pointers, and the kernel uses the operand's. 0.4 takes references to arrays that are written in
    place, and passes their pointers once. So `kernel` takes the names of the pointers in the order
    passed, and the name of each result's, and returns the `triton.jit` function. `in_place` maps an
    operand to the result that overwrites it, by index; `options` are those of `triton_call`, and
    the kernel's static arguments.
    """
    in_place = dict(in_place or {})
    owner = {result: names[operand] for operand, result in in_place.items()}
    fresh = [f"result{j}" for j in range(len(outputs))]
    results = tuple(owner.get(j, name) for j, name in enumerate(fresh))
    triton_call = _triton_call()

    def call_03(*operands: jax.Array) -> list[jax.Array]:
        return triton_call(
            *operands,
            kernel=kernel((*names, *fresh), results),
            out_shape=list(outputs),
            input_output_aliases=in_place,
            enable_fp_fusion=True,
            **options,
        )

    def call_04(*operands: jax.Array) -> list[jax.Array]:
        new = [j for j in range(len(outputs)) if j not in owner]
        refs = {i: jax.new_ref(operands[i]) for i in in_place}
        outcome = triton_call(
            *(refs.get(i, x) for i, x in enumerate(operands)),
            kernel=kernel((*names, *(results[j] for j in new)), results),
            out_type=[outputs[j] for j in new],
            backend_options={"enable_fp_fusion": True},  # Triton is about to change its default
            **options,
        )
        written = {in_place[i]: jax.freeze(ref) for i, ref in refs.items()}
        written.update(zip(new, outcome, strict=True))
        return [written[j] for j in range(len(outputs))]

    types = tuple(jax.core.ShapedArray(like.shape, like.dtype) for like in outputs)

    def run(*operands: jax.Array) -> list[jax.Array]:
        if "out_type" in inspect.signature(triton_call).parameters:
            return _references.bind(*operands, run=call_04, types=types)
        return call_03(*operands)

    # jax_triton has no batching rule: https://github.com/jax-ml/jax-triton/issues/327
    outcome = jax.custom_batching.sequential_vmap(run)(*operands)
    # jax_triton drops the varying axes (no upstream issue known)
    return list(map(varying.over, outcome, map(varying.axes_of, outputs)))


def _as_held(x: Any) -> Any:
    """View an FP8 array, or its type, as bytes: not every GPU's Triton supports FP8 dtypes."""
    if not numerics.is_narrow(x.dtype) or x.dtype.itemsize > 1:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return varying.result_like(x, dtype=jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8)


def launch(
    body: Body,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    name: str,
    in_place: dict[int, int],
) -> list[jax.Array]:
    """`gpu_kernel.launch` through jax_triton."""
    names = [f"x{i}" for i in range(len(operands))]
    arrays: list[Shaped] = [*operands, *results]

    def kernel(parameters: tuple[str, ...], written: tuple[str, ...]) -> Any:
        return _compiled(source(body, name, parameters, [*names, *written], arrays), name)

    result = _call_triton(
        kernel,
        names,
        [_as_held(x) for x in operands],
        [_as_held(x) for x in results],
        in_place,
        grid=grid,
        num_warps=warps,
        num_stages=1,
        name=name,
    )
    return [
        x if x.dtype == like.dtype else lax.bitcast_convert_type(x, like.dtype)
        for x, like in zip(result, results, strict=True)
    ]
