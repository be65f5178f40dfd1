"""Matrix products of 8-bit operands: quantize a row or a tensor, multiply, scale back.

The choice of the implementation is made while tracing.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.core import numerics, platform
from optax_lowmem._src.core.groups import MAX_ELEMENTS

T = TypeVar("T")

# ---- 8-bit formats -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Format:
    """Format that stores numbers between -largest and largest in a byte.

    Attributes:
      name: for example `int8`.
      dtype: of the codes.
      largest: the value that the largest magnitude of a row or tensor is scaled to.
    """

    name: str
    dtype: jnp.dtype
    largest: float

    @property
    def integer(self) -> bool:
        """Return whether codes are integers, whose products are summed exactly in int32."""
        return jnp.issubdtype(self.dtype, jnp.integer)

    def at_unit(self) -> "Format":
        """The format with the largest magnitude scaled to 1 (SwitchBack's simulated float8)."""
        return dataclasses.replace(self, name=f"{self.name}-unit", largest=1.0)


INT8 = Format("int8", jnp.dtype(jnp.int8), 127.0)
E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0)
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0)
FORMATS = {format.name: format for format in (INT8, E4M3, E5M2)}


# ---- quantized operands and their products -------------------------------------------------------

LONGEST_SUM = (2**31 - 1) // 127**2  # of int8 products in int32
# 2^-100: under this a maximum is taken as this, so that its reciprocal stays in f32
_LEAST_BITS = (127 - 100) << 23


class Quantized(NamedTuple):
    """An array as codes * scales.

    Attributes:
      codes: of the format's dtype, of the array's shape.
      scales: f32, of size 1 on the axes that share one.
    """

    codes: jax.Array
    scales: jax.Array


def quantize_plain(x: jax.Array, axes: int | tuple[int, ...] | None, to: Format) -> Quantized:
    r"""Codes round(x * largest / absmax), and absmax / largest (SwitchBack, eq. 1).

    Args:
      x: of any floating dtype.
      axes: what shares a maximum: the axis of the sum (row-wise), or None, all (tensor-wise).
      to: the format.

    Returns:
      Codes and scales; |x - codes * scales| is at most half a unit of the codes. Rounding is to
      nearest, ties to even. All zeros are codes of 0. Where a maximum is not finite, the scale is
      not either, and so the product.
    """
    absmax = absmax_of(x, axes)
    return Quantized(codes_of(x, absmax, to), scales_of(absmax, to))


def absmax_of(x: jax.Array, axes: int | tuple[int, ...] | None) -> jax.Array:
    """f32 maxima of the magnitudes, of size 1 on the axes that share one; 2^-100 at least."""
    over = range(x.ndim) if axes is None else axes
    over = tuple(over) if isinstance(over, Iterable) else (over,)
    over = tuple(axis % x.ndim for axis in over)
    if x.size == 0:
        shape = [1 if axis in over else size for axis, size in enumerate(x.shape)]
        return jnp.full(shape, numerics.from_bits(jnp.uint32(_LEAST_BITS)))
    if len(over) > 1 or (axes is None and over):
        absmax = numerics.absmax(numerics.widen(x), over, _LEAST_BITS)
    else:  # as kernels do
        bits = numerics.absmax_bits(numerics.widen(x), axes=over)
        absmax = numerics.from_bits(jnp.maximum(bits, jnp.uint32(_LEAST_BITS)))
    return lax.expand_dims(absmax, over)


def as_stored(stored: T) -> T:
    """The same codes and scales; XLA on a GPU would go on with what was rounded to FP8 codes."""
    return lax.optimization_barrier(stored)


def codes_of(x: jax.Array, absmax: jax.Array, to: Format, clip: bool = False) -> jax.Array:
    """Codes of values whose maximum is `absmax`, which broadcasts; `clip`: or may be more."""
    x = numerics.widen(x)
    if clip:
        x = jnp.clip(x, -absmax, absmax)
    scaled = x * (jnp.float32(to.largest) / _with_reciprocal(absmax, to))
    if to.integer:
        return numerics.low_byte(numerics.round_to_int(scaled), to.dtype)
    return scaled.astype(to.dtype)


def scales_of(absmax: jax.Array, to: Format) -> jax.Array:
    """Return the scales: the values that a code of 1 represents."""
    return _with_reciprocal(absmax, to) * jnp.float32(1 / to.largest)


def _with_reciprocal(absmax: jax.Array, to: Format) -> jax.Array:
    """Maxima whose reciprocals are normal numbers; codes of larger ones exceed 1, up to 4."""
    most = to.largest * 2.0**126
    return absmax if most >= 2.0**128 else jnp.minimum(absmax, jnp.float32(most))


def multiply_plain(
    a: Quantized,
    b: Quantized,
    sums: int,
    dtype: jnp.dtype,
    transposed: bool = False,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """A product of codes, scaled back.

    Products of integers are summed in int32, exactly, those of float8 in f32; the sums times the
    scales, those of `b` first, in f32, are rounded to `dtype`.

    Args:
      a: the left operand.
      b: the right operand.
      sums: how many axes each is summed over: the last ones, or the first (`transposed`); scales
        are of size 1 there.
      dtype: of the result.
      transposed: whether the sum is over the first axes.
      sharding: of the result, on a mesh with Explicit axes.

    Returns:
      [*the other axes of a, *those of b].

    Raises:
      ValueError: for sums of more int8 products than int32 holds, 133,144.
    """
    axes = [
        tuple(range(sums)) if transposed else tuple(range(x.codes.ndim - sums, x.codes.ndim))
        for x in (a, b)
    ]
    integer = jnp.issubdtype(a.codes.dtype, jnp.integer)
    length = math.prod(a.codes.shape[axis] for axis in axes[0])
    if integer and length > LONGEST_SUM:
        raise ValueError(
            f"a sum of {length:,} int8 products may leave int32, which holds {LONGEST_SUM:,}: use "
            "float8, or keep this product in 16 bits."
        )
    dims = ((axes[0], axes[1]), ((), ()))
    kind = jnp.int32 if integer else jnp.float32
    found = lax.dot_general(
        a.codes, b.codes, dims, preferred_element_type=kind, out_sharding=sharding
    )
    of_a, of_b = (jnp.squeeze(x.scales, own) for x, own in zip((a, b), axes, strict=True))
    rank_a, rank_b = of_a.ndim, of_b.ndim
    of_a = jnp.expand_dims(of_a, tuple(range(rank_a, rank_a + rank_b)))
    of_b = jnp.expand_dims(of_b, tuple(range(rank_a)))
    # the weight's scale first: sums times an activation's may leave f32 where the result does not
    return (found.astype(jnp.float32) * of_b * of_a).astype(dtype)


# ---- the choice of the implementation ------------------------------------------------------------

LONGEST_ROW = 1 << 15  # 32 numbers for each of the 1024 threads of the largest program
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
_NAMES = ", ".join(dtype.name for dtype in _DTYPES)
# rows, columns and length of a sum: TMA tiles of arrays in device memory are whole
_UNITS = (8, 64, 128)
_LEAST = (128, 256, 128)  # under a block of the result most of the kernel's work is on nothing


def _no_kernel(x: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Return the reason why no kernel quantizes an array here, or None where one may."""
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    missing = platform.no_backend_reason()
    if missing is not None:
        return missing
    if x.size == 0 or x.size > MAX_ELEMENTS:
        return f"{x.size} elements, not 1 to {MAX_ELEMENTS}"
    return None


def _rows_reason(x: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Return the reason why the kernel cannot quantize rows of an array here, or None."""
    if x.dtype not in _DTYPES:
        return f"{x.dtype} is not one of {_NAMES}"
    if x.ndim == 0 or x.shape[-1] > LONGEST_ROW:
        return f"rows of {x.shape[-1:]} are longer than {LONGEST_ROW}"
    return _no_kernel(x)


def quantize(x: jax.Array, axes: int | tuple[int, ...] | None, to: Format) -> Quantized:
    """`quantize_plain`; rows (of the last axis) in one kernel that reads them once."""

    def plain(x: jax.Array) -> Quantized:
        return as_stored(quantize_plain(x, axes, to))

    if axes not in (x.ndim - 1, (x.ndim - 1,)) or _rows_reason(x) is not None:
        return plain(x)
    from optax_lowmem._src.switchback import quantized_matmul_triton

    backend = platform.backend()

    def kernel(x: jax.Array) -> Quantized:
        rows = x.reshape(-1, x.shape[-1])
        codes, scales = quantized_matmul_triton.quantize_rows(rows, to, backend=backend)
        return Quantized(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1))

    return platform.on_cuda(kernel, plain, x)


def quantize_transposed(
    w: jax.Array, axes: int | None, to: Format, absmax: jax.Array | None = None
) -> Quantized:
    """The transpose of `quantize_plain(w, axes, to)`, of a matrix.

    Args:
      w: the matrix.
      axes: what shares a maximum.
      to: the format.
      absmax: the maxima, where they were found before; what is beyond them is clipped.
    """
    clip, largest = absmax is not None, absmax_of(w, axes) if absmax is None else absmax

    def plain(w: jax.Array, largest: jax.Array) -> Quantized:
        codes = codes_of(w, largest, to, clip)
        return as_stored(Quantized(codes.T, scales_of(largest, to).T))

    if axes is not None or w.dtype not in _DTYPES or _no_kernel(w) is not None:
        return plain(w, largest)
    from optax_lowmem._src.switchback import quantized_matmul_triton

    backend = platform.backend()

    def kernel(w: jax.Array, largest: jax.Array) -> Quantized:
        return quantized_matmul_triton.quantize_transposed(w, largest, to, clip, backend=backend)

    return platform.on_cuda(kernel, plain, w, largest)


def multiply(
    a: Quantized,
    b: Quantized,
    sums: int,
    dtype: jnp.dtype,
    transposed: bool = False,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """`multiply_plain`; where `product_reason` has none against it, in one kernel."""
    plain = functools.partial(
        multiply_plain, sums=sums, dtype=dtype, transposed=transposed, sharding=sharding
    )
    if product_reason(a, b, sums, dtype, transposed) is not None:
        return plain(a, b)
    from optax_lowmem._src.switchback import quantized_matmul_mosaic

    def kernel(a: Quantized, b: Quantized) -> jax.Array:
        rows = Quantized(*(x.reshape(-1, x.shape[-1]) for x in a))
        found = quantized_matmul_mosaic.multiply(rows, b, dtype)
        return found.reshape(*a.codes.shape[:-1], b.codes.shape[0])

    return platform.on_cuda(kernel, plain, a, b)


def product_reason(
    a: Quantized, b: Quantized, sums: int, dtype: DTypeLike, transposed: bool = False
) -> str | None:
    """Return the reason why a product is left to XLA here, or None.

    Operands are arrays or `jax.ShapeDtypeStruct`s. None means that the kernel for Hopper's tensor
    cores computes the product, and scales the sums before it writes them. XLA also has 8-bit
    products, but first writes their sums, four bytes each.
    """
    reason = platform.no_kernel_reason(a.codes) or platform.not_hopper_reason()
    if reason is not None:
        return reason
    if not platform.has_mosaic_gpu():
        return f"the kernel needs Mosaic GPU of JAX {platform.MOSAIC_GPU} or newer"
    if transposed or sums != 1 or b.codes.ndim != 2:
        return "the kernel sums over the last axis of rows, and of a matrix"
    if jnp.dtype(dtype) not in _DTYPES:
        return f"the kernel's results are {_NAMES}, not {jnp.dtype(dtype).name}"
    kinds = tuple(x.codes.dtype.name for x in (a, b))
    if kinds[0] != kinds[1] and "int8" in kinds:
        return f"the tensor cores do not multiply {kinds[0]} by {kinds[1]}"
    return _sizes_reason(math.prod(a.codes.shape[:-1]), *b.codes.shape)


def _sizes_reason(rows: int, columns: int, length: int) -> str | None:
    """Return the reason why the kernel does not support a product of these sizes, or None."""
    sizes = (rows, columns, length)
    if any(size % unit for size, unit in zip(sizes, _UNITS, strict=True)):
        return f"{sizes} rows, columns and numbers in a sum are not multiples of {_UNITS}"
    if any(size < least for size, least in zip(sizes, _LEAST, strict=True)):
        return f"{sizes} is less than a block of the kernel, {_LEAST}"
    if max(rows * columns, rows * length, columns * length) > MAX_ELEMENTS:
        return f"an array of {sizes} has more than {MAX_ELEMENTS} elements"
    return None
