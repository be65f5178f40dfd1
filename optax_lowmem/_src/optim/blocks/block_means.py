"""The mean of squares over each block of a leaf, the input of a block-wise second moment.

The choice of the implementation is made while tracing.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import Block, Factors
from optax_lowmem._src.arrays.groups import MAX_ELEMENTS
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS
from optax_lowmem._src.optim.blocks import block_means_kernel
from optax_lowmem._src.optim.blocks.block_means_kernel import TILE, Columns, passes

# ---- in plain jnp: the specification, and the path without a kernel ------------------------------


def mean_of_squares(
    block: Block, g: jax.Array, scale: jax.Array | None = None, in_parts: bool = True
) -> jax.Array:
    """Return the mean of (scale g)^2 over each block, f32, with shape `block.mean_shape`."""
    x = numerics.widen(g)
    return block.mean(jnp.square(x if scale is None else x * scale), in_parts)


def read_once(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether one launch can read a leaf for all means of its block.

    Rows must be contiguous, and no tile may contain parts of two rows.
    """
    if not isinstance(block, Factors):
        return True
    _, rows, between, row = block.matrices(shape)
    tile = Columns(1, rows, between * row).tile_width
    return block.fit(shape).axes[1] == len(shape) - 1 and (between == 1 or row % tile == 0)


def sums_columns(block: Block, shape: tuple[int, ...]) -> bool:
    """Return whether `Block.mean` first averages over an axis that is not the last, contiguous one.

    It averages over `axes` in order, then within heads.
    """
    fitted = block.fit(shape)
    order = (*fitted.axes, *(fitted.heads or ())[:1])
    return bool(order) and order[0] < len(shape) - 1


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
    if g.size >= _SMALL and not sums_columns(block, g.shape):
        return "its rows are contiguous in memory, and XLA sums them in one launch"
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
    return other == len(shape) - 1 and shape[one] <= TILE


def _factors_by_kernel(
    block: Factors, shape: tuple[int, ...], values: Sequence[jax.Array], implementation: str | None
) -> list[tuple[jax.Array, ...]]:
    backend = _backend_of(implementation) or platform.backend()

    def by_kernel(values: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return block_means_kernel.factors(block, shape, values, backend)

    def plain(values: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [block.operands(v, shape) for v in values]

    if implementation is not None:
        return by_kernel(values)
    return with_fallback("cuda", by_kernel, plain, list(values))
