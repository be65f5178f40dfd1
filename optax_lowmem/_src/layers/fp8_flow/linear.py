"""A linear layer whose three matrix products run in FP8, with one scale per tensor."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from optax_lowmem._src.arrays import numerics, varying
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.sharding import sharding_of
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers import quantized_matmul as matmul
from optax_lowmem._src.layers.fp8_flow import kernels, storage
from optax_lowmem._src.layers.fp8_flow.kernels import Transposed
from optax_lowmem._src.layers.fp8_flow.storage import (
    DEFAULT,
    FORWARD,
    Coded,
    Recipe,
    Source,
    format_of,
    value_of,
)
from optax_lowmem._src.layers.quantized_matmul import Quantized, multiply, quantize_transposed

KEEPS = ("codes", "input")


class QuantizedKernel(NamedTuple):
    """Codes of a kernel for both of its products, from `quantize_weight`: 2 bytes per parameter.

    Attributes:
      codes: E4M3 [..., k, m], for the gradient of the input.
      transposed: the same codes as [..., m, k], for the forward product.
      scale: f32 [..., 1, 1].
    """

    codes: jax.Array
    transposed: jax.Array
    scale: jax.Array


def linear(
    x: jax.Array | Coded,
    kernel: jax.Array,
    *,
    kernel_absmax: jax.Array | None = None,
    kernel_codes: QuantizedKernel | None = None,
    keep: str = "codes",
    recipe: Recipe = DEFAULT,
    precision: PrecisionLike = None,
) -> jax.Array:
    r"""Compute Y = s_X s_W Q(X) Q(W) in E4M3, and likewise dX = G W^T and dW = X^T G.

    Args:
      x: [..., k]. The codes of a `Coded`, from a norm or an activation function, are used directly.
      kernel: [k, m].
      kernel_absmax: from `weight_absmax`, computed once for the micro-batches of an accumulation.
      kernel_codes: from `quantize_weight`, computed once likewise, so that neither product
        quantizes the kernel. The gradient is still that of `kernel`; the codes have none.
      keep: the form of X saved for the backward pass: `codes`, which all products of one `Coded`
        share, or `input`, for an array that is saved anyway (the output of attention: appendix D);
        the backward pass then quantizes it again with the same scale.
      recipe: formats of the products of the backward pass.
      precision: as in `jax.lax.dot`, for the products with `Recipe(storage="bf16")`.

    Returns:
      [..., m] in x's dtype; the gradients have the dtypes of x and the kernel.

    Raises:
      ValueError: for a kernel of the wrong shape, codes of another kernel, another `keep`, both
        `kernel_absmax` and `kernel_codes`, or one of them with a recipe that does not quantize.

    Memory: for the backward pass, one byte per element of X, and its scale. The kernel is quantized
    in each pass (appendix G.5), unless `kernel_codes` are given. With `Recipe(storage="bf16")`,
    nothing if X comes from a norm or an activation function: X is recomputed from their saved
    inputs.

    On a mesh: each device multiplies its shards. Sharded kernels are gathered as codes, once per
    pass; the maximum of a sharded tensor takes an all-reduce of one scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> print(fp8_flow.linear(jnp.ones((2, 8)), jnp.ones((8, 3)))[0].round(3))
      [8. 8. 8.]
    """
    value = value_of(x)
    if kernel.ndim != 2 or value.shape[-1:] != kernel.shape[:1]:
        raise ValueError(f"a kernel{list(kernel.shape)} for x{list(value.shape)}: pass [k, m]")
    check_choice("keep", keep, KEEPS)
    if keep == "input" and isinstance(x, Coded):
        raise ValueError("keep='input' is for an array; a quantized activation is kept as codes")
    _check_given(kernel, kernel_absmax, kernel_codes, recipe)
    with jax.named_scope("linear"):
        if not recipe.quantizes:
            x, kernel = varying.alike(x, kernel)
            if isinstance(x, Coded) and x.source is not None:
                return _recomputing(precision, x, kernel)
            return _times(precision, value_of(x), kernel)
        # not a copy of the codes, which a scan over layers would stack as a residual
        given = lax.stop_gradient(kernel_absmax) if kernel_codes is None else kernel_codes
        x = x if keep == "input" else storage.code(x)
        return _linear(recipe, *varying.alike(x, kernel, given))


def _check_given(
    kernel: jax.Array, absmax: jax.Array | None, codes: QuantizedKernel | None, recipe: Recipe
) -> None:
    given = {"kernel_absmax": absmax, "kernel_codes": codes}
    named = [name for name, value in given.items() if value is not None]
    if named and not recipe.quantizes:
        raise ValueError(f"{named[0]} with storage='bf16', which quantizes nothing: leave it out")
    if len(named) > 1:
        raise ValueError("kernel_absmax beside kernel_codes, which include a scale: leave it out")
    if codes is not None and (codes.codes.shape, codes.transposed.shape) != (
        kernel.shape,
        kernel.shape[::-1],
    ):
        raise ValueError(
            f"kernel_codes{list(codes.codes.shape)} for a kernel{list(kernel.shape)}: pass "
            "quantize_weight of this kernel, without the axis of layers"
        )


def weight_absmax(kernel: jax.Array) -> jax.Array:
    """Return the largest magnitude of each kernel [..., k, m], f32 [..., 1, 1].

    Computed once per gradient accumulation, it saves each micro-batch a pass over the weights
    (appendix G.5).
    """
    return matmul.absmax_of(kernel, (kernel.ndim - 2, kernel.ndim - 1))


def quantize_weight(kernel: jax.Array) -> QuantizedKernel:
    """Quantize a kernel [..., k, m] for both of its products, once for several micro-batches.

    Args:
      kernel: in the dtype passed to `linear`, so that the results are equal bit for bit. Leading
        axes stack kernels, each with its own scale; they are quantized one after another.

    Returns:
      The codes, without gradients, for `linear(..., kernel_codes=)`.

    Memory: 2 bytes per parameter, as long as the codes live.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> kernel = jnp.ones((8, 3))
      >>> codes = fp8_flow.quantize_weight(kernel)
      >>> codes.transposed.shape, codes.transposed.dtype
      ((3, 8), dtype(float8_e4m3fn))
      >>> print(fp8_flow.linear(jnp.ones((2, 8)), kernel, kernel_codes=codes)[0].round(3))
      [8. 8. 8.]
    """
    kernel = lax.stop_gradient(kernel)
    if kernel.ndim > 2:  # the GPU kernel that transposes takes a matrix
        return lax.map(quantize_weight, kernel)
    absmax = weight_absmax(kernel)
    transposed = quantize_transposed(kernel, None, FORWARD, absmax)
    return QuantizedKernel(
        _as_it_is(kernel, absmax, transposed.scales).codes, transposed.codes, transposed.scales
    )


def _as_it_is(kernel: jax.Array, absmax: jax.Array, scale: jax.Array) -> Quantized:
    """Quantize a kernel for the gradient of the input, given the scale of its codes."""
    # clipped, since the maximum may have been computed from earlier weights
    return kernels.quantized(kernel, absmax, clip=True)._replace(scales=scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A layer that applies `linear`; its attributes are arguments of `linear`."""

    kernel: jax.Array
    kernel_absmax: jax.Array | None = None
    kernel_codes: QuantizedKernel | None = None
    keep: str = "codes"
    recipe: Recipe = DEFAULT

    takes_codes: ClassVar[bool] = True

    def __call__(self, x: jax.Array | Coded) -> jax.Array:
        """Apply `linear`."""
        return linear(
            x, self.kernel, kernel_absmax=self.kernel_absmax, kernel_codes=self.kernel_codes,
            keep=self.keep, recipe=self.recipe,
        )  # fmt: skip


def apply_layer(
    layer: Any,
    x: jax.Array | Coded,
    kernel: jax.Array,
    bias: jax.Array | None,
    absmax: jax.Array | None,
    codes: QuantizedKernel | None,
) -> jax.Array:
    """Apply `linear` with the options of a Flax layer, and add the bias.

    `layer.keep` is for inputs that are arrays; a `Coded` is always kept as its codes.
    """
    y = linear(
        x, kernel, kernel_absmax=absmax, kernel_codes=codes, recipe=layer.recipe,
        keep="codes" if isinstance(x, Coded) else layer.keep, precision=layer.precision,
    )  # fmt: skip
    if getattr(layer, "preferred_element_type", None) is not None:
        y = y.astype(layer.preferred_element_type)
    if bias is None:
        return y
    # in y's rank, for `jax.numpy_rank_promotion("raise")`
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


# ---- products in the dtype of the inputs ---------------------------------------------------------


def _times(precision: PrecisionLike, x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, dims, precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputing(precision: PrecisionLike, x: Coded, kernel: jax.Array) -> jax.Array:
    """Compute the product, saving the arrays from which its input is recomputed."""
    return _times(precision, x.value, kernel)


def _recomputing_backward(
    precision: PrecisionLike, saved: tuple[Source, jax.Array], g: jax.Array
) -> tuple[Coded, jax.Array]:
    source, kernel = saved
    dx, dw = jax.vjp(partial(_times, precision), source.again(), kernel)[1](g)
    return Coded(dx, None), dw


_recomputing.defvjp(
    lambda precision, x, kernel: (_recomputing(precision, x, kernel), (x.source, kernel)),
    _recomputing_backward,
)

# ---- products in FP8 -----------------------------------------------------------------------------

Given = jax.Array | QuantizedKernel | None  # a kernel's maximum or its codes
_CODES = (Quantized, Transposed)  # what is saved of an input that was `Coded`


class _Scaled(NamedTuple):
    """The maximum and scale with which the backward pass quantizes a kernel again."""

    absmax: jax.Array
    scale: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(recipe: Recipe, x: jax.Array | Coded, kernel: jax.Array, of_kernel: Given) -> jax.Array:
    return _forward(recipe, x, kernel, of_kernel)[0]


def _forward(
    recipe: Recipe, x: jax.Array | Coded, kernel: jax.Array, of_kernel: Given
) -> tuple[jax.Array, PyTree]:
    kept: PyTree  # saved of the input for the backward pass
    if isinstance(x, Coded):
        dtype, codes = x.value.dtype, x.quantized
        kept = _for_gradient(recipe, x, kernel)
    else:
        codes, of_x = _quantized(x)
        dtype, kept = x.dtype, (x, of_x)
    if isinstance(of_kernel, QuantizedKernel):
        y = _product_of_codes(dtype, codes, Quantized(of_kernel.transposed, of_kernel.scale))
        return y, (kept, kernel, Quantized(of_kernel.codes, of_kernel.scale))
    y, *scaled = _product(dtype, codes, kernel, of_kernel)
    return y, (kept, kernel, _Scaled(*scaled))


def _for_gradient(recipe: Recipe, x: Coded, kernel: jax.Array) -> Quantized | Transposed:
    """Return the codes in the layout that dW needs, transposed or not; both have the same size."""
    to, codes = format_of(recipe.weight_gradient), x.quantized
    assert codes is not None
    if to is None or x.transposed is None:
        return codes
    g = jax.ShapeDtypeStruct((*codes.codes.shape[:-1], kernel.shape[1]), x.value.dtype)
    if not kernels.sums_by_kernel(codes, g, to, kernel.dtype):
        return codes
    return Transposed(x.transposed, codes.scales)


@partial(numerics.first_order_only, static=0)
def _quantized(x: jax.Array) -> tuple[Quantized, jax.Array]:
    """Quantize x; return its codes and its largest magnitude."""
    absmax = matmul.absmax_of(x, None)
    return kernels.quantized(x, absmax), absmax


@numerics.first_order_only
def _product(
    dtype: jnp.dtype, codes: Quantized, kernel: jax.Array, absmax: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the product, the kernel's largest magnitude, and the scale of the kernel's codes."""
    if absmax is None:
        absmax = weight_absmax(kernel)
    # 8-bit products of GPUs contract the last axis of both operands
    transposed = quantize_transposed(kernel, None, FORWARD, absmax)
    return multiply(codes, transposed, 1, dtype), absmax, transposed.scales


@numerics.first_order_only
def _product_of_codes(dtype: jnp.dtype, codes: Quantized, transposed: Quantized) -> jax.Array:
    return multiply(codes, transposed, 1, dtype)


@numerics.first_order_only
def _gradients(
    recipe: Recipe, kept: PyTree, kernel: jax.Array, of_kernel: _Scaled | Quantized, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    of_x, like_w = kept if isinstance(kept, _CODES) else None, sharding_of(kernel)
    like_x = sharding_of(jax.tree.leaves(kept)[0])
    largest = matmul.absmax_of(g, None)
    if isinstance(of_kernel, _Scaled):
        # otherwise XLA would keep the kernel's codes from the forward pass until here:
        # https://github.com/jax-ml/jax/issues/13999
        kernel, largest = lax.optimization_barrier((kernel, largest))
    codes = {}
    if to := format_of(recipe.weight_gradient):
        codes[to], dw = kernels.multiply_over_tokens(
            of_x or kernels.quantized(*kept), g, largest, to, kernel.dtype, like_w
        )
    else:
        rows = tuple(range(g.ndim - 1))
        x = kept[0]
        if isinstance(of_x, Quantized):
            x = of_x.dequantize(g.dtype)
        dw = lax.dot_general(x, g, ((rows, rows), ((), ())), out_sharding=like_w)
    if to := format_of(recipe.input_gradient):
        of_g = codes.get(to) or kernels.quantized(g, largest, to)
        if isinstance(of_kernel, _Scaled):
            of_kernel = _as_it_is(kernel, *of_kernel)
        dx = multiply(of_g, of_kernel, 1, g.dtype, sharding=like_x)
    else:
        dims = (((g.ndim - 1,), (1,)), ((), ()))
        dx = lax.dot_general(g, kernel.astype(g.dtype), dims, out_sharding=like_x)
    return dx, dw.astype(kernel.dtype)


def _backward(recipe: Recipe, saved: PyTree, g: jax.Array) -> tuple[PyTree, jax.Array, None]:
    dx, dw = _gradients(recipe, *saved, g)
    return Coded(dx, None) if isinstance(saved[0], _CODES) else dx, dw, None


_linear.defvjp(_forward, _backward)
