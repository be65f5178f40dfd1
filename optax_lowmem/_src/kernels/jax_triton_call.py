"""Calls of Triton kernels through jax_triton, whose conventions depend on its version."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import mlir

from optax_lowmem._src.arrays import varying


def _triton_call() -> Callable[..., Any]:
    """Import jax_triton when it is used: it requires JAX for GPUs."""
    import jax_triton

    return jax_triton.triton_call


# A call that contains references. `sequential_vmap` of a function with references fails in JAX
# before 0.11.2, which jax_triton 0.4 accepts (no upstream issue known).
_call = jex.core.Primitive("triton_call_with_references")
_call.multiple_results = True
_call.def_impl(lambda *operands, run, **_: run(*operands))
_call.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(
    _call,
    lambda ctx, *operands, run, **_: mlir.lower_fun(run, multiple_results=True)(ctx, *operands),
)


def call(
    kernel: Callable[[tuple[str, ...], tuple[str, ...]], Any],
    names: Sequence[str],
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    in_place: Mapping[int, int] | None = None,
    **options: Any,
) -> list[jax.Array]:
    """Call a kernel and return its results.

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
            return _call.bind(*operands, run=call_04, types=types)
        return call_03(*operands)

    # jax_triton has no batching rule: https://github.com/jax-ml/jax-triton/issues/327
    outcome = jax.custom_batching.sequential_vmap(run)(*operands)
    # jax_triton drops the varying axes (no upstream issue known)
    return list(map(varying.over, outcome, map(varying.axes_of, outputs)))
