"""Casts that test what a format would do to weights, whose values stay in a wide dtype."""

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import numerics
from optax_lowmem._src.noise import kernels
from optax_lowmem._src.noise.bitwidth import SafeFormat
from optax_lowmem._src.noise.kernels import Format


def _format(to: str | tuple[int, int] | SafeFormat) -> Format:
    if isinstance(to, str):
        return kernels.format_of(to)
    if isinstance(to, SafeFormat):
        return kernels.scaled(to.exponent, to.mantissa, to.ranges)
    exponent, mantissa = to
    if not (1 <= exponent <= 5 and 0 <= mantissa <= 20):
        raise ValueError(f"FP of {exponent} exponent and {mantissa} mantissa bits is not 1-5, 0-20")
    return kernels.scaled(exponent, mantissa)


def fake_cast(w: jax.Array, to: str | tuple[int, int] | SafeFormat) -> jax.Array:
    """Weights rounded to the values of a format, in f32.

    Args:
      w: [..., m, n], f32, bf16 or f16.
      to: a format by name, as of `sample`; (exponent, mantissa) bits of FP_{e,m}, whose codes are
        all numbers; or a `SafeFormat`. Those but the wide ones have a power of two for each block
        of 32 x 32 as their scale, by which its maximum lies in the highest binade.

    Returns:
      f32 of the same shape, rounded to nearest, ties to even; what is beyond the largest number
      becomes it.

    Raises:
      ValueError: for an unknown format, or no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> gaussws.fake_cast(jnp.asarray([[4.0, 5.1, 0.3, -0.2]]), "mxfp4").tolist()
      [[4.0, 6.0, 0.5, -0.0]]
    """
    kernels.check_matrix("a weight", w)
    chosen, wide = _format(to), numerics.widen(w)
    if isinstance(chosen, kernels.Scaled):
        return kernels.cast(wide, chosen, jnp.dtype(jnp.float32))
    return numerics.widen(kernels.cast(wide, chosen, jnp.dtype(chosen.name)))


def underflow_share(w: jax.Array, sampled: jax.Array, r: jax.Array, to: str) -> jax.Array:
    """The share of the elements with noise whose cast is that of the weight alone (equation 4).

    Args:
      w: weights [..., m, n].
      sampled: `perturb(w, bits, r)`, not yet cast.
      r: the noise.
      to: a format by name.

    Returns:
      An f32 scalar; 0 where `most_bits(to, any_maximum=True)` is kept. What is beyond the largest
      number of a format with scales, and so saturates whatever its noise, does not count.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> w = jax.random.normal(jax.random.key(0), (64, 64))
      >>> r = gaussws.draw(jax.random.key(1), w.shape)
      >>> [float(gaussws.underflow_share(w, gaussws.perturb(w, b, r), r, "bfloat16")) > 0
      ...  for b in (8, 14)]
      [False, True]
    """
    chosen, wide, noisy = kernels.format_of(to), numerics.widen(w), r != 0
    if isinstance(chosen, kernels.Scaled):
        top = kernels.spread(kernels.absmax(sampled), w.shape)
        same = chosen.cast(sampled, top) == chosen.cast(wide, top)
        noisy &= jnp.maximum(jnp.abs(wide), jnp.abs(sampled)) <= chosen.most(top)
    else:
        same = fake_cast(sampled, to) == fake_cast(wide, to)
    count = jnp.sum(noisy, dtype=jnp.float32)
    return jnp.sum(same & noisy, dtype=jnp.float32) / jnp.maximum(count, 1)
