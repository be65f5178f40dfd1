"""Weights plus noise in square blocks, differentiable (equations 1 to 3)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.core import explicit, numerics, random
from optax_lowmem._src.noise import distributions, formats, kernels
from optax_lowmem._src.noise.distributions import EIGHT, Noise
from optax_lowmem._src.noise.formats import Format


def noise_key(seed: int | jax.Array, step: int | jax.Array, path: str) -> jax.Array:
    """The key of a layer's noise at a step, as `gaussws_noise` draws it for a leaf.

    Args:
      seed: of the run.
      step: how many steps were taken.
      path: the leaf's, `decoder/mlp/down_proj/kernel`.

    Returns:
      A uint32 scalar.

    Example:
      >>> from optax_lowmem import gaussws
      >>> bool(gaussws.noise_key(0, 1, "a") == gaussws.noise_key(0, 1, "b"))
      False
    """
    return random.leaf_key(jnp.uint32(seed), jnp.uint32(step), path)


def as_key(key: int | jax.Array) -> jax.Array:
    """A uint32 scalar of itself, or of one of JAX's random keys.

    Raises:
      TypeError: for anything else.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        return random.mix(jnp.uint32(key))
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype == jnp.uint32 and shape == () and not isinstance(key, int):
        return key
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (typed and shape == ()) or (dtype == jnp.uint32 and shape == (2,)):
        return jax.random.bits(key, (), jnp.uint32)
    raise TypeError(
        f"key is one of jax.random.key or a uint32 scalar such as gaussws.noise_key's, got {key!r}"
    )


def noise_named(name: str) -> Noise:
    """A distribution of R.

    Raises:
      ValueError: for another name.
    """
    if name not in distributions.NOISES:
        raise ValueError(f"noise is one of {', '.join(distributions.NOISES)}, got {name!r}")
    return distributions.NOISES[name]


def draw(
    key: int | jax.Array,
    shape: tuple[int, ...],
    noise: str = "gaussws",
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    r"""R of an array's shape.

    `gaussws` (equation 8) is made of 11 random bits per element by bitwise operations alone:
    P(2) = P(-2) = 3/4 2^-9, P(1) = P(-1) = (3/4)^2 2^-2, else 0. `diffq` is U(-0.5, 0.5) in bf16,
    `box-muller` round(N(0, 1) / 2).

    Args:
      key: one of JAX's random keys, or a uint32 scalar.
      shape: [..., m, n].
      noise: `gaussws`, `diffq` or `box-muller`.
      dtype: of the result; R is exact in bfloat16.

    Returns:
      The same numbers wherever they are made; those of a part of an array at its start are those
      of the array there.

    Example:
      >>> import jax, numpy as np
      >>> from optax_lowmem import gaussws
      >>> r = gaussws.draw(jax.random.key(0), (256, 256))
      >>> np.unique(abs(r)).tolist(), round(float((r != 0).mean()), 2)
      ([0.0, 1.0, 2.0], 0.28)
    """
    kernels.check_matrix("noise", jax.ShapeDtypeStruct(shape, jnp.float32))
    return kernels.noise_of(as_key(key), tuple(shape), noise_named(noise), jnp.dtype(dtype))


def draw_packed(key: int | jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """GaussWS' R in 4 bits per element: half a byte.

    Args:
      key: as of `draw`.
      shape: [..., m, n].

    Returns:
      uint32 [..., ceil(m / 8), n]: eight elements of a column, each with its magnitude in the
      lowest bits of its four and its sign in the highest, the first element lowest.

    Example:
      >>> import jax
      >>> from optax_lowmem import gaussws
      >>> words = gaussws.draw_packed(jax.random.key(0), (64, 48))
      >>> words.shape, bool((gaussws.unpack(words) == gaussws.draw(jax.random.key(0), (64, 48))).all())
      ((8, 48), True)
    """  # noqa: E501
    kernels.check_matrix("noise", jax.ShapeDtypeStruct(shape, jnp.float32))
    return kernels.packed_noise(as_key(key), tuple(shape))


def unpack(words: jax.Array, rows: int | None = None) -> jax.Array:
    """f32 R [..., m, n] of `draw_packed`.

    Args:
      words: uint32 [..., ceil(m / 8), n].
      rows: m; by default 8 times the rows of words.

    Returns:
      R.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> gaussws.unpack(jnp.uint32([[0x000000A1]])).ravel().tolist()[:3]
      [1.0, -2.0, 0.0]
    """
    numbers = jnp.stack([distributions.number(words, k) for k in range(EIGHT)], axis=-2)
    numbers = numbers.reshape(*words.shape[:-2], -1, words.shape[-1])
    return numbers if rows is None else numbers[..., :rows, :]


# ---- equation 1 ----------------------------------------------------------------------------------


def _check_bits(w: jax.Array, bits: ArrayLike) -> jax.Array:
    kernels.check_matrix("a sampled weight", w)
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"a sampled weight is float32, bfloat16 or float16, not {w.dtype}")
    blocks = kernels.block_shape(w.shape)
    if jnp.shape(bits) not in ((), blocks):
        raise ValueError(
            f"bits has shape {jnp.shape(bits)}: a weight of shape {w.shape} has one bitwidth for "
            f"each 32 x 32 block, {blocks}, or one number for all."
        )
    return jnp.broadcast_to(jnp.asarray(bits, jnp.float32), blocks)


def factor_of(bits: jax.Array) -> jax.Array:
    """2^(1 - b_t), f32; exact where b_t is an integer."""
    whole = jnp.clip(jnp.floor(1 - bits), -126, 127)
    rest = 1 - bits - whole
    return numerics.power_of_two(whole.astype(jnp.int32)) * numerics.exp2(rest)


def perturb(w: jax.Array, bits: ArrayLike, r: jax.Array) -> jax.Array:
    r"""\hat w = w + R broadcast(max|w| 2^(1 - b_t)) (equation 1) of a given R, in f32.

    Transposing commutes with it (section 3.2).

    Args:
      w: [..., m, n].
      bits: b_t, [..., ceil(m / 32), ceil(n / 32)] or a number.
      r: of the weights' shape.

    Returns:
      f32 of the weights' shape.

    Raises:
      ValueError: for another shape of `bits` or `r`.
      TypeError: for weights that are not f32, bf16 or f16.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> float(gaussws.perturb(jnp.full((2, 2), 0.5), 3.0, jnp.ones((2, 2)))[0, 0])
      0.625
    """
    bits = _check_bits(w, bits)
    if jnp.shape(r) != w.shape:
        raise ValueError(f"R has shape {jnp.shape(r)}, the weight {w.shape}")
    wide = numerics.widen(w)
    return kernels.perturb(wide, kernels.absmax(wide) * factor_of(bits), r)


def sample(
    w: jax.Array,
    bits: ArrayLike,
    key: int | jax.Array,
    *,
    noise: str = "gaussws",
    compute: str = "bfloat16",
) -> jax.Array:
    r"""Weights plus noise of a bitwidth: \hat w = w + R broadcast(max|w| 2^(1 - b_t)) (equation 1).

    The gradient of w is that of the result (equation 2: that of the maximum is left out); that of
    b_t is -ln 2 max|w| 2^(1 - b_t) \sum (dL/d\hat w * R) over its block (equation 3), for which R
    is made again from the key.

    Args:
      w: weights [..., m, n], f32, bf16 or f16; axes before the last two hold matrices of their own.
      bits: b_t, [..., ceil(m / 32), ceil(n / 32)] or a number.
      key: one of JAX's random keys, or a uint32 scalar; the same key is the same R.
      noise: the distribution of R, as of `draw`.
      compute: what the sum is cast to: `bfloat16`, `float16`, `float32`, or, as values in bf16,
        with a power of two for each block as its scale, `mxfp8_e4m3`, `mxfp8_e5m2`, `mxfp6_e3m2`,
        `mxfp6_e2m3`, `mxfp4` (E2M1).

    Returns:
      Sampled weights, of the dtype of `compute`; bf16 for the formats with scales.

    Raises:
      ValueError: for weights without the axes of a matrix, another shape of `bits`, another name.
      TypeError: for other weights, or another key.

    Memory: nothing of the weights' size is kept for the backward pass, 4 bytes per block.

    Numerics: R max|w| 2^(1 - b_t) is exact but for 2^(1 - b_t), the sum rounded once in f32, once
    by the cast. A block with a NaN or an infinity has no finite element.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> w = jnp.ones((64, 64))
      >>> bits = jnp.full((2, 2), 4.0)
      >>> sampled = gaussws.sample(w, bits, jax.random.key(0))
      >>> sorted(set(sampled.ravel().tolist()))
      [0.75, 0.875, 1.0, 1.125, 1.25]
    """
    bits = _check_bits(w, bits)
    return _sample(noise_named(noise), formats.format_of(compute), w, bits, as_key(key))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sample(noise: Noise, to: Format, w: jax.Array, bits: jax.Array, key: jax.Array) -> jax.Array:
    return _forward(noise, to, w, bits, key)[0]


def _forward(
    noise: Noise, to: Format, w: jax.Array, bits: jax.Array, key: jax.Array
) -> tuple[jax.Array, Any]:
    dtype = kernels.result_dtype(to)
    sampled, scale = kernels.sample(w, None, factor_of(bits), key, noise, to, dtype)
    return sampled, (scale, key, jnp.zeros((0,), w.dtype))


def _backward(
    noise: Noise, to: Format, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[Any, ...]:
    scale, key, like = saved
    return g.astype(like.dtype), bits_gradient(g, scale, key, noise), None


_sample.defvjp(_forward, _backward)


def bits_gradient(
    g: jax.Array, scale: jax.Array, key: jax.Array, noise: Noise, path: str | None = None
) -> jax.Array:
    """The gradient of b_t, f32, per block (equation 3), from that of the sampled weights.

    Args:
      g: dL/dw^.
      scale: max |w| 2^(1 - b_t) of the sample.
      key: its key.
      noise: its distribution.
      path: the leaf's, by which `lowmem.step` knows its sharding.
    """
    sums = kernels.noise_sums(g, key, noise, path)
    return jnp.float32(-math.log(2)) * scale * explicit.laid_like(sums, scale)
