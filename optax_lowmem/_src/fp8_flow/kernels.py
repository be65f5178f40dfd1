"""Activations in FP8: stored in passing by a norm or an activation function, and brought back.

In plain JAX it is the operations of COAT, section 5; the choice of the implementation is made while
tracing by `supported`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src import quantized_matmul as matmul
from optax_lowmem._src.codecs.base import E8M8Scale
from optax_lowmem._src.core import groups, numerics
from optax_lowmem._src.core.groups import MAX_ELEMENTS, next_power_of_two
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.quantized_matmul import (
    E4M3,
    Format,
    Quantized,
    absmax_of,
    multiply,
    product_reason,
)

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
      scales: [..., groups], maxima of magnitudes in `codecs.base.E8M8Scale`.
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
    return inverse_of(row_sum(jnp.square(x), group_size), x.shape[-1], eps)


def inverse_of(squares: jax.Array, length: int, eps: float) -> jax.Array:
    """`inverse_rms` of rows of a length with these sums of squares."""
    return jax.lax.rsqrt(squares / length + eps)


def row_sum(x: jax.Array, group_size: int) -> jax.Array:
    """Over the last axis, kept."""
    return groups.to_groups(x, group_size).sum(-1).sum(-1, keepdims=True)


def row(w: jax.Array, like: jax.Array) -> jax.Array:
    """[n] as f32 beside [..., n]."""
    return w.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


def store_normed_plain(
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


def store_gated_plain(
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


# ---- the choice of the implementation ------------------------------------------------------------

LONGEST_ROW = 1 << 15
LARGEST_GROUP = 256
_NOT_LOWERED = {"pallas": ("gelu_exact",), "triton": ()}  # Pallas' Triton backend has no erf
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def lowers(activation: str) -> bool:
    """Return whether kernels can compute an activation function."""
    return activation not in _NOT_LOWERED[platform.backend()]


def supported(
    x: jax.Array | jax.ShapeDtypeStruct, group_size: int, whole_rows: bool = False
) -> str | None:
    """Return the reason why the kernels cannot store an array here, or None where they can.

    Args:
      x: [..., n], or its `jax.ShapeDtypeStruct`.
      group_size: neighbours on the last axis that share a scale.
      whole_rows: whether a program needs a whole row, as norms do.
    """
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    missing = platform.no_backend_reason()
    if missing is not None:
        return missing
    if jnp.dtype(x.dtype) not in _DTYPES:
        return f"{x.dtype} is not one of {', '.join(dtype.name for dtype in _DTYPES)}"
    size = math.prod(x.shape)
    if not 0 < size <= MAX_ELEMENTS:
        return f"{size} elements, not 1 to {MAX_ELEMENTS}"
    if group_size != next_power_of_two(group_size) or group_size > LARGEST_GROUP:
        return f"groups of {group_size} are not a power of two up to {LARGEST_GROUP}"
    if whole_rows and next_power_of_two(x.shape[-1]) > LONGEST_ROW:
        return f"rows of {x.shape[-1]} are longer than {LONGEST_ROW}"
    return None


def store_normed(
    x: jax.Array, scale: jax.Array, eps: float, group_size: int, exact: bool, keep: bool = True
) -> tuple[Grouped | None, jax.Array, jax.Array]:
    """`store_normed_plain`, in one kernel that reads x once where there is one.

    Without `keep`, for an `exact` norm, the kernel stores nothing, and None is returned for it.
    """
    static: dict[str, Any] = {"eps": eps, "group_size": group_size, "exact": exact}
    if supported(x, group_size, whole_rows=True) is not None:
        return store_normed_plain(x, scale, **static)
    from optax_lowmem._src.fp8_flow import kernels_triton

    backend = platform.backend()

    def kernel(x: jax.Array, scale: jax.Array) -> tuple[Grouped | None, jax.Array, jax.Array]:
        rows = x.reshape(-1, x.shape[-1])
        stored, inverse, largest = kernels_triton.store_normed(
            rows, scale, **static, backend=backend, keep=keep
        )
        if stored is not None:
            scales = stored.scales.reshape(groups.scale_shape(x.shape, group_size))
            stored = Grouped(stored.codes.reshape(x.shape), scales)
        return stored, inverse.reshape(*x.shape[:-1], 1), _maximum(largest, x)

    def plain(x: jax.Array, scale: jax.Array) -> tuple[Grouped | None, jax.Array, jax.Array]:
        stored, inverse, largest = store_normed_plain(x, scale, **static)
        return stored if keep else None, inverse, largest

    return platform.on_cuda(kernel, plain, x, scale)


def store_gated(
    given: tuple[jax.Array, ...], activation: str, group_size: int, exact: bool, keep: bool = True
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """`store_gated_plain`, in one kernel that reads each input once where there is one.

    Without `keep`, for an `exact` function, the kernel stores nothing, and () is returned for it.
    """
    static: dict[str, Any] = {"group_size": group_size, "exact": exact}
    static["activation"] = activation
    if not lowers(activation) or supported(given[0], group_size) is not None:
        return store_gated_plain(given, **static)
    from optax_lowmem._src.fp8_flow import kernels_triton

    backend = platform.backend()

    def kernel(*given: jax.Array) -> tuple[tuple[Grouped, ...], jax.Array]:
        stored, largest = kernels_triton.store_gated(given, **static, backend=backend, keep=keep)
        return stored, _maximum(largest, given[0])

    def plain(*given: jax.Array) -> tuple[tuple[Grouped, ...], jax.Array]:
        stored, largest = store_gated_plain(given, **static)
        return stored if keep else (), largest

    return platform.on_cuda(kernel, plain, *given)


def transposes_reason(
    x: jax.Array | jax.ShapeDtypeStruct, g: jax.Array | jax.ShapeDtypeStruct, dtype: DTypeLike
) -> str | None:
    """Return the reason why the sum over tokens of X^T G is left to XLA, or None.

    None means that the codes are transposed for a kernel.

    Args:
      x: codes [..., k], or what they are of.
      g: codes [..., m].
      dtype: of the product.
    """
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    missing = platform.no_backend_reason()
    if missing is not None:
        return missing
    tokens = math.prod(x.shape[:-1])
    one: Any = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    of_x: Any = jax.ShapeDtypeStruct((x.shape[-1], tokens), x.dtype)
    of_g: Any = jax.ShapeDtypeStruct((g.shape[-1], tokens), g.dtype)
    return product_reason(Quantized(of_x, one), Quantized(of_g, one), 1, dtype)


def sums_by_kernel(
    x: Quantized, g: jax.Array | jax.ShapeDtypeStruct, to: Format, dtype: DTypeLike
) -> bool:
    """Return whether `multiply_over_tokens` of these has a kernel, which takes transposed codes."""
    like = jax.ShapeDtypeStruct(g.shape, to.dtype)
    return g.dtype in _DTYPES and transposes_reason(x.codes, like, dtype) is None


class Transposed(NamedTuple):
    """Codes [..., k] as [k, tokens], for a kernel that sums over tokens, and their one scale."""

    codes: jax.Array
    scales: jax.Array


_COLUMNS = 256  # of a gradient, where it is not known yet: `multiply_over_tokens` asks again


def quantized_for_products(
    function: Callable[..., jax.Array],
    given: tuple[jax.Array, ...],
    absmax: jax.Array,
    over_tokens: bool,
    now: bool,
) -> tuple[Quantized, jax.Array | None]:
    """`quantized` of a function, and its codes transposed where `multiply_over_tokens` takes these.

    Args:
      function: hashable; elementwise, of f32 arrays that broadcast to the first one.
      given: [..., n] first; others likewise, or of size 1 on the last axis or on all but it.
      absmax: of the result.
      over_tokens: whether such a product may come.
      now: whether one kernel writes both, and reads once what is given. Else the transpose is a
        kernel of its own, which XLA drops where nothing uses it.

    Returns:
      The codes and their scale; the codes [n, tokens], or None.
    """
    first = given[0]

    def plain(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        codes = quantized(function(*map(numerics.widen, given)), absmax)
        return codes, codes.codes.reshape(-1, first.shape[-1]).T

    like = jax.ShapeDtypeStruct((*first.shape[:-1], _COLUMNS), E4M3.dtype)
    if not over_tokens or transposes_reason(first, like, first.dtype) is not None:
        return plain(absmax, *given)[0], None
    from optax_lowmem._src.fp8_flow import kernels_triton

    backend = platform.backend()

    def both(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        x, *beside = (own.reshape(-1, own.shape[-1]) for own in given)
        codes, transposed = kernels_triton.quantize_both(
            x, absmax, E4M3, backend, function, tuple(beside)
        )
        scale = codes.scales.reshape((1,) * first.ndim)
        return Quantized(codes.codes.reshape(first.shape), scale), transposed

    def apart(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        codes, _ = plain(absmax, *given)
        rows = codes.codes.reshape(-1, first.shape[-1])
        return codes, kernels_triton.transpose(rows, backend=backend)

    return platform.on_cuda(both if now else apart, plain, absmax, *given)


def multiply_over_tokens(
    x: Quantized | Transposed,
    g: jax.Array,
    absmax: jax.Array,
    to: Format,
    dtype: jnp.dtype,
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Quantized, jax.Array]:
    """G quantized, and X^T G, the gradient of a weight.

    Args:
      x: codes [..., k] with one scale, or as they were transposed before.
      g: [..., m].
      absmax: of g.
      to: the format of its codes.
      dtype: of the product.
      sharding: of the product, on a mesh with Explicit axes.
    """

    def plain(
        x: Quantized | Transposed, g: jax.Array, absmax: jax.Array
    ) -> tuple[Quantized, jax.Array]:
        codes = quantized(g, absmax, to)
        sums = g.ndim - 1
        if isinstance(x, Transposed):
            x = Quantized(x.codes.T.reshape(*g.shape[:-1], -1), x.scales)
        return codes, multiply(x, codes, sums, dtype, transposed=True, sharding=sharding)

    if not isinstance(x, Transposed) and not sums_by_kernel(x, g, to, dtype):
        return plain(x, g, absmax)
    from optax_lowmem._src.fp8_flow import kernels_triton

    backend = platform.backend()

    def kernel(
        x: Quantized | Transposed, g: jax.Array, absmax: jax.Array
    ) -> tuple[Quantized, jax.Array]:
        one = (1, 1)
        rows_g = g.reshape(-1, g.shape[-1])
        codes, of_g = kernels_triton.quantize_both(rows_g, absmax, to, backend=backend)
        of_x = x.codes
        if not isinstance(x, Transposed):
            of_x = kernels_triton.transpose(of_x.reshape(-1, of_x.shape[-1]), backend=backend)
        product = multiply(
            Quantized(of_x, x.scales.reshape(one)), Quantized(of_g, codes.scales), 1, dtype
        )
        scales = codes.scales.reshape((1,) * g.ndim)
        return Quantized(codes.codes.reshape(g.shape), scales), product

    return platform.on_cuda(kernel, plain, x, g, absmax)


def _maximum(parts: jax.Array, like: jax.Array) -> jax.Array:
    """Group Scaling's second stage, with axes of 1."""
    return absmax_of(parts, None).reshape((1,) * like.ndim)
