"""Learnt bitwidths (equations 9 and 10), their limits (6, Table 2), and emulated casts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.layers.noise import formats, kernels
from optax_lowmem._src.layers.noise.formats import Format
from optax_lowmem._src.layers.noise.sampling import noise_named


def bitwidth(b: ArrayLike, init: float = 6.0, target: float = 4.0) -> jax.Array:
    r"""Return b_t = b_{target} + b_i (b_{init} - b_{target}) (equation 9).

    Args:
      b: b_i, the learnt parameter, initially 1; weight decay on it pulls b_t to the target.
      init: b_t at b_i = 1.
      target: b_t at b_i = 0.

    Returns:
      b_t, f32, with the shape of `b`.

    Example:
      >>> from optax_lowmem import gaussws
      >>> float(gaussws.bitwidth(0.5))
      5.0
    """
    return target + jnp.asarray(b, jnp.float32) * (init - target)


def bitwidth_loss(bits: optax.Params, target: float = 4.0, weight: float = 1e-4) -> jax.Array:
    r"""Return \lambda / n \sum |b_t - b_{target}| over all blocks, a loss term (equation 10).

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
        raise ValueError("bits has no leaf: pass the bitwidths of at least one layer")
    total = sum(jnp.sum(jnp.abs(leaf - target)) for leaf in leaves)
    return jnp.float32(weight / sum(leaf.size for leaf in leaves)) * total


def most_bits(
    format: str | int, noise: str | float = "gaussws", *, any_maximum: bool = False
) -> int:
    r"""Return the largest b_t whose noise does not underflow in a format: m + 2 - r (equation 6).

    2^-r is the smallest nonzero magnitude of R. With a larger b_t the cast may round noise away,
    which equation 3 does not account for.

    Args:
      format: name of the format that sampled weights are cast to, or its mantissa bits m.
      noise: name of a distribution, or 2^-r itself (4-bit U(-0.5, 0.5): 2^-4).
      any_maximum: whether to return m + 1 - r, which holds for every block maximum. Equation 6
        follows from equation 5 for a maximum just under a power of two; for one just over it, noise
        at b_t = m + 2 - r is half a step of the format, which a tie may round away.

    Returns:
      The largest b_t.

    Raises:
      ValueError: for an unknown format or noise.

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
        raise ValueError(f"the smallest magnitude of R must be in (0, 1], got {least!r}")
    return mantissa + (1 if any_maximum else 2) - math.ceil(-math.log2(least))


class SafeFormat(NamedTuple):
    """Floating-point format that is safe for weights trained with noise (Table 2).

    Attributes:
      exponent: exponent bits.
      ranges: number of binades of normal numbers, not counting the subnormal range.
      mantissa: mantissa bits.
    """

    exponent: int
    ranges: int
    mantissa: int


def safe_format(bits: float) -> SafeFormat:
    """Return the format that is safe for inference after training with b_t (Table 2).

    The mantissa follows from equation 6; magnitudes under 2^(1 - b_t) of the block's binade are
    subnormal (section 5). b_t is rounded up to an integer first.

    Args:
      bits: b_t, over 1; for a layer, the largest b_t of its blocks.

    Returns:
      A `SafeFormat`, which `fake_cast` accepts.

    Raises:
      ValueError: if b_t, rounded up, is under 2.

    Example:
      >>> from optax_lowmem import gaussws
      >>> gaussws.safe_format(6)
      SafeFormat(exponent=3, ranges=6, mantissa=4)
    """
    whole = math.ceil(bits)
    if whole < 2:
        raise ValueError(f"b_t = {bits}: equation 6 leaves no mantissa bits under 2")
    return SafeFormat(math.ceil(math.log2(whole + 1)), whole, whole - 2)


def fake_cast(w: jax.Array, to: str | tuple[int, int] | SafeFormat) -> jax.Array:
    """Round weights to the values of a format, in f32.

    Args:
      w: [..., m, n], f32, bf16 or f16.
      to: a format name, as in `sample`; (exponent, mantissa) bits of an FP_{e,m} without Inf and
        NaN; or a `SafeFormat`. Formats under 16 bits have a power-of-two scale per 32 x 32 block,
        which puts the block's maximum in the highest binade.

    Returns:
      f32 of the same shape, rounded to nearest, ties to even; magnitudes over the largest number
      saturate.

    Raises:
      ValueError: for an unknown format, or a weight that is not a matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> gaussws.fake_cast(jnp.asarray([[4.0, 5.1, 0.3, -0.2]]), "mxfp4").tolist()
      [[4.0, 6.0, 0.5, -0.0]]
    """
    kernels.check_matrix("a weight", w)
    chosen: Format
    if isinstance(to, str):
        chosen = formats.format_of(to)
    elif isinstance(to, SafeFormat):
        chosen = formats.custom(to.exponent, to.mantissa, to.ranges)
    else:
        exponent, mantissa = to
        if not (1 <= exponent <= 5 and 0 <= mantissa <= 20):
            raise ValueError(
                f"FP takes 1-5 exponent, 0-20 mantissa bits, got {exponent}, {mantissa}"
            )
        chosen = formats.custom(exponent, mantissa)
    wide = numerics.widen(w)
    if isinstance(chosen, formats.Scaled):
        return kernels.cast(wide, chosen, jnp.dtype(jnp.float32))
    return numerics.widen(kernels.cast(wide, chosen, jnp.dtype(chosen.name)))


def underflow_share(w: jax.Array, sampled: jax.Array, r: jax.Array, to: str) -> jax.Array:
    """Return the share of elements with nonzero noise that the cast rounds away (equation 4).

    Args:
      w: weights [..., m, n].
      sampled: `perturb(w, bits, r)`, before the cast.
      r: the noise.
      to: name of a format.

    Returns:
      An f32 scalar; 0 if no b_t exceeds `most_bits(to, any_maximum=True)`. Elements beyond the
      largest number of a format with scales are excluded: they saturate with any noise.

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
