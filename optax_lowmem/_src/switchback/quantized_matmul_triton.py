"""Quantizing as GPU kernels: Pallas, lowered through Triton.

XLA reads an array once for its maxima and once more for its codes. Here a row is read once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import pallas_tiles
from optax_lowmem._src.core.groups import next_power_of_two, result_like
from optax_lowmem._src.switchback import quantized_matmul
from optax_lowmem._src.switchback.quantized_matmul import Format, Quantized

_PER_WARP = 1024  # numbers of a row that a warp takes
_ROW_ELEMENTS = 4096  # of a program, where rows are shorter
_TRANSPOSED_TILE = 64


def _rows_body(to: Format, rows: int, *refs: jax.Ref) -> None:
    x_ref, codes_ref, scales_ref = refs
    row = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
    lane = lax.iota(jnp.int32, next_power_of_two(x_ref.shape[1]))
    part, there = pallas_tiles.part(x_ref, row, lane)
    codes, scales = quantized_matmul.quantize_plain(plgpu.load(part, mask=there, other=0.0), 1, to)
    plgpu.store(pallas_tiles.part(codes_ref, row, lane)[0], codes, mask=there)
    part, there = pallas_tiles.part(scales_ref, row)
    plgpu.store(part, scales[:, 0], mask=there)


@functools.partial(jax.jit, static_argnames=("to", "interpret"))
def quantize_rows(x: jax.Array, to: Format, interpret: bool = False) -> Quantized:
    """`quantized_matmul.quantize_plain(x, 1, to)` of [rows, width], reading it once."""
    count, width = x.shape
    padded = next_power_of_two(width)
    rows = max(1, _ROW_ELEMENTS // padded)
    warps = min(32, max(4, padded * rows // _PER_WARP))
    codes, scales = pl.pallas_call(
        functools.partial(_rows_body, to, rows),
        out_shape=(result_like(x, x.shape, to.dtype), result_like(x, (count,), jnp.float32)),
        grid=(pl.cdiv(count, rows),),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="quantize_rows",
    )(x)
    return Quantized(codes, scales[:, None])


def store_scale(ref: jax.Ref, absmax: jax.Array, to: Format) -> None:
    """Writes the scale of a tensor's codes to an array [1], in one program of a grid of two axes.

    By XLA it would be a launch of its own.
    """

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _() -> None:
        ref[0] = quantized_matmul.scales_of(absmax, to)


def _transposed_body(to: Format, clip: bool, *refs: jax.Ref) -> None:
    x_ref, absmax_ref, codes_ref, scale_ref = refs
    lanes = lax.iota(jnp.int32, _TRANSPOSED_TILE)
    row, column = (pl.program_id(axis) * _TRANSPOSED_TILE + lanes for axis in (0, 1))
    part, there = pallas_tiles.part(x_ref, row, column)
    x = plgpu.load(part, mask=there, other=0.0)
    codes = quantized_matmul.codes_of(x, absmax_ref[0], to, clip)
    part, there = pallas_tiles.part(codes_ref, column, row)
    plgpu.store(part, codes.T, mask=there)
    store_scale(scale_ref, absmax_ref[0], to)


@functools.partial(jax.jit, static_argnames=("to", "clip", "interpret"))
def quantize_transposed(
    x: jax.Array, absmax: jax.Array, to: Format, clip: bool = False, interpret: bool = False
) -> Quantized:
    """The transpose of [rows, columns] as codes of `quantized_matmul.codes_of`, and their scale."""
    grid = tuple(pl.cdiv(size, _TRANSPOSED_TILE) for size in x.shape)
    codes, scale = pl.pallas_call(
        functools.partial(_transposed_body, to, clip),
        out_shape=(result_like(x, x.shape[::-1], to.dtype), result_like(x, (1,), jnp.float32)),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="quantize_transposed",
    )(x, absmax.reshape(1))
    return Quantized(codes, scale.reshape(1, 1))
