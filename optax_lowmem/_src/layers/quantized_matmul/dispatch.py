"""Quantize and multiply operands, with an implementation that is chosen at trace time."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.groups import MAX_ELEMENTS
from optax_lowmem._src.arrays.typing import Shaped
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.along_axes import Cut, along_axes, broadcast, factors_of, names_of
from optax_lowmem._src.layers.quantized_matmul.plain import (
    Format,
    Quantized,
    absmax_of,
    as_stored,
    codes_of,
    multiply_plain,
    quantize_plain,
    scales_of,
)

LONGEST_ROW = 1 << 15  # 32 numbers per thread of the largest program (1024 threads)
# rows, columns and summed length must be multiples of these: TMA needs whole tiles
_UNITS = (8, 64, 128)
_LEAST = (128, 256, 128)  # below one block of the result the kernel mostly computes padding


def _rows_reason(x: Shaped) -> str | None:
    """Return why the kernel cannot quantize an array's rows on this platform, or None."""
    if x.ndim == 0 or x.shape[-1] > LONGEST_ROW:
        return f"rows of {x.shape[-1:]} are longer than {LONGEST_ROW}"
    return platform.no_array_reason(x)


def quantize(x: jax.Array, axes: int | tuple[int, ...] | None, to: Format) -> Quantized:
    """Compute `quantize_plain`, for rows (the last axis, not -1) in one kernel that reads once."""

    def plain(x: jax.Array) -> Quantized:
        return as_stored(quantize_plain(x, axes, to))

    if axes not in (x.ndim - 1, (x.ndim - 1,)) or _rows_reason(x) is not None:
        return plain(x)
    from optax_lowmem._src.layers.quantized_matmul import quantize_kernel

    backend = platform.backend()

    def kernel(x: jax.Array) -> Quantized:
        rows = x.reshape(-1, x.shape[-1])
        codes, scales = quantize_kernel.quantize_rows(rows, to, backend=backend)
        return Quantized(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1))

    def part(cut: Cut, x: jax.Array) -> Quantized:
        if "k" not in cut:
            return kernel(x)
        absmax = cut.max(absmax_of(x, axes), "k")
        return as_stored(Quantized(codes_of(x, absmax, to), scales_of(absmax, to)))

    names = names_of(x.ndim, "k")
    return along_axes(
        "quantize_rows", kernel, plain, x,
        operands=[names], results=[names, (*names[:-1], None)], axes=factors_of(names, x.shape),
        part=part,
    )  # fmt: skip


def quantize_transposed(
    w: jax.Array, axes: int | None, to: Format, absmax: jax.Array | None = None
) -> Quantized:
    """Return the transpose of `quantize_plain(w, axes, to)` for a matrix w.

    `absmax` are maxima computed before, beyond which values are clipped; None computes them.
    """
    clip, largest = absmax is not None, absmax_of(w, axes) if absmax is None else absmax

    def plain(w: jax.Array, largest: jax.Array) -> Quantized:
        codes = codes_of(w, largest, to, clip)
        return as_stored(Quantized(codes.T, scales_of(largest, to).T))

    if axes is not None or platform.no_array_reason(w) is not None:
        return plain(w, largest)
    from optax_lowmem._src.layers.quantized_matmul import quantize_kernel

    backend = platform.backend()

    def kernel(w: jax.Array, largest: jax.Array) -> Quantized:
        return quantize_kernel.quantize_transposed(w, largest, to, clip, backend=backend)

    return along_axes(
        "quantize_transposed", kernel, plain, w, largest,
        operands=[("k", "m"), (None, None)], results=[("m", "k"), (None, None)],
        axes=factors_of(("k", "m"), w.shape),
    )  # fmt: skip


def multiply(
    a: Quantized,
    b: Quantized,
    sums: int,
    dtype: jnp.dtype,
    transposed: bool = False,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Compute `multiply_plain`, in one kernel if `product_reason` is None."""
    plain = functools.partial(
        multiply_plain, sums=sums, dtype=dtype, transposed=transposed, sharding=sharding
    )
    if product_reason(a.codes, b.codes, sums, dtype, transposed) is not None:
        return plain(a, b)
    from optax_lowmem._src.layers.quantized_matmul import mosaic

    def kernel(a: Quantized, b: Quantized) -> jax.Array:
        rows = Quantized(*(x.reshape(-1, x.shape[-1]) for x in a))
        product = mosaic.multiply(rows, b, dtype)
        return product.reshape(*a.codes.shape[:-1], b.codes.shape[0])

    of_a, of_b = names_of(a.codes.ndim, "k"), ("m", "k")
    result = (*of_a[:-1], "m")

    def part(cut: Cut, a: Quantized, b: Quantized) -> jax.Array:
        if "k" in cut:
            a = a._replace(scales=cut.like_sum(a.scales, of_a))
            b = b._replace(scales=cut.like_sum(b.scales, of_b))
            return plain(a, b, over_devices=lambda x: cut.sum(x, result))
        return multiply(a, b, sums, dtype)

    operands = [of_a, of_a, of_b, of_b]
    return along_axes(
        "multiply", kernel, plain, a, b,
        operands=broadcast(operands, [*a, *b]), results=[result],
        axes=factors_of(of_a, a.codes.shape) | factors_of(of_b, b.codes.shape), part=part,
        adds=True,
    )  # fmt: skip


def product_reason(
    a: Shaped, b: Shaped, sums: int, dtype: DTypeLike, transposed: bool = False
) -> str | None:
    """Return why XLA computes a product of codes on this platform, or None if the kernel does.

    The kernel, for Hopper's tensor cores, scales the sums before it writes them. XLA also
    multiplies in 8 bits, but writes the sums first, at four bytes each. `sums`, `dtype` and
    `transposed` are those of `multiply_plain`.
    """
    reason = platform.no_kernel_reason(a) or platform.not_hopper_reason()
    if reason is not None:
        return reason
    if not platform.has_mosaic_gpu():
        return f"the kernel needs Mosaic GPU of JAX {platform.MOSAIC_GPU} or newer"
    if transposed or sums != 1 or b.ndim != 2:
        return "the kernel sums over the last axis of both operands, and the right one is a matrix"
    if jnp.dtype(dtype) not in platform.FLOATS:
        names = ", ".join(map(str, platform.FLOATS))
        return f"the kernel's results are {names}, not {jnp.dtype(dtype)}"
    kinds = tuple(x.dtype.name for x in (a, b))
    if kinds[0] != kinds[1] and "int8" in kinds:
        return f"the tensor cores do not multiply {kinds[0]} by {kinds[1]}"
    rows, (columns, length) = math.prod(a.shape[:-1]), b.shape
    sizes = (rows, columns, length)
    if any(size % unit for size, unit in zip(sizes, _UNITS, strict=True)):
        return f"{sizes} rows, columns and summed numbers are not multiples of {_UNITS}"
    if any(size < least for size, least in zip(sizes, _LEAST, strict=True)):
        return f"{sizes} rows, columns and summed numbers are less than a block, {_LEAST}"
    if max(rows * columns, rows * length, columns * length) > MAX_ELEMENTS:
        return f"an array of {sizes} has more than {MAX_ELEMENTS} elements"
    return None
