"""Norms that save their input in 8 bits and quantize their output for matrix products."""

import dataclasses
from functools import partial

import jax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.fp8_flow import kernels, storage
from optax_lowmem._src.layers.fp8_flow.kernels import Grouped
from optax_lowmem._src.layers.fp8_flow.storage import DEFAULT, ArrayFunction, Coded, Recipe
from optax_lowmem._src.layers.quantized_matmul import absmax_of


@dataclasses.dataclass(frozen=True)
class _Norm:
    """Static arguments of a norm."""

    recipe: Recipe
    eps: float
    centred: bool = False  # LayerNorm, else RMSNorm

    def group(self, x: jax.Array) -> int:
        """Return how many neighbours are summed first: a group, or without codes the whole row."""
        return self.recipe.group_size if self.recipe.quantizes else max(1, x.shape[-1])


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float = 1e-6, recipe: Recipe = DEFAULT
) -> Coded:
    r"""Compute y = x / \sqrt{mean(x^2) + eps} \cdot scale over the last axis, for FP8 products.

    Args:
      x: [..., n], f32 or 16 bits.
      scale: [n].
      eps: added under the square root.
      recipe: storage of x for the backward pass.

    Returns:
      y: quantized with one scale per tensor; its `value` has x's dtype.

    Memory: for the backward pass, codes of x and a 16-bit scale per group; 1.125 bytes per element
    in groups of 16. The products save the codes of y, once. With `Recipe(storage="bf16")`, only x.

    Numerics: computed in f32 from x; straight-through gradients, from the saved codes of x. A group
    with a value that is not finite becomes NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> y = fp8_flow.rms_norm(jnp.arange(8.0).reshape(2, 4), jnp.ones(4))
      >>> y.value.shape, y.quantized.codes.dtype.name
      ((2, 4), 'float8_e4m3fn')
    """
    return _apply(_Norm(recipe, eps), x, scale)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    recipe: Recipe = DEFAULT,
) -> Coded:
    r"""Compute y = (x - mean(x)) / \sqrt{var(x) + eps} \cdot scale + bias, for FP8 products.

    Args:
      x: [..., n], f32 or 16 bits.
      scale: [n].
      bias: [n], or None.
      eps: added under the square root.
      recipe: storage of x for the backward pass.

    Returns:
      y, as in `rms_norm`; memory and numerics are the same, too.
    """
    weights = (scale,) if bias is None else (scale, bias)
    return _apply(_Norm(recipe, eps, centred=True), x, *weights)


def _apply(norm: _Norm, x: jax.Array, *weights: jax.Array) -> Coded:
    scale = weights[0]
    if x.ndim == 0 or scale.shape != x.shape[-1:]:
        raise ValueError(f"a scale{list(scale.shape)} for x{list(x.shape)}: pass [n] for [..., n]")
    with jax.named_scope("norm"):
        if not norm.recipe.quantizes:
            return storage.recomputed(ArrayFunction(_value, norm), x, *weights)
        return _normed(norm, x, *weights)


def _value(norm: _Norm, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Compute the norm of f32 arrays."""
    group = norm.group(x)
    if norm.centred:
        x = x - kernels.row_sum(x, group) / x.shape[-1]
    y = _scaled(norm, x, scale, kernels.inverse_rms(x, norm.eps, group))
    return y if bias is None else y + kernels.row(bias, x)


def _scaled(norm: _Norm, x: jax.Array, scale: jax.Array, inverse: jax.Array) -> jax.Array:
    scale = kernels.row(scale, x)
    # for codes, a row's maximum is computed as `inverse` times that of x * scale, so y is computed
    # in this order; ordinary layers have the other one
    return x * scale * inverse if norm.recipe.quantizes else x * inverse * scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(norm: _Norm, x: jax.Array, *weights: jax.Array) -> Coded:
    return _coded(norm, False, x, *weights)[0]


def _forward(norm: _Norm, x: jax.Array, *weights: jax.Array) -> tuple[Coded, PyTree]:
    y, stored = _coded(norm, True, x, *weights)
    return y, (stored, *weights)


@partial(numerics.first_order_only, static=2)
def _coded(
    norm: _Norm, keep: bool, x: jax.Array, *weights: jax.Array
) -> tuple[Coded, Grouped | None]:
    """Return the quantized norm, and the codes of x, which an exact RMSNorm may not `keep`."""
    size, exact = norm.recipe.group_size, norm.recipe.exact
    stored: Grouped | None
    if norm.centred:
        stored = kernels.store(x, size)
        given = numerics.widen(x) if norm.recipe.exact else kernels.restore(stored, size)
        y = _value(norm, given, *weights)
        absmax = absmax_of(y, None)
    else:
        (scale,) = weights
        stored, inverse, absmax = kernels.store_normed(
            x, scale, norm.eps, size, exact, keep=keep or not exact
        )
        if exact:
            formula, arrays = ArrayFunction(_scaled, norm), (x, kernels.row(scale, x), inverse)
            return storage.coded(norm.recipe, formula, arrays, absmax, stored, keep)
        assert stored is not None
        y = _scaled(norm, kernels.restore(stored, size), scale, inverse)
    codes, stored = storage.kept(kernels.quantized(y, absmax), stored)
    return Coded(y.astype(x.dtype), codes), stored


@numerics.first_order_only
def _gradients(norm: _Norm, saved: PyTree, g: jax.Array) -> PyTree:
    stored, *weights = saved
    x = kernels.restore(stored, norm.recipe.group_size)
    pull = jax.vjp(partial(_value, norm), x, *weights)[1]
    dx, *rest = pull(numerics.widen(g))
    return dx.astype(g.dtype), *rest


_normed.defvjp(_forward, lambda norm, saved, g: _gradients(norm, saved, g.value))
