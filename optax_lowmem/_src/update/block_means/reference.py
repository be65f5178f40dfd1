"""Means of squares in plain jnp: the specification, and the path without a kernel."""

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.block import Block


def mean_of_squares(block: Block, g: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Mean of (scale g)^2 over each block, f32 of `block.mean_shape`.

    Args:
      block: which elements share a mean.
      g: f32 or 16-bit, of any shape that the block fits.
      scale: an f32 factor; None for 1.
    """
    x = numerics.widen(g)
    return block.mean(jnp.square(x if scale is None else x * scale))
