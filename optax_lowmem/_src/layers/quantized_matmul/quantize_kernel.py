"""GPU kernels that quantize.

XLA reads an array once for its maxima and once more for its codes; these kernels read a row once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays.groups import next_power_of_two
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel
from optax_lowmem._src.kernels.gpu_kernel import Operand, Program, Range
from optax_lowmem._src.layers.quantized_matmul import plain
from optax_lowmem._src.layers.quantized_matmul.plain import Format, Quantized

_PER_WARP = 1024  # numbers per warp
_ROW_ELEMENTS = 4096  # numbers per program, if rows are shorter
_TRANSPOSED_TILE = 64


def _rows_body(
    to: Format, rows: int, program: Program, x_at: Operand, codes_at: Operand, scales_at: Operand
) -> None:
    """Quantize some rows, each with its scale."""
    row = program.index() * rows + lax.iota(jnp.int32, rows)
    lane = lax.iota(jnp.int32, next_power_of_two(x_at.shape[1]))
    part, there = gpu_kernel.part(x_at, row, lane)
    codes, scales = plain.quantize_plain(x_at.load(*part, mask=there), 1, to)
    codes_at.store(*part, values=codes, mask=there)
    part, there = gpu_kernel.part(scales_at, row)
    scales_at.store(*part, values=scales.reshape(rows), mask=there)


@functools.partial(jax.jit, static_argnames=("to", "backend"))
def quantize_rows(x: jax.Array, to: Format, backend: str = "pallas") -> Quantized:
    """Compute `plain.quantize_plain(x, 1, to)` of [rows, width], reading x once."""
    count, width = x.shape
    padded = next_power_of_two(width)
    rows = max(1, _ROW_ELEMENTS // padded)
    warps = min(32, max(4, padded * rows // _PER_WARP))
    codes, scales = gpu_kernel.launch(
        functools.partial(_rows_body, to, rows),
        [x],
        [result_like(x, x.shape, to.dtype), result_like(x, (count,), jnp.float32)],
        (-(-count // rows),),
        warps=warps,
        name="quantize_rows",
        backend=backend,
    )
    return Quantized(codes, scales[:, None])


def store_scale(program: Program, scale_at: Operand, absmax: jax.Array, to: Format) -> None:
    """Write the scale of a tensor's codes to an array [1], in one program of a 2-D grid.

    With XLA this would be a separate launch.
    """
    scale = plain.scales_of(absmax, to)
    first = (program.index(0) == 0) & (program.index(1) == 0)
    scale_at.store(Range(0, 1), values=scale.reshape(1), mask=first.reshape(1))


def _transposed_body(
    to: Format,
    clip: bool,
    program: Program,
    x_at: Operand,
    absmax_at: Operand,
    codes_at: Operand,
    scale_at: Operand,
) -> None:
    lanes = lax.iota(jnp.int32, _TRANSPOSED_TILE)
    row, column = (program.index(axis) * _TRANSPOSED_TILE + lanes for axis in (0, 1))
    part, there = gpu_kernel.part(x_at, row, column)
    absmax = absmax_at.load(0)
    codes = plain.codes_of(x_at.load(*part, mask=there), absmax, to, clip)
    part, there = gpu_kernel.part(codes_at, column, row)
    codes_at.store(*part, values=codes.T, mask=there)
    store_scale(program, scale_at, absmax, to)


@functools.partial(jax.jit, static_argnames=("to", "clip", "backend"))
def quantize_transposed(
    x: jax.Array, absmax: jax.Array, to: Format, clip: bool = False, backend: str = "pallas"
) -> Quantized:
    """Return the codes (by `plain.codes_of`) and scale of the transpose of x [rows, columns]."""
    codes, scale = gpu_kernel.launch(
        functools.partial(_transposed_body, to, clip),
        [x, absmax.reshape(1)],
        [result_like(x, x.shape[::-1], to.dtype), result_like(x, (1,), jnp.float32)],
        tuple(-(-size // _TRANSPOSED_TILE) for size in x.shape),
        warps=4,
        name="quantize_transposed",
        backend=backend,
    )
    return Quantized(codes, scale.reshape(1, 1))
