"""Storage of activations in FP8, and the operations fused with it (COAT, section 5)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.scales import E8M8Scale
from optax_lowmem._src.core import groups, numerics
from optax_lowmem._src.switchback.quantized_matmul import E4M3, Format, Quantized
from optax_lowmem._src.switchback.quantized_matmul import reference as matmul

SCALE = E8M8Scale()
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class Grouped(NamedTuple):
    """An array as 8-bit codes and a 16-bit scale per group.

    Attributes:
      codes: E4M3, of the array's shape.
      scales: [..., groups], maxima of magnitudes in `codecs.scales.E8M8Scale`.
    """

    codes: jax.Array
    scales: jax.Array


# ---- a scale per group ---------------------------------------------------------------------------


def store(x: jax.Array, group_size: int) -> Grouped:
    r"""Codes round(x / s \cdot 448) and maxima s of groups, rounded up to 16 bits.

    Args:
      x: [..., n] of any floating dtype; the last group of a row may be partial.
      group_size: neighbours on the last axis that share a scale.

    Returns:
      Codes and scales: |x - restored| is at most x / 16, or s / 448 / 2^10 if that is more. A
      group with a number that is not finite is restored as NaN.
    """
    codes, scales = matmul.as_stored(store_groups(groups.to_groups(x, group_size)))
    return Grouped(groups.from_groups(codes, x.shape), scales)


def store_groups(x: jax.Array) -> Grouped:
    """`store` of a group view [..., groups, lanes]."""
    scales = SCALE.encode(numerics.to_bits(matmul.absmax_of(x, -1)[..., 0]))
    limit = SCALE.decode(scales)[..., None]
    # the largest scale is 2^126, over which E4M3 would make NaN
    codes = matmul.codes_of(x, limit, E4M3, clip=True)
    return Grouped(codes, scales)


def restore(stored: Grouped, group_size: int) -> jax.Array:
    """f32 values of `store`'s result."""
    view = Grouped(groups.to_groups(stored.codes, group_size), stored.scales)
    return groups.from_groups(restore_groups(view), stored.codes.shape)


def restore_groups(stored: Grouped) -> jax.Array:
    """`restore` of a group view."""
    unit = matmul.scales_of(SCALE.decode(stored.scales), E4M3)
    return stored.codes.astype(jnp.float32) * unit[..., None]


# ---- a scale per tensor: Group Scaling -----------------------------------------------------------


def group_absmax(x: jax.Array, group_size: int) -> jax.Array:
    """f32 maxima of magnitudes [..., groups], 2^-100 at least: Group Scaling's first stage."""
    return matmul.absmax_of(groups.to_groups(x, group_size), -1)[..., 0]


def tensor_absmax(x: jax.Array, group_size: int) -> jax.Array:
    """f32 maximum of the magnitudes of a tensor, of x's rank with axes of 1: both stages."""
    return matmul.absmax_of(group_absmax(x, group_size) if x.ndim else x, None)


def quantized(x: jax.Array, absmax: jax.Array, to: Format = E4M3, clip: bool = False) -> Quantized:
    """Codes and the scale of an array whose maximum is `absmax`; `clip`: or may be more."""
    codes = matmul.as_stored(matmul.codes_of(x, absmax, to, clip))
    return Quantized(codes, matmul.scales_of(absmax, to))


# ---- RMSNorm -------------------------------------------------------------------------------------


def inverse_rms(x: jax.Array, eps: float, group_size: int) -> jax.Array:
    """1 / sqrt(mean(x^2) + eps) of rows [..., 1], of f32 values."""
    return _inverse(row_sum(jnp.square(x), group_size), x.shape[-1], eps)


def _inverse(squares: jax.Array, length: int, eps: float) -> jax.Array:
    return jax.lax.rsqrt(squares / length + eps)


def row_sum(x: jax.Array, group_size: int) -> jax.Array:
    """Over the last axis, kept."""
    return groups.to_groups(x, group_size).sum(-1).sum(-1, keepdims=True)


def row(w: jax.Array, like: jax.Array) -> jax.Array:
    """[n] as f32 beside [..., n]."""
    return w.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


def store_normed(
    x: jax.Array, scale: jax.Array, eps: float, group_size: int, exact: bool
) -> tuple[Grouped, jax.Array, jax.Array]:
    """Store the input of RMSNorm, and compute the maximum that its output is quantized with.

    Args:
      x: [..., n].
      scale: [n].
      eps: under the root.
      group_size: of the stored input.
      exact: whether the norm is of x; else of x as it is stored.

    Returns:
      (x stored, 1 / RMS of rows [..., 1], the maximum of the output with axes of 1).
    """
    stored = store(x, group_size)
    given = numerics.widen(x) if exact else restore(stored, group_size)
    inverse = inverse_rms(given, eps, group_size)
    # the maximum of y = r x w of a row is r times that of x w: one pass over x finds both
    largest = group_absmax(given * row(scale, x), group_size) * inverse
    return stored, inverse, matmul.absmax_of(largest, None)


# ---- activation functions ------------------------------------------------------------------------


def gated(activation: str, *given: jax.Array) -> jax.Array:
    """f(gate), times up where there is one, of f32 values."""
    y = ACTIVATIONS[activation](given[0])
    return y * given[1] if len(given) == 2 else y


def store_gated(
    given: tuple[jax.Array, ...], activation: str, group_size: int, exact: bool
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """Store the inputs of an activation function, and compute the maximum of its output.

    Args:
      given: gate [..., n], or gate and up.
      activation: of ACTIVATIONS.
      group_size: of the stored inputs.
      exact: whether the output is of the inputs; else of the inputs as they are stored.

    Returns:
      (each input stored, the maximum of the output with axes of 1).
    """
    stored = tuple(store(x, group_size) for x in given)
    if exact:
        values = [numerics.widen(x) for x in given]
    else:
        values = [restore(one, group_size) for one in stored]
    return stored, tensor_absmax(gated(activation, *values), group_size)
