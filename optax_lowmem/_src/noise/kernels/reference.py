"""Sampled weights, and what their gradients say of bitwidths, in plain JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.codecs import split_of
from optax_lowmem._src.core import numerics, random
from optax_lowmem._src.noise.kernels.formats import Format, Scaled
from optax_lowmem._src.noise.kernels.noise import EIGHT, GAUSSWS, Noise, pack

# ---- square blocks of 32 on the last two axes; those at the end of an axis may be partial --------

SIDE = 32


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks per axis; axes before the last two have one per index."""
    return (*shape[:-2], *(-(-size // SIDE) for size in shape[-2:]))


def check_matrix(what: str, x: jax.Array | jax.ShapeDtypeStruct) -> None:
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


# ---- noise and sampled weights -------------------------------------------------------------------


def words_of(key: jax.Array, shape: tuple[int, ...], draws: int) -> list[jax.Array]:
    """Random words for an array [..., m, n], [..., ceil(m / 8), n] each."""
    places = (*shape[:-2], -(-shape[-2] // EIGHT), shape[-1])
    coordinates = []
    for axis, size in enumerate(places):
        dims = [1] * len(places)
        dims[axis] = size
        coordinates.append(lax.broadcasted_iota(jnp.uint32, tuple(dims), axis))
    return random.words(random.word_keys(key), coordinates, draws)


def packed_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """GaussWS' R of an array [..., m, n] as words [..., ceil(m / 8), n] of eight rows each."""
    return pack(*words_of(key, shape, GAUSSWS.draws))


def noise_of(
    key: jax.Array, shape: tuple[int, ...], noise: Noise, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """R of an array's shape."""
    # words made once, not for each of their elements
    prepared = lax.optimization_barrier(noise.prepared(words_of(key, shape, noise.draws)))
    rows = jnp.stack([noise.element(prepared, k) for k in range(EIGHT)], axis=-2)
    r = rows.reshape(*rows.shape[:-3], -1, shape[-1])[..., : shape[-2], :]
    return r.astype(dtype)  # exact in bf16


def perturb(w: jax.Array, scale: jax.Array, r: jax.Array) -> jax.Array:
    """w + R scale, each block's (equation 1): exact but for the addition, since R scale is."""
    return w + r * spread(scale, w.shape)


def cast(x: jax.Array, to: Format, dtype: jnp.dtype) -> jax.Array:
    """f32 values of a format, as `dtype`."""
    if isinstance(to, Scaled):
        x = to.cast(x, spread(absmax(x), x.shape))
    return x if dtype == jnp.float32 else numerics.narrow(x, dtype)


def sample(
    w: jax.Array,
    correction: jax.Array | None,
    factor: jax.Array,
    key: jax.Array,
    noise: Noise,
    to: Format,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Sampled weights and the scale of their noise.

    Args:
      w: weights [..., m, n].
      correction: what makes them f32 master weights, where they are split.
      factor: 2^(1 - b_t), f32, per block.
      key: uint32 key of the leaf and step, or `random.part_keys`.
      noise: the distribution of R.
      to: the format of the result.
      dtype: that holds it.

    Returns:
      w + R scale, cast; scale = max |w| factor, f32, per block.
    """
    masters = numerics.widen(w) if correction is None else _joined(w, correction)
    scale = absmax(masters) * factor
    sampled = perturb(masters, scale, noise_of(key, w.shape, noise))
    return cast(sampled, to, dtype), scale


def _joined(w: jax.Array, correction: jax.Array) -> jax.Array:
    return split_of(correction.dtype).join(w, correction)


def noise_sums(g: jax.Array, key: jax.Array, noise: Noise) -> jax.Array:
    """The sum of g R over each block, f32 (equation 3)."""
    return sums(numerics.widen(g) * noise_of(key, g.shape, noise))


def result_dtype(to: Format) -> jnp.dtype:
    """Return the dtype of sampled weights: a wide format's own, or bf16, exact for scaled ones."""
    return jnp.dtype(jnp.bfloat16 if isinstance(to, Scaled) else to.name)
