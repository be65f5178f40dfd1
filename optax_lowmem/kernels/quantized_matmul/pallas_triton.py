"""Quantising, and products with their scales, as GPU kernels: Pallas, lowered through Triton.

XLA reads an array once for its maxima and once more for its codes, and writes the int32 sums of a
product before it scales them. Here a row is read once, and sums are scaled where they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem.kernels.quantized_matmul import reference
from optax_lowmem.kernels.quantized_matmul.formats import Format
from optax_lowmem.kernels.quantized_matmul.reference import Quantized
from optax_lowmem.kernels.quantized_matmul.tiles import ProductTile
from optax_lowmem.kernels.tiles import next_power_of_two, result_like

_PER_WARP = 1024  # numbers of a row that a warp takes
_ROW_ELEMENTS = 4096  # of a program, where rows are shorter
_TRANSPOSED_TILE = 64


# ---- quantising ----------------------------------------------------------------------------------


def _part(ref: Any, *axes: jax.Array) -> tuple[Any, jax.Array]:
    """A reference to elements by the indices of each axis, and which of them exist.

    By indices, since JAX refuses slices that leave an array, also where they are masked.
    """
    shape = tuple(axis.size for axis in axes)
    grid = [lax.broadcast_in_dim(axis, shape, (d,)) for d, axis in enumerate(axes)]
    inside = [index < size for index, size in zip(grid, ref.shape, strict=True)]
    return ref.at[tuple(grid)], functools.reduce(jnp.logical_and, inside)


def _rows_body(to: Format, rows: int, *refs: Any) -> None:
    x_ref, codes_ref, scales_ref = refs
    row = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
    lane = lax.iota(jnp.int32, next_power_of_two(x_ref.shape[1]))
    part, there = _part(x_ref, row, lane)
    codes, scales = reference.quantize(plgpu.load(part, mask=there, other=0.0), 1, to)
    plgpu.store(_part(codes_ref, row, lane)[0], codes, mask=there)
    part, there = _part(scales_ref, row)
    plgpu.store(part, scales[:, 0], mask=there)


@functools.partial(jax.jit, static_argnames=("to", "interpret"))
def quantize_rows(x: jax.Array, to: Format, interpret: bool = False) -> Quantized:
    """`reference.quantize(x, 1, to)` of [rows, width], reading it once."""
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


def _transposed_body(to: Format, *refs: Any) -> None:
    x_ref, absmax_ref, codes_ref = refs
    lanes = lax.iota(jnp.int32, _TRANSPOSED_TILE)
    row, column = (pl.program_id(axis) * _TRANSPOSED_TILE + lanes for axis in (0, 1))
    part, there = _part(x_ref, row, column)
    codes = reference.codes_of(plgpu.load(part, mask=there, other=0.0), absmax_ref[0], to)
    part, there = _part(codes_ref, column, row)
    plgpu.store(part, codes.T, mask=there)


@functools.partial(jax.jit, static_argnames=("to", "interpret"))
def quantize_transposed(
    x: jax.Array, absmax: jax.Array, to: Format, interpret: bool = False
) -> jax.Array:
    """Codes [columns, rows] of `x` [rows, columns], whose maximum is `absmax`."""
    grid = tuple(pl.cdiv(size, _TRANSPOSED_TILE) for size in x.shape)
    return pl.pallas_call(
        functools.partial(_transposed_body, to),
        out_shape=result_like(x, x.shape[::-1], to.dtype),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="quantize_transposed",
    )(x, absmax.reshape(1))


# ---- products ------------------------------------------------------------------------------------


def _product_body(tile: ProductTile, shape: tuple[int, int, int], *refs: Any) -> None:
    a_ref, b_ref, of_a_ref, of_b_ref, out_ref = refs
    m, n, k = shape
    row_tiles, column_tiles = pl.cdiv(m, tile.rows), pl.cdiv(n, tile.columns)
    program = pl.program_id(0)
    of_band = tile.together * column_tiles
    first = program // of_band * tile.together
    band = jnp.minimum(row_tiles - first, tile.together)
    row = (first + program % of_band % band) * tile.rows
    column = program % of_band // band * tile.columns
    integer = jnp.issubdtype(a_ref.dtype, jnp.integer)
    kind = jnp.int32 if integer else jnp.float32

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:
        deep = pl.ds(i * tile.depth, tile.depth)
        a = plgpu.load(a_ref.at[pl.ds(row, tile.rows), deep])
        b = plgpu.load(b_ref.at[pl.ds(column, tile.columns), deep])
        return sums + lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    zeros = jnp.zeros((tile.rows, tile.columns), kind)
    sums = lax.fori_loop(0, k // tile.depth, step, zeros)
    of_a = plgpu.load(of_a_ref.at[pl.ds(row, tile.rows)])
    of_b = plgpu.load(of_b_ref.at[pl.ds(column, tile.columns)])
    found = sums.astype(jnp.float32) * of_b[None, :] * of_a[:, None]  # in the reference's order
    place = (pl.ds(row, tile.rows), pl.ds(column, tile.columns))
    plgpu.store(out_ref.at[place], found.astype(out_ref.dtype))


@functools.partial(jax.jit, static_argnames=("dtype", "tile", "interpret"))
def multiply(
    a: Quantized,
    b: Quantized,
    dtype: jnp.dtype,
    tile: ProductTile = ProductTile(),  # noqa: B008 (frozen)
    interpret: bool = False,
) -> jax.Array:
    """`reference.multiply(a, b, 1, dtype)` of matrices whose sizes the tile divides."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    grid = pl.cdiv(m, tile.rows) * pl.cdiv(n, tile.columns)
    scales = (jnp.broadcast_to(x.scales[:, 0], x.codes.shape[0]) for x in (a, b))
    return pl.pallas_call(
        functools.partial(_product_body, tile, (m, n, k)),
        out_shape=result_like(a.codes, (m, n), dtype),
        grid=(grid,),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="quantized_product",
    )(a.codes, b.codes, *scales)
