"""Square blocks of 32 on the last two axes; those at the end of an axis may be partial."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import numerics

SIDE = 32


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks per axis; axes before the last two have one per index."""
    return (*shape[:-2], *(-(-size // SIDE) for size in shape[-2:]))


def check_matrix(what: str, x: Any) -> None:
    """Raises unless an array has the two axes of a matrix, and maybe others before."""
    if jnp.ndim(x) < 2 or math.prod(x.shape) == 0:
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}: blocks of 32 x 32 need the two axes of a matrix."
        )


def to_blocks(x: jax.Array) -> jax.Array:
    """[..., m, n] as [..., blocks, 32, blocks, 32], padded with zeros."""
    rows, columns = block_shape(x.shape)[-2:]
    padding = [(0, 0)] * (x.ndim - 2)
    padding += [(0, count * SIDE - size) for count, size in zip((rows, columns), x.shape[-2:],
                                                               strict=True)]  # fmt: skip
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:-2], rows, SIDE, columns, SIDE)


def absmax(x: jax.Array) -> jax.Array:
    """max |x| of each block, f32; NaN where there is one."""
    return numerics.from_bits(numerics.absmax_bits(to_blocks(x), axes=(-3, -1)))


def sums(x: jax.Array) -> jax.Array:
    """The sum over each block."""
    return jnp.sum(to_blocks(x), axis=(-3, -1))


def spread(of_blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each block's value for each of its elements, of the array's shape."""
    *lead, rows, columns = of_blocks.shape
    wide = jnp.broadcast_to(
        of_blocks[..., :, None, :, None], (*lead, rows, SIDE, columns, SIDE)
    ).reshape(*lead, rows * SIDE, columns * SIDE)
    return wide[..., : shape[-2], : shape[-1]]
