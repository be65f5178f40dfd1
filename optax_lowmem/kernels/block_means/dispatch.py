"""Which implementation takes the means of a leaf: decided when tracing, as in `fused_update`."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._core.block import Block
from optax_lowmem._core.reductions import check_blocks
from optax_lowmem.kernels import platform
from optax_lowmem.kernels.block_means import reference
from optax_lowmem.kernels.block_means.columns import Columns, has_columns
from optax_lowmem.kernels.tiles import MAX_ELEMENTS

_SMALL = 1 << 16  # elements, under which XLA's one launch is as fast
_LEAVES, _ELEMENTS = 8, 1 << 25  # of a launch, at most: it needs all its gradients at once

# traced once for leaves of one shape
_by_xla = jax.jit(reference.mean_of_squares, static_argnames="block")


def supported(block: Block, g: Any, implementation: str | None = None) -> str | None:
    """Why a leaf goes to XLA; None where the kernel takes it.

    Args:
      block: the leaf's.
      g: its gradient.
      implementation: the caller's choice, or None.
    """
    if implementation not in (None, "pallas"):
        return f"implementation={implementation!r} was asked for"
    reason = platform.no_device_reason() if implementation else platform.no_kernel_reason(g)
    if reason is not None:
        return reason
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
    if not _SMALL <= g.size <= MAX_ELEMENTS:
        return f"{g.size} elements: few, or more than 32-bit offsets reach"
    if not has_columns(block, g.shape):
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
    for batch in _batches(gradients, chosen):
        found = _by_kernel([blocks[i] for i in batch], [gradients[i] for i in batch], scale,
                           implementation is None)  # fmt: skip
        means.update(zip(batch, found, strict=True))
    for i, (block, g) in enumerate(pairs):
        if i not in means:
            means[i] = _by_xla(block, g, scale)
    return [means[i] for i in range(len(pairs))]


def _batches(gradients: Sequence[jax.Array], indices: Sequence[int]) -> list[list[int]]:
    """Leaves that share a launch: of one shape, so that launches compile once."""
    alike: dict[Any, list[int]] = {}
    for i in indices:
        alike.setdefault((gradients[i].shape, gradients[i].dtype), []).append(i)
    done = []
    for (shape, _), leaves in alike.items():
        most = max(1, min(_LEAVES, _ELEMENTS // math.prod(shape)))
        done += [leaves[i : i + most] for i in range(0, len(leaves), most)]
    return done


def _by_kernel(
    blocks: Sequence[Block],
    gradients: Sequence[jax.Array],
    scale: jax.Array | None,
    automatic: bool,
) -> list[jax.Array]:
    from optax_lowmem.kernels.block_means import pallas_triton

    factor = jnp.ones((), jnp.float32) if scale is None else scale

    def launched(gradients: Any, factor: Any) -> list[jax.Array]:
        columns = tuple(map(Columns.of, blocks, (g.shape for g in gradients)))
        sums = pallas_triton.column_means(columns, tuple(gradients), factor)
        # what the block has beside the axis that is summed now
        rows = zip(blocks, gradients, sums, strict=True)
        return [_rest(block, g.shape, mean) for block, g, mean in rows]

    def plain(gradients: Any, factor: Any) -> list[jax.Array]:
        rows = zip(blocks, gradients, strict=True)
        return [_by_xla(block, g, factor) for block, g in rows]

    if not automatic:
        return launched(gradients, factor)
    # a computation for the host's CPU may be traced on a machine with a GPU
    return jax.lax.platform_dependent(list(gradients), factor, cuda=launched, default=plain)


@functools.partial(jax.jit, static_argnames=("block", "shape"))
def _rest(block: Block, shape: tuple[int, ...], mean: jax.Array) -> jax.Array:
    axis = block.fit(shape).axes[0]
    return block.mean(mean.reshape(*shape[:axis], 1, *shape[axis + 1 :]))
