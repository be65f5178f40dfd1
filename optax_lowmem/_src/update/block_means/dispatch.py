"""Choice of the implementation of a leaf's block means, made while tracing."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import platform
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.reductions import check_blocks
from optax_lowmem._src.core.tiles import MAX_ELEMENTS
from optax_lowmem._src.update.block_means import reference
from optax_lowmem._src.update.block_means.columns import has_columns, passes

_SMALL = 1 << 16  # elements, under which a launch takes longer than its bytes
_LEAVES, _ELEMENTS = 16, 1 << 26  # of a launch, at most: it needs all its gradients at once

# traced once for leaves of one shape
_by_xla = jax.jit(reference.mean_of_squares, static_argnames="block")


def supported(block: Block, g: jax.Array, implementation: str | None = None) -> str | None:
    """Return the reason why a leaf is left to XLA, or None where the kernel takes it.

    Args:
      block: the leaf's block.
      g: the leaf's gradient.
      implementation: the caller's choice, or None.
    """
    if implementation == "xla":  # the other names are of kernels of the step
        return "implementation='xla' was asked for"
    reason = platform.no_device_reason() if implementation else platform.no_kernel_reason(g)
    if reason is not None:
        return reason
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
    if block.elementwise or not g.size:
        return "there is nothing to average"
    if g.size > MAX_ELEMENTS:
        return f"{g.size} elements: more than 32-bit offsets reach"
    if g.size >= _SMALL and not has_columns(block, g.shape):
        return "its blocks lie along rows of memory, which XLA sums in one launch"
    return None


def means_of_squares(
    blocks: Sequence[Block],
    gradients: Sequence[jax.Array],
    scale: jax.Array | None = None,
    implementation: str | None = None,
) -> list[jax.Array]:
    """`reference.mean_of_squares` of every leaf, f32 of its block's `mean_shape`.

    Args:
      blocks: one a leaf.
      gradients: f32 or 16-bit.
      scale: a factor of all of them, f32; None for 1.
      implementation: `xla`, `pallas`, or None for the fastest.
    """
    if not gradients:
        return []
    check_blocks(blocks)
    means: dict[int, jax.Array] = {}
    pairs = list(zip(blocks, gradients, strict=True))
    chosen = [i for i, pair in enumerate(pairs) if supported(*pair, implementation) is None]
    for batch in _batches(pairs, chosen):
        found = _by_kernel([pairs[i] for i in batch], scale, implementation is None)
        means.update(zip(batch, found, strict=True))
    for i, (block, g) in enumerate(pairs):
        if i not in means:
            means[i] = _by_xla(block, g, scale)
    return [means[i] for i in range(len(pairs))]


def _batches(pairs: Sequence[tuple[Block, jax.Array]], indices: Sequence[int]) -> list[list[int]]:
    """Leaves that share launches: alike, so that one kernel is compiled for all of them."""
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
    pairs: Sequence[tuple[Block, jax.Array]], scale: jax.Array | None, automatic: bool
) -> list[jax.Array]:
    from optax_lowmem._src.update.block_means import pallas_triton

    factor = jnp.ones((), jnp.float32) if scale is None else scale
    blocks, gradients = zip(*pairs, strict=True)

    def launched(gradients: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
        shapes = [g.shape for g in gradients]
        own = tuple(map(passes, blocks, shapes))
        means = pallas_triton.means(own, gradients, factor)
        rows = zip(means, blocks, shapes, strict=True)
        return [mean.reshape(block.mean_shape(shape)) for mean, block, shape in rows]

    def plain(gradients: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
        rows = zip(blocks, gradients, strict=True)
        return [_by_xla(block, g, factor) for block, g in rows]

    if not automatic:
        return launched(gradients, factor)
    # a computation for the host's CPU may be traced on a machine with a GPU
    return jax.lax.platform_dependent(list(gradients), factor, cuda=launched, default=plain)
