"""Bitwidths: how they are learnt (equations 9 and 10), what they allow (6, Table 2), and a test."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.core import numerics
from optax_lowmem._src.noise import formats, kernels
from optax_lowmem._src.noise.formats import Format
from optax_lowmem._src.noise.sampling import noise_named


def bitwidth(b: ArrayLike, init: float = 6.0, target: float = 4.0) -> jax.Array:
    r"""b_t = b_{target} + b_i (b_{init} - b_{target}) (equation 9).

    Args:
      b: b_i, what is learnt, from 1; weight decay on it guides b_t to the target.
      init: b_t at b_i = 1.
      target: b_t at b_i = 0.

    Returns:
      b_t, of the shape of `b`.

    Example:
      >>> from optax_lowmem import gaussws
      >>> float(gaussws.bitwidth(0.5))
      5.0
    """
    return target + jnp.asarray(b, jnp.float32) * (init - target)


def bitwidth_loss(bits: optax.Params, target: float = 4.0, weight: float = 1e-4) -> jax.Array:
    r"""\lambda / n \sum |b_t - b_{target}| over all blocks, to add to a loss (equation 10).

    Args:
      bits: a tree of b_t.
      target: b_target.
      weight: lambda.

    Returns:
      An f32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> float(gaussws.bitwidth_loss({"a": jnp.full((2, 2), 6.0)}, weight=0.5))
      1.0
    """
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(bits)]
    if not leaves:
        raise ValueError("bits has no leaf: give the bitwidths of at least one layer")
    total = sum(jnp.sum(jnp.abs(leaf - target)) for leaf in leaves)
    return jnp.float32(weight / sum(leaf.size for leaf in leaves)) * total


def most_bits(
    format: str | int, noise: str | float = "gaussws", *, any_maximum: bool = False
) -> int:
    r"""The largest b_t whose noise does not underflow in a format: m + 2 - r (equation 6).

    2^-r is the smallest magnitude of R but 0. A larger b_t makes noise that the cast may round
    away, of which equation 3 knows nothing.

    Args:
      format: what sampled weights are cast to, by name, or its mantissa bits m.
      noise: a distribution by name, or 2^-r itself (4-bit U(-0.5, 0.5): 2^-4).
      any_maximum: the bound that holds whatever a block's maximum is, m + 1 - r. Equation 6 follows
        from equation 5 where the maximum is just under a power of two; of one just over it noise of
        b_t = m + 2 - r is half a step of the format, which a tie may round away.

    Returns:
      The bound.

    Raises:
      ValueError: for another format or noise.

    Example:
      >>> from optax_lowmem import gaussws
      >>> gaussws.most_bits("bfloat16"), gaussws.most_bits("bfloat16", 2.0**-4)
      (9, 5)
      >>> gaussws.most_bits("mxfp4", any_maximum=True)
      2
    """
    mantissa = format if isinstance(format, int) else formats.format_of(format).mantissa
    least = noise_named(noise).least if isinstance(noise, str) else noise
    if not 0 < least <= 1:
        raise ValueError(f"the smallest magnitude of R is in (0, 1], got {least!r}")
    return mantissa + (1 if any_maximum else 2) - math.ceil(-math.log2(least))


class SafeFormat(NamedTuple):
    """FP_{e,m} that is safe for weights trained with noise (Table 2).

    Attributes:
      exponent: bits.
      ranges: binades of normal numbers; one of subnormal ones comes beside.
      mantissa: bits.
    """

    exponent: int
    ranges: int
    mantissa: int


def safe_format(bits: float) -> SafeFormat:
    """Exponent and mantissa bits that are safe for inference after training with b_t (Table 2).

    The mantissa is that of equation 6; magnitudes under 2^(1 - b_t) of the block's binade are
    subnormal (section 5). Both are of the next integer.

    Args:
      bits: b_t, at least 2; of a layer its largest.

    Returns:
      A `SafeFormat`; `fake_cast` takes it.

    Raises:
      ValueError: for less than 2.

    Example:
      >>> from optax_lowmem import gaussws
      >>> [tuple(gaussws.safe_format(b)) for b in (3, 6, 12)]
      [(2, 3, 1), (3, 6, 4), (4, 12, 10)]
    """
    whole = math.ceil(bits)
    if whole < 2:
        raise ValueError(f"b_t = {bits}: equation 6 leaves no mantissa bits under 2")
    return SafeFormat(math.ceil(math.log2(whole + 1)), whole, whole - 2)


# ---- casts that test what a format would do to weights, whose values stay in a wide dtype --------


def _format(to: str | tuple[int, int] | SafeFormat) -> Format:
    if isinstance(to, str):
        return formats.format_of(to)
    if isinstance(to, SafeFormat):
        return formats.scaled(to.exponent, to.mantissa, to.ranges)
    exponent, mantissa = to
    if not (1 <= exponent <= 5 and 0 <= mantissa <= 20):
        raise ValueError(f"FP of {exponent} exponent and {mantissa} mantissa bits is not 1-5, 0-20")
    return formats.scaled(exponent, mantissa)


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
    if isinstance(chosen, formats.Scaled):
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
    chosen, wide, noisy = formats.format_of(to), numerics.widen(w), r != 0
    if isinstance(chosen, formats.Scaled):
        top = kernels.spread(kernels.absmax(sampled), w.shape)
        same = chosen.cast(sampled, top) == chosen.cast(wide, top)
        noisy &= jnp.maximum(jnp.abs(wide), jnp.abs(sampled)) <= chosen.most(top)
    else:
        same = fake_cast(sampled, to) == fake_cast(wide, to)
    count = jnp.sum(noisy, dtype=jnp.float32)
    return jnp.sum(same & noisy, dtype=jnp.float32) / jnp.maximum(count, 1)
