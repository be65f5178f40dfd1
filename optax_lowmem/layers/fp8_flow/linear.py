"""A linear layer whose three products run in FP8, with one scale a tensor."""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._core import varying
from optax_lowmem.kernels import fp8_flow as kernels
from optax_lowmem.kernels.quantized_matmul import Quantized, multiply, quantize_transposed
from optax_lowmem.kernels.quantized_matmul import reference as matmul
from optax_lowmem.layers.fp8_flow import storage
from optax_lowmem.layers.fp8_flow.recipe import (
    DEFAULT,
    FORWARD,
    Coded,
    Recipe,
    Source,
    format_of,
    value_of,
)
from optax_lowmem.layers.products import explicit_sharding

KEEPS = ("codes", "input")


@dataclasses.dataclass(frozen=True)
class _Linear:
    """The static part: the recipe, and whether the input is kept as it was given."""

    recipe: Recipe
    keeps_input: bool = False
    precision: Any = None


def linear(
    x: jax.Array | Coded,
    kernel: jax.Array,
    *,
    kernel_absmax: jax.Array | None = None,
    keep: str = "codes",
    recipe: Recipe = DEFAULT,
    precision: Any = None,
) -> jax.Array:
    r"""Y = s_X s_W Q(X) Q(W) in E4M3, and likewise dX = G W^T and dW = X^T G.

    Args:
      x: [..., k]. What a norm or an activation function has quantised is multiplied as it is.
      kernel: [k, m].
      kernel_absmax: of `weight_absmax`, found once for several steps of an accumulation.
      keep: what of X the backward pass has: `codes`, which all products of one `Coded` share, or
        `input`, for an array that is kept anyway (by attention, whose output it is: appendix D);
        it is then quantised once more with the same scale.
      recipe: what the gradients' products run in.
      precision: of products with `Recipe(storage="bf16")`, as `jax.lax.dot` takes it.

    Returns:
      [..., m] of x's dtype; gradients too are of the dtypes of x and the kernel.

    Raises:
      ValueError: for a kernel that does not fit, another `keep`, or a `kernel_absmax` where nothing
        is quantised.

    Memory: for the backward pass, one byte a number of X and its scale. The kernel is quantised
    anew in each pass (appendix G.5). With `Recipe(storage="bf16")`, nothing for X of a norm or an
    activation function: it is computed again from what that keeps.

    On a mesh, left to XLA: a scalar is reduced where a maximum's tensor lies over devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> print(fp8_flow.linear(jnp.ones((2, 8)), jnp.ones((8, 3)))[0].round(3))
      [8. 8. 8.]
    """
    value = x.value if isinstance(x, Coded) else x
    if kernel.ndim != 2 or value.shape[-1:] != kernel.shape[:1]:
        raise ValueError(f"a kernel{list(kernel.shape)} for x{list(value.shape)}: pass [k, m]")
    if keep not in KEEPS:
        raise ValueError(f"keep must be one of {', '.join(KEEPS)}, got {keep!r}")
    if keep == "input" and isinstance(x, Coded):
        raise ValueError("keep='input' is for an array; what is quantised is kept as codes")
    if kernel_absmax is not None and not recipe.quantises:
        raise ValueError("kernel_absmax with storage='bf16', which quantises nothing: leave it out")
    with jax.named_scope("linear"):
        static = _Linear(recipe, keep == "input", precision)
        if not recipe.quantises:
            return _in_own_precision(static, *varying.alike(x, kernel))
        if kernel_absmax is not None:
            kernel_absmax = lax.stop_gradient(kernel_absmax)
        x = x if static.keeps_input else storage.code(x)
        return _linear(static, *varying.alike(x, kernel, kernel_absmax))


def weight_absmax(kernel: jax.Array) -> jax.Array:
    """The maximum of a kernel's magnitudes, f32 [..., 1, 1] of [..., k, m].

    Found once and passed to the steps of a gradient accumulation, it spares each a pass over the
    weights (appendix G.5).
    """
    return matmul.absmax_of(kernel, (kernel.ndim - 2, kernel.ndim - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """`linear` of a kernel, as a layer.

    Attributes:
      kernel: [k, m].
      kernel_absmax: as of `linear`, like the rest.
      keep: likewise.
      recipe: likewise.
    """

    kernel: jax.Array
    kernel_absmax: jax.Array | None = None
    keep: str = "codes"
    recipe: Recipe = DEFAULT

    takes_codes: ClassVar[bool] = True

    def __call__(self, x: jax.Array | Coded) -> jax.Array:
        """As `linear`."""
        return linear(
            x,
            self.kernel,
            kernel_absmax=self.kernel_absmax,
            keep=self.keep,
            recipe=self.recipe,
        )


# ---- in the inputs' own precision ----------------------------------------------------------------


def _in_own_precision(static: _Linear, x: jax.Array | Coded, kernel: jax.Array) -> jax.Array:
    if isinstance(x, Coded) and x.source is not None:
        return _recomputing(static, x, kernel)
    return _times(static, value_of(x), kernel)


def _times(static: _Linear, x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, dims, precision=static.precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputing(static: _Linear, x: Coded, kernel: jax.Array) -> jax.Array:
    """The product, which keeps what its input is computed from."""
    return _times(static, x.value, kernel)


def _recomputing_backward(
    static: _Linear, saved: tuple[Source, jax.Array], g: jax.Array
) -> tuple[Coded, jax.Array]:
    source, kernel = saved
    dx, dw = jax.vjp(partial(_times, static), source.again(), kernel)[1](g)
    return Coded(dx, None, None), dw


_recomputing.defvjp(
    lambda static, x, kernel: (_recomputing(static, x, kernel), (x.source, kernel)),
    _recomputing_backward,
)

# ---- in FP8 --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    static: _Linear, x: jax.Array | Coded, kernel: jax.Array, absmax: jax.Array | None
) -> jax.Array:
    return _forward(static, x, kernel, absmax)[0]


def _forward(
    static: _Linear, x: jax.Array | Coded, kernel: jax.Array, absmax: jax.Array | None
) -> tuple[jax.Array, Any]:
    if isinstance(x, Coded):
        y, *of_kernel = _product(x.value.dtype, x.quantized, kernel, absmax)
        return y, (x.quantized, kernel, *of_kernel)
    codes, of_x = _quantized(x)
    y, *of_kernel = _product(x.dtype, codes, kernel, absmax)
    return y, ((x, of_x), kernel, *of_kernel)


@partial(storage.once, static=0)
def _quantized(x: jax.Array) -> tuple[Quantized, jax.Array]:
    """And the maximum."""
    absmax = matmul.absmax_of(x, None)
    return kernels.quantized(x, absmax), absmax


@storage.once
def _product(
    dtype: Any, codes: Quantized, kernel: jax.Array, absmax: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The product; the kernel's maximum, and the scale of its codes."""
    if absmax is None:
        absmax = weight_absmax(kernel)
    # 8-bit products of GPUs sum over the last axis of both
    turned = quantize_transposed(kernel, None, FORWARD, absmax)
    return multiply(codes, turned, 1, dtype), absmax, turned.scales


@storage.once
def _gradients(
    static: _Linear,
    kept: Any,
    kernel: jax.Array,
    absmax: jax.Array,
    scale: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    recipe = static.recipe
    of_x, like_w = kept if isinstance(kept, Quantized) else None, explicit_sharding(kernel)
    like_x = explicit_sharding(jax.tree.leaves(kept)[0])
    largest = matmul.absmax_of(g, None)
    # else XLA would keep the kernel's codes of the forward pass until here
    kernel, largest = lax.optimization_barrier((kernel, largest))
    codes = {}
    if to := format_of(recipe.weight_gradient):
        codes[to], dw = kernels.multiply_over_tokens(
            of_x or kernels.quantized(*kept), g, largest, to, kernel.dtype, like_w
        )
    else:
        rows = tuple(range(g.ndim - 1))
        x = _values(of_x, g.dtype) if of_x else kept[0]
        dw = lax.dot_general(x, g, ((rows, rows), ((), ())), out_sharding=like_w)
    if to := format_of(recipe.input_gradient):
        of_g = codes.get(to) or kernels.quantized(g, largest, to)
        # a maximum that was found earlier may be less than that of now
        of_kernel = kernels.quantized(kernel, absmax, clip=True)._replace(scales=scale)
        dx = multiply(of_g, of_kernel, 1, g.dtype, sharding=like_x)
    else:
        dims = (((g.ndim - 1,), (1,)), ((), ()))
        dx = lax.dot_general(g, kernel.astype(g.dtype), dims, out_sharding=like_x)
    return dx, dw.astype(kernel.dtype)


def _values(x: Quantized, dtype: Any) -> jax.Array:
    return (x.codes.astype(jnp.float32) * x.scales).astype(dtype)


def _backward(static: _Linear, saved: Any, g: jax.Array) -> tuple[Any, jax.Array, None]:
    dx, dw = _gradients(static, *saved, g)
    of_x: Any = (dx, None)  # nothing for codes
    return Coded(*of_x) if isinstance(saved[0], Quantized) else dx, dw, None


_linear.defvjp(_forward, _backward)
