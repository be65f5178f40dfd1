"""Choice of the implementation that stores an activation, made while tracing by `supported`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.core import groups, platform
from optax_lowmem._src.core.tiles import MAX_ELEMENTS, next_power_of_two
from optax_lowmem._src.fp8_flow.kernels import reference
from optax_lowmem._src.fp8_flow.kernels.reference import Grouped
from optax_lowmem._src.switchback.quantized_matmul import (
    Format,
    Quantized,
    multiply,
    product_reason,
)
from optax_lowmem._src.switchback.quantized_matmul.reference import absmax_of

LONGEST_ROW = 1 << 15
LARGEST_GROUP = 256
_NOT_LOWERED = ("gelu_exact",)  # Pallas' Triton backend has no erf
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


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
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
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
    x: jax.Array, scale: jax.Array, eps: float, group_size: int, exact: bool
) -> tuple[Grouped, jax.Array, jax.Array]:
    """`reference.store_normed`, in one kernel that reads x once where there is one."""
    static: dict[str, Any] = {"eps": eps, "group_size": group_size, "exact": exact}
    if supported(x, group_size, whole_rows=True) is not None:
        return reference.store_normed(x, scale, **static)
    from optax_lowmem._src.fp8_flow.kernels import pallas_triton

    def kernel(x: jax.Array, scale: jax.Array) -> tuple[Grouped, jax.Array, jax.Array]:
        rows = x.reshape(-1, x.shape[-1])
        stored, inverse, largest = pallas_triton.store_normed(rows, scale, **static)
        scales = stored.scales.reshape(groups.scale_shape(x.shape, group_size))
        inverse = inverse.reshape(*x.shape[:-1], 1)
        return Grouped(stored.codes.reshape(x.shape), scales), inverse, _maximum(largest, x)

    plain = functools.partial(reference.store_normed, **static)
    return platform.on_cuda(kernel, plain, x, scale)


def store_gated(
    given: tuple[jax.Array, ...], activation: str, group_size: int, exact: bool
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """`reference.store_gated`, in one kernel that reads each input once where there is one."""
    static: dict[str, Any] = {"group_size": group_size, "exact": exact}
    static["activation"] = activation
    if activation in _NOT_LOWERED or supported(given[0], group_size) is not None:
        return reference.store_gated(given, **static)
    from optax_lowmem._src.fp8_flow.kernels import pallas_triton

    def kernel(*given: jax.Array) -> tuple[tuple[Grouped, ...], jax.Array]:
        stored, largest = pallas_triton.store_gated(given, **static)
        return stored, _maximum(largest, given[0])

    def plain(*given: jax.Array) -> tuple[tuple[Grouped, ...], jax.Array]:
        return reference.store_gated(given, **static)

    return platform.on_cuda(kernel, plain, *given)


def transposes_reason(
    x: jax.Array | jax.ShapeDtypeStruct, g: jax.Array | jax.ShapeDtypeStruct, dtype: DTypeLike
) -> str | None:
    """Return the reason why the sum over tokens of X^T G is left to XLA, or None.

    None means that the codes are transposed for a kernel.

    Args:
      x: codes [..., k].
      g: codes [..., m].
      dtype: of the product.
    """
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
    tokens = math.prod(x.shape[:-1])
    one: Any = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    of_x: Any = jax.ShapeDtypeStruct((x.shape[-1], tokens), x.dtype)
    of_g: Any = jax.ShapeDtypeStruct((g.shape[-1], tokens), g.dtype)
    return product_reason(Quantized(of_x, one), Quantized(of_g, one), 1, dtype)


def multiply_over_tokens(
    x: Quantized,
    g: jax.Array,
    absmax: jax.Array,
    to: Format,
    dtype: jnp.dtype,
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Quantized, jax.Array]:
    """G quantized, and X^T G, the gradient of a weight.

    Args:
      x: codes [..., k] with one scale.
      g: [..., m].
      absmax: of g.
      to: the format of its codes.
      dtype: of the product.
      sharding: of the product, on a mesh with Explicit axes.
    """

    def plain(x: Quantized, g: jax.Array, absmax: jax.Array) -> tuple[Quantized, jax.Array]:
        codes = reference.quantized(g, absmax, to)
        sums = g.ndim - 1
        return codes, multiply(x, codes, sums, dtype, transposed=True, sharding=sharding)

    like = jax.ShapeDtypeStruct(g.shape, to.dtype)
    if g.dtype not in _DTYPES or transposes_reason(x.codes, like, dtype) is not None:
        return plain(x, g, absmax)
    from optax_lowmem._src.fp8_flow.kernels import pallas_triton

    def kernel(x: Quantized, g: jax.Array, absmax: jax.Array) -> tuple[Quantized, jax.Array]:
        one = (1, 1)
        codes, of_g = pallas_triton.quantize_both(g.reshape(-1, g.shape[-1]), absmax, to)
        of_x = pallas_triton.transpose(x.codes.reshape(-1, x.codes.shape[-1]))
        product = multiply(
            Quantized(of_x, x.scales.reshape(one)), Quantized(of_g, codes.scales), 1, dtype
        )
        scales = codes.scales.reshape((1,) * g.ndim)
        return Quantized(codes.codes.reshape(g.shape), scales), product

    return platform.on_cuda(kernel, plain, x, g, absmax)


def _maximum(parts: jax.Array, like: jax.Array) -> jax.Array:
    """Group Scaling's second stage, with axes of 1."""
    return absmax_of(parts, None).reshape((1,) * like.ndim)
