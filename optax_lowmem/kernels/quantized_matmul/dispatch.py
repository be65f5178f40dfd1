"""Which implementation takes a quantisation or a product: decided when tracing."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem.kernels import platform
from optax_lowmem.kernels.quantized_matmul import reference
from optax_lowmem.kernels.quantized_matmul.formats import Format
from optax_lowmem.kernels.quantized_matmul.reference import Quantized
from optax_lowmem.kernels.tiles import MAX_ELEMENTS

LONGEST_ROW = 1 << 15  # 32 numbers for each of the 1024 threads of the largest program
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def _no_kernel(x: Any) -> str | None:
    """Why no kernel takes an array here; None where one may."""
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
    if x.size == 0 or x.size > MAX_ELEMENTS:
        return f"{x.size} elements, not 1 to {MAX_ELEMENTS}"
    return None


def _rows_reason(x: Any) -> str | None:
    """Why the kernel cannot quantise rows of an array here."""
    if x.dtype not in _DTYPES:
        return f"{x.dtype} is not one of {', '.join(dtype.name for dtype in _DTYPES)}"
    if x.ndim == 0 or x.shape[-1] > LONGEST_ROW:
        return f"rows of {x.shape[-1:]} are longer than {LONGEST_ROW}"
    return _no_kernel(x)


def _either(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    # a computation for the host's CPU may be traced on a machine with a GPU
    return jax.lax.platform_dependent(*args, cuda=kernel, default=plain)


def quantize(x: jax.Array, axes: int | tuple[int, ...] | None, to: Format) -> Quantized:
    """`reference.quantize`; rows (of the last axis) in one kernel that reads them once."""
    plain = functools.partial(reference.quantize, axes=axes, to=to)
    if axes not in (x.ndim - 1, (x.ndim - 1,)) or _rows_reason(x) is not None:
        return plain(x)
    from optax_lowmem.kernels.quantized_matmul import pallas_triton

    def kernel(x: jax.Array) -> Quantized:
        codes, scales = pallas_triton.quantize_rows(x.reshape(-1, x.shape[-1]), to)
        return Quantized(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1))

    return _either(kernel, plain, x)


def quantize_transposed(w: jax.Array, axes: int | None, to: Format) -> Quantized:
    """The transpose of `reference.quantize(w, axes, to)`, of a matrix."""

    def plain(w: jax.Array) -> Quantized:
        return Quantized(*(array.T for array in reference.quantize(w, axes, to)))

    if axes is not None or w.dtype not in _DTYPES or _no_kernel(w) is not None:
        return plain(w)
    from optax_lowmem.kernels.quantized_matmul import pallas_triton

    def kernel(w: jax.Array) -> Quantized:
        absmax = reference.absmax_of(w, None)
        codes = pallas_triton.quantize_transposed(w, absmax, to)
        return Quantized(codes, reference.scales_of(absmax, to))

    return _either(kernel, plain, w)


def multiply(
    a: Quantized,
    b: Quantized,
    sums: int,
    dtype: jnp.dtype,
    transposed: bool = False,
    sharding: Any = None,
) -> jax.Array:
    """`reference.multiply`; of int8 matrices in one kernel, with the scaling."""
    plain = functools.partial(
        reference.multiply, sums=sums, dtype=dtype, transposed=transposed, sharding=sharding
    )
    if transposed or sums != 1 or _product_reason(a, b) is not None:
        return plain(a, b)
    from optax_lowmem.kernels.quantized_matmul import pallas_triton

    def kernel(a: Quantized, b: Quantized) -> jax.Array:
        rows = Quantized(*(x.reshape(-1, x.shape[-1]) for x in a))
        found = pallas_triton.multiply(rows, b, dtype)
        return found.reshape(*a.codes.shape[:-1], b.codes.shape[0])

    return _either(kernel, plain, a, b)


def _product_reason(a: Quantized, b: Quantized) -> str | None:
    """Why the kernel cannot multiply these here."""
    if not jnp.issubdtype(a.codes.dtype, jnp.integer):
        return "XLA multiplies float8 as fast"
    from optax_lowmem.kernels.quantized_matmul.tiles import ProductTile

    tile = ProductTile()
    sizes = (math.prod(a.codes.shape[:-1]), b.codes.shape[0], b.codes.shape[-1])
    if any(size % cut for size, cut in zip(sizes, tile.cuts, strict=True)):
        return f"{sizes} are not multiples of {tile.cuts}"
    return _no_kernel(a.codes)
