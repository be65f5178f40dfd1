"""Weights plus noise in square blocks, differentiable (equations 1 to 3)."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.sharding import reshard_like
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.noise import distributions, formats, kernels
from optax_lowmem._src.layers.noise.distributions import Noise
from optax_lowmem._src.layers.noise.formats import Format


def noise_key(seed: int | jax.Array, step: int | jax.Array, path: str) -> jax.Array:
    """Return the key that `gaussws_noise` uses for a leaf's noise at a step.

    Args:
      seed: seed of the run.
      step: number of completed steps.
      path: path of the leaf, such as `decoder/mlp/down_proj/kernel`.

    Returns:
      A uint32 scalar.

    Example:
      >>> from optax_lowmem import gaussws
      >>> bool(gaussws.noise_key(0, 1, "a") == gaussws.noise_key(0, 1, "b"))
      False
    """
    return random.leaf_key(jnp.uint32(seed), jnp.uint32(step), path)


def as_key(key: int | jax.Array) -> jax.Array:
    """Convert an int or one of JAX's random keys to a uint32 scalar; keep such a scalar."""
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
    """Return a distribution of R by name."""
    check_choice("noise", name, distributions.NOISES)
    return distributions.NOISES[name]


def draw(
    key: int | jax.Array,
    shape: tuple[int, ...],
    noise: str = "gaussws",
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    r"""Draw the noise R.

    `gaussws` (equation 8) uses 11 random bits per element and bitwise operations only:
    P(2) = P(-2) = 3/4 2^-9, P(1) = P(-1) = (3/4)^2 2^-2, else 0. `diffq` is U(-0.5, 0.5) in bf16,
    `box-muller` is round(N(0, 1) / 2).

    Args:
      key: one of JAX's random keys, or a uint32 scalar.
      shape: [..., m, n].
      noise: `gaussws`, `diffq` or `box-muller`.
      dtype: dtype of the result; R is exact in bfloat16.

    Returns:
      R, the same on every device and sharding. An element depends on the key and its indices only,
      not on the shape.

    Example:
      >>> import jax, numpy as np
      >>> from optax_lowmem import gaussws
      >>> r = gaussws.draw(jax.random.key(0), (256, 256))
      >>> np.unique(abs(r)).tolist(), round(float((r != 0).mean()), 2)
      ([0.0, 1.0, 2.0], 0.28)
    """
    kernels.check_matrix("noise", jax.ShapeDtypeStruct(shape, jnp.float32))
    return kernels.noise_of(as_key(key), tuple(shape), noise_named(noise), jnp.dtype(dtype))


def _bits_per_block(w: jax.Array, bits: ArrayLike) -> jax.Array:
    """Check a weight and its bitwidths; return one bitwidth per block, f32."""
    kernels.check_matrix("a sampled weight", w)
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"a sampled weight is float32, bfloat16 or float16, not {w.dtype}")
    blocks = kernels.block_shape(w.shape)
    if jnp.shape(bits) not in ((), blocks):
        raise ValueError(
            f"bits has shape {jnp.shape(bits)}: for a weight of shape {w.shape} pass one bitwidth "
            f"per 32 x 32 block, {blocks}, or one number for all."
        )
    return jnp.broadcast_to(jnp.asarray(bits, jnp.float32), blocks)


def factor_of(bits: jax.Array) -> jax.Array:
    """Return 2^(1 - b_t), f32; exact if b_t is an integer."""
    whole = jnp.clip(jnp.floor(1 - bits), -126, 127)
    rest = 1 - bits - whole
    return numerics.power_of_two(whole.astype(jnp.int32)) * numerics.exp2(rest)


def perturb(w: jax.Array, bits: ArrayLike, r: jax.Array) -> jax.Array:
    r"""Return \hat w = w + R broadcast(max|w| 2^(1 - b_t)) (equation 1) for a given R, in f32.

    The maximum is that of a block of 32 x 32 weights.

    The function commutes with transposition (section 3.2).

    Args:
      w: [..., m, n].
      bits: b_t, [..., ceil(m / 32), ceil(n / 32)] or a number.
      r: R, with the weights' shape.

    Returns:
      f32 with the weights' shape.

    Raises:
      ValueError: if the shape of `bits` or `r` does not match.
      TypeError: for weights that are not f32, bf16 or f16.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> float(gaussws.perturb(jnp.full((2, 2), 0.5), 3.0, jnp.ones((2, 2)))[0, 0])
      0.625
    """
    bits = _bits_per_block(w, bits)
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
    r"""Add noise to weights: \hat w = w + R broadcast(max|w| 2^(1 - b_t)) (equation 1).

    The gradient of w is that of the result (equation 2: the maximum's gradient is ignored). The
    gradient of b_t is -ln 2 max|w| 2^(1 - b_t) \sum (dL/d\hat w * R) over its block (equation 3),
    for which R is recomputed from the key.

    Args:
      w: weights [..., m, n], f32, bf16 or f16; leading axes are batch axes.
      bits: b_t, [..., ceil(m / 32), ceil(n / 32)] or a number.
      key: one of JAX's random keys, or a uint32 scalar; equal keys give equal R.
      noise: the distribution of R, as in `draw`.
      compute: format that the sum is rounded to: `bfloat16`, `float16` or `float32`; or, stored in
        bf16, with a power-of-two scale per block: `mxfp8_e4m3`, `mxfp8_e5m2`, `mxfp6_e3m2`,
        `mxfp6_e2m3` or `mxfp4` (E2M1).

    Returns:
      Sampled weights, in the dtype of `compute`; bf16 for formats with scales.

    Raises:
      ValueError: for weights of fewer than two axes, `bits` of another shape, an unknown name.
      TypeError: for weights of another dtype, or an invalid key.

    Memory: the backward pass needs 4 bytes per block, and no array of the weights' size.

    Numerics: R max|w| 2^(1 - b_t) is exact except for 2^(1 - b_t); the sum is rounded once in f32
    and once by the cast. A block with a NaN or an infinity has no finite result.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> w = jnp.ones((64, 64))
      >>> bits = jnp.full((2, 2), 4.0)
      >>> sampled = gaussws.sample(w, bits, jax.random.key(0))
      >>> sorted(set(sampled.ravel().tolist()))
      [0.75, 0.875, 1.0, 1.125, 1.25]
    """
    bits = _bits_per_block(w, bits)
    return _sample(noise_named(noise), formats.format_of(compute), w, bits, as_key(key))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sample(noise: Noise, to: Format, w: jax.Array, bits: jax.Array, key: jax.Array) -> jax.Array:
    return _forward(noise, to, w, bits, key)[0]


def _forward(
    noise: Noise, to: Format, w: jax.Array, bits: jax.Array, key: jax.Array
) -> tuple[jax.Array, PyTree]:
    dtype = kernels.result_dtype(to)
    sampled, scale = kernels.sample(w, None, factor_of(bits), key, noise, to, dtype)
    return sampled, (scale, key, jnp.zeros((0,), w.dtype))


def _backward(
    noise: Noise, to: Format, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[PyTree, ...]:
    scale, key, like = saved
    return g.astype(like.dtype), bits_gradient(g, scale, key, noise), None


_sample.defvjp(_forward, _backward)


def bits_gradient(
    g: jax.Array, scale: jax.Array, key: jax.Array, noise: Noise, path: str | None = None
) -> jax.Array:
    """Return the gradient of b_t, f32, per block (equation 3), from that of the sampled weights.

    `scale` is max |w| 2^(1 - b_t) of the sample; `path` finds the leaf's sharding in `lowmem.step`.
    """
    sums = kernels.noise_sums(g, key, noise, path)
    return jnp.float32(-math.log(2)) * scale * reshard_like(sums, scale)
