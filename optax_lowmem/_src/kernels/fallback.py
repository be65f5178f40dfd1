"""A kernel, and what replaces it on other platforms and on several devices.

A kernel call is opaque to XLA's partitioner, which would gather its operands. How many devices a
program is for is known where JAX lowers it, and not where JAX traces it.
"""

# https://github.com/jax-ml/jax/issues/19748 (Pallas)
# https://github.com/jax-ml/jax-triton/issues/163

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from optax_lowmem._src.arrays.compiled import is_eager
from optax_lowmem._src.arrays.typing import PyTree, Structure
from optax_lowmem._src.kernels import partitioned
from optax_lowmem._src.kernels.partitioned import Partition

_Flat = Callable[..., list[jax.Array]]  # of the flat arguments, with flat results


def with_fallback(
    name: str,
    kernel: Callable[..., PyTree],
    plain: Callable[..., PyTree],
    *args: PyTree,
    several: Callable[..., PyTree] | None = None,
    partition: Partition | None = None,
) -> PyTree:
    """Return kernel(*args) on one device of the kernel's platform, else plain(*args).

    A computation for the host's CPU may be traced on a machine with an accelerator, and one for
    several platforms may be exported: which of the two runs is decided where JAX lowers it. The
    kernel is always traced, and a fallback only if it is lowered, maybe after this call has
    returned: `plain` must take all of its arrays as arguments, and depend on no other state. Both
    must return the same shapes and dtypes. `name` is that of `jax.lax.platform_dependent`.

    Several devices of the kernel's platform run `several` (by default `plain`), or the kernel as
    `partition` says, where XLA supports this (`partitioned.can_lower`); in a `shard_map` over all
    axes the kernel runs on each device.
    """
    types: list[PyTree] = []  # filled with one item, the types of the kernel's results

    def on_platform(*args: PyTree) -> PyTree:  # the kernel's
        result = on_one_device(kernel, several or plain, *args, partition=partition)
        types[:] = [jax.tree.map(jax.typeof, result)]
        return result

    def elsewhere(*args: PyTree) -> PyTree:  # with results of the kernel's types
        if not types:  # called without a trace
            return plain(*args)
        leaves, treedef = jax.tree.flatten(args)
        wanted, structure = jax.tree.flatten(types[0])
        flat = _flattened(plain, treedef, types[0])
        result = _kernel.bind(
            *leaves, kernel=None, several=flat, partition=None, count=len(leaves), types=(*wanted,)
        )
        return jax.tree.unflatten(structure, result)

    return jax.lax.platform_dependent(*args, default=elsewhere, **{name: on_platform})


def on_one_device(
    kernel: Callable[..., PyTree],
    several: Callable[..., PyTree],
    *args: PyTree,
    partition: Partition | None = None,
) -> PyTree:
    """Return kernel(*args) in a program for one device, else parts of it or several(*args).

    The arguments are as in `with_fallback`; the kernel is always traced.
    """
    leaves, treedef = jax.tree.flatten(args)
    if is_eager(leaves):
        return (kernel if _on_one_device(leaves) else several)(*args)
    results: list[PyTree] = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        results[:] = [kernel(*jax.tree.unflatten(treedef, leaves))]
        return jax.tree.leaves(results[0])

    traced = jax.make_jaxpr(flat)(*leaves)
    structure = jax.tree.structure(results.pop())
    types = jax.tree.unflatten(structure, traced.out_avals)
    result = _kernel.bind(
        *leaves,
        *traced.consts,  # arrays that the kernel closes over
        kernel=traced.jaxpr,
        several=_flattened(several, treedef, types),
        partition=partition,
        count=len(leaves),
        types=tuple(traced.out_avals),
    )
    return jax.tree.unflatten(structure, result)


def _flattened(plain: Callable[..., PyTree], treedef: Structure, types: PyTree) -> _Flat:
    """Return a fallback as a function of all operands, which checks the types of its results."""

    def flat(*operands: PyTree) -> list[jax.Array]:
        result = plain(*jax.tree.unflatten(treedef, operands[: treedef.num_leaves]))
        _check(jax.tree.map(jax.typeof, result), types)
        return jax.tree.leaves(result)

    return flat


def _check(found: PyTree, wanted: PyTree) -> None:
    """Raise if a fallback returns other shapes or dtypes than its kernel."""
    forms = jax.tree.map(lambda x: (x.shape, x.dtype), (found, wanted))
    if forms[0] != forms[1]:
        raise TypeError(f"the fallback returns {found}, but its kernel {wanted}")


def _on_one_device(leaves: Sequence[PyTree]) -> bool:
    """Return whether concrete arrays are on one device."""
    return all(len(x.devices()) == 1 for x in leaves if isinstance(x, jax.Array))


# Operands are the flat arguments, then the arrays that the kernel closes over. Parameters are the
# kernel's jaxpr (None for another platform), the fallback, and the number of arguments.

_kernel = jex.core.Primitive("kernel")
_kernel.multiple_results = True


def _run(jaxpr: jex.core.Jaxpr, count: int, *operands: jax.Array) -> list[jax.Array]:
    """Run a kernel's jaxpr on all operands."""
    closed = jex.core.ClosedJaxpr(jaxpr, list(operands[count:]))
    return list(jex.core.jaxpr_as_fun(closed)(*operands[:count]))


def _impl(
    *operands: PyTree, kernel: jex.core.Jaxpr | None, several: _Flat, count: int, **_: object
) -> list[jax.Array]:
    """Run the kernel outside of jit; the fallback if the arrays are on several devices."""
    if kernel is not None and _on_one_device(operands):
        return _run(kernel, count, *operands)
    return several(*operands)


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: PyTree,
    kernel: jex.core.Jaxpr | None,
    several: _Flat,
    partition: Partition | None,
    count: int,
    types: tuple[jax.core.AbstractValue, ...],
) -> PyTree:
    function = several
    if kernel is not None and _is_for_one_device(ctx.module_context.axis_context):
        function = functools.partial(_run, kernel, count)
    elif kernel is not None and partition is not None and partitioned.can_lower(ctx.module_context):
        inner = ctx.replace(avals_in=ctx.avals_in[:count])
        return partitioned.lower(inner, operands[:count], partition, kernel)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _is_for_one_device(context: Any) -> bool:
    """Return whether each device of a program that is lowered runs kernels on its own arrays."""
    mesh = getattr(context, "mesh", None)
    if mesh is not None:  # in a shard_map
        return mesh.size == 1 or set(context.manual_axes) == set(mesh.axis_names)
    return bool(getattr(context, "num_devices", 1) == 1)


def _batched(
    operands: Sequence[PyTree],
    axes: Sequence[int | None],
    kernel: jex.core.Jaxpr | None,
    several: _Flat,
    count: int,
    **_: object,
) -> tuple[list[jax.Array], list[int]]:
    axes = tuple(axes)
    plain = jax.vmap(several, in_axes=axes)
    if kernel is None:
        result = plain(*operands)
    else:
        function = jax.vmap(functools.partial(_run, kernel, count), in_axes=axes)
        result = on_one_device(function, plain, *operands)
    return result, [0] * len(result)


def _derivative(
    primals: Sequence[PyTree], tangents: Sequence[PyTree], several: _Flat, count: int, **how: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the results with the fallback's derivative, which a kernel need not have."""
    tangents = tuple(map(ad.instantiate_zeros, tangents[:count]))
    plain, slopes = jax.jvp(several, tuple(primals[:count]), tangents)
    if how["kernel"] is None:
        return plain, slopes
    return _kernel.bind(*primals, several=several, count=count, **how), slopes


_kernel.def_impl(_impl)
_kernel.def_abstract_eval(lambda *_, types, **__: list(types))
batching.primitive_batchers[_kernel] = _batched
ad.primitive_jvps[_kernel] = _derivative
mlir.register_lowering(_kernel, _lower)
