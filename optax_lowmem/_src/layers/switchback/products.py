"""The three matrix products of a linear layer, each in 8 bits or not (SwitchBack, section 2.2).

Y = X W with X [b, k] and W [k, m] (Flax's kernel); for the gradient G of Y, dX = G W^T and
dW = X^T G. The paper writes W^T for W.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from optax_lowmem._src.arrays import numerics, varying
from optax_lowmem._src.arrays.sharding import sharding_of
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.quantized_matmul import (
    Format,
    Quantized,
    multiply,
    quantize,
    quantize_transposed,
)

ROW, TENSOR = "row", "tensor"


@dataclasses.dataclass(frozen=True)
class Variant:
    """Granularity of the operands' scales in each product.

    `row`: one scale per row or column that a product sums over; `tensor`: one scale per tensor.
    """

    forward: tuple[str, str]  # of X and W in Y = X W
    input_gradient: tuple[str, str]  # of G and W in dX = G W^T
    weight_gradient: tuple[str, str] | None = None  # of X and G in dW = X^T G; None: not quantized
    # whether X is saved for the backward pass as 8-bit codes (SwitchBackM)
    saves_codes: bool = False


VARIANTS: dict[str, Variant] = {
    "switchback": Variant((ROW, TENSOR), (ROW, TENSOR)),  # Algorithm 1
    "switchback_m": Variant((ROW, TENSOR), (ROW, TENSOR), saves_codes=True),  # Algorithm 3
    "switchback_q": Variant((ROW, ROW), (ROW, ROW)),  # Algorithm 4
    "llm_int8": Variant((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "tensorwise": Variant((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),  # section 2.3
}


@dataclasses.dataclass(frozen=True)
class ProductSettings:
    """Settings of the three products of a layer."""

    variant: Variant
    forward: Format  # of X and W
    gradient: Format  # of G
    precision: PrecisionLike = None  # as in `jax.lax.dot`, for a product that is not quantized
    result: jnp.dtype | None = None  # dtype of Y; None: that of X and W
    # of Y, on a mesh with Explicit axes, if it is ambiguous
    sharding: jax.sharding.NamedSharding | None = None


def _quantized_operand(x: jax.Array, per: str, to: Format, summed: tuple[int, ...]) -> Quantized:
    return quantize(x, None if per == TENSOR else summed, to)


def _refuse_derivative(settings: ProductSettings, primals: object, tangents: object) -> PyTree:
    raise TypeError(
        "the gradients of a quantized product have no derivative: rounding has none. For second "
        'derivatives (Hessians, meta-learning) use variant="standard" in these layers.'
    )


_first_order_only = partial(numerics.first_order_only, refuse=_refuse_derivative)


def matmul(settings: ProductSettings, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply `x` [..., k] by `w` [k, m], both of one dtype; the result is [..., m].

    The gradients are straight-through: rounding counts as the identity. dX is the product of G with
    W, quantized again, and dW that of the saved X with G.
    """
    return _matmul(settings, *varying.alike(x, w))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(settings: ProductSettings, x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(settings, x, w)[0]


def _forward(settings: ProductSettings, x: jax.Array, w: jax.Array) -> tuple[jax.Array, PyTree]:
    y, codes = _output(settings, x, w)
    # W itself, since a W returned by `_output` would be saved as a copy in each layer
    return y, (codes if settings.variant.saves_codes else x, w)


@_first_order_only
def _output(settings: ProductSettings, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Quantized]:
    per, last = settings.variant.forward, x.ndim - 1
    codes = _quantized_operand(x, per[0], settings.forward, (last,))
    # 8-bit products of GPUs contract the last axis of both operands
    of_w = quantize_transposed(w, None if per[1] == TENSOR else 0, settings.forward)
    y = multiply(codes, of_w, 1, settings.result or x.dtype, sharding=settings.sharding)
    return y, codes


@_first_order_only
def _gradients(
    settings: ProductSettings, x: jax.Array | Quantized, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    last, variant = g.ndim - 1, settings.variant
    rows = tuple(range(last))
    of_x, of_w = sharding_of(jax.tree.leaves(x)[0]), sharding_of(w)
    if isinstance(x, Quantized):
        x = x.dequantize(w.dtype)
    per_g, per_w = variant.input_gradient
    codes = _quantized_operand(g, per_g, settings.gradient, (last,))
    weights = _quantized_operand(w, per_w, settings.forward, (1,))
    dx = multiply(codes, weights, 1, w.dtype, sharding=of_x)
    if variant.weight_gradient is None:
        dims = ((rows, rows), ((), ()))
        g = g.astype(w.dtype)
        return dx, lax.dot_general(x, g, dims, settings.precision, out_sharding=of_w)
    per_x, per_g = variant.weight_gradient
    codes = _quantized_operand(x, per_x, settings.forward, rows)
    gradients = _quantized_operand(g, per_g, settings.gradient, rows)
    return dx, multiply(codes, gradients, last, w.dtype, transposed=True, sharding=of_w)


_matmul.defvjp(_forward, lambda settings, saved, g: _gradients(settings, *saved, g))
