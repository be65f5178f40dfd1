"""Keeping activations in FP8 as GPU kernels: Pallas, lowered through Triton.

A group's maximum and its codes come from one read of the array, which XLA reads once for each. A
program has groups as rows of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import groups, numerics, pallas_tiles
from optax_lowmem._src.core.groups import Tile, Tiling, next_power_of_two, result_like
from optax_lowmem._src.fp8_flow import kernels
from optax_lowmem._src.fp8_flow.kernels import Grouped
from optax_lowmem._src.switchback import quantized_matmul as matmul
from optax_lowmem._src.switchback.quantized_matmul import Format, Quantized
from optax_lowmem._src.switchback.quantized_matmul_triton import store_scale

_ELEMENTS = 4096  # of a program of a norm, where rows are shorter
_PER_WARP = 1024


# ---- norms ---------------------------------------------------------------------------------------


def _norm_body(eps: float, exact: bool, size: int, rows: int, *refs: jax.Ref) -> None:
    """Some rows, as [rows * groups, size]; groups that do not exist are zeros."""
    x_ref, scale_ref, codes_ref, scales_ref, inverse_ref, largest_ref = refs
    count, width = x_ref.shape
    wide = next_power_of_two(groups.group_count(width, size))
    shape = (rows * wide, size)
    group = lax.iota(jnp.int32, shape[0])
    line = pl.program_id(0) * rows + lax.div(group, jnp.int32(wide))
    at = lax.rem(group, jnp.int32(wide))
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    column = jnp.broadcast_to(at[:, None] * jnp.int32(size), shape) + lane
    there = (column < width) & (line < count)[:, None]
    place = (jnp.broadcast_to(line[:, None], shape), column)
    x = numerics.widen(plgpu.load(x_ref.at[place], mask=there, other=0.0))
    stored = kernels.store_groups(x)
    plgpu.store(codes_ref.at[place], stored.codes, mask=there)
    exists = (at < scales_ref.shape[1]) & (line < count)
    plgpu.store(scales_ref.at[line, at], stored.scales, mask=exists)
    given = x if exact else kernels.restore_groups(stored)
    scale = plgpu.load(scale_ref.at[column], mask=there, other=0.0)
    squares = jnp.sum(given * given, axis=1).reshape(rows, wide)
    inverse = lax.rsqrt(jnp.sum(squares, axis=1) / width + eps)
    # a NaN is in the sum of its row
    largest = jnp.max(jnp.max(jnp.abs(given * scale), axis=1).reshape(rows, wide), axis=1)
    own = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
    plgpu.store(inverse_ref.at[own], inverse, mask=own < count)
    plgpu.store(largest_ref.at[own], largest * inverse, mask=own < count)


@functools.partial(jax.jit, static_argnames=("eps", "group_size", "exact", "interpret"))
def store_normed(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    group_size: int,
    exact: bool,
    interpret: bool = False,
) -> tuple[Grouped, jax.Array, jax.Array]:
    """`kernels.store_normed_plain` of [rows, n], but the maxima of rows [rows], reading x once."""
    count, width = x.shape
    per_row = groups.group_count(width, group_size)
    wide = next_power_of_two(per_row) * group_size
    rows = max(1, _ELEMENTS // wide)
    shapes = (
        result_like(x, x.shape, jnp.float8_e4m3fn),
        result_like(x, (count, per_row), kernels.SCALE.dtype),
        result_like(x, (count,), jnp.float32),
        result_like(x, (count,), jnp.float32),
    )
    codes, scales, inverse, largest = pl.pallas_call(
        functools.partial(_norm_body, eps, exact, group_size, rows),
        out_shape=shapes,
        grid=(pl.cdiv(count, rows),),
        compiler_params=plgpu.CompilerParams(
            num_warps=min(16, max(4, wide * rows // _PER_WARP)), num_stages=1
        ),
        interpret=interpret,
        name="fp8_store_normed",
    )(x, scale.astype(jnp.float32))
    return Grouped(codes, scales), inverse[:, None], largest


# ---- activation functions ------------------------------------------------------------------------


def _gate_body(activation: str, exact: bool, tiling: Tiling, inputs: int, *refs: jax.Ref) -> None:
    tile = pl.program_id(0)
    values = []
    for i in range(inputs):
        codes_ref, scales_ref = refs[inputs + 2 * i : inputs + 2 * i + 2]
        x = numerics.widen(pallas_tiles.load(tiling, refs[i], tile))
        stored = kernels.store_groups(x)
        pallas_tiles.store(tiling, codes_ref, tile, stored.codes)
        pallas_tiles.store_scales(tiling, scales_ref, tile, stored.scales)
        values.append(x if exact else kernels.restore_groups(stored))
    # f(0) = 0: what does not exist raises no maximum
    bits = numerics.absmax_bits(kernels.gated(activation, *values)).astype(jnp.int32)
    plgpu.store(refs[-1].at[tile], lax.bitcast_convert_type(jnp.max(bits), jnp.float32))


@functools.partial(
    jax.jit, static_argnames=("activation", "group_size", "exact", "tile", "interpret")
)
def store_gated(
    given: tuple[jax.Array, ...],
    activation: str,
    group_size: int,
    exact: bool,
    tile: Tile = Tile(elements=2048),  # noqa: B008 (frozen)
    interpret: bool = False,
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """`kernels.store_gated_plain`, but the maxima of tiles [tiles], reading each input once."""
    first = given[0]
    tiling = Tiling(first.shape, group_size, tile.elements)
    views = [tiling.element_view(x) for x in given]
    of_one = (
        result_like(first, views[0].shape, jnp.float8_e4m3fn),
        result_like(first, (tiling.groups,), kernels.SCALE.dtype),
    )
    *arrays, largest = pl.pallas_call(
        functools.partial(_gate_body, activation, exact, tiling, len(given)),
        out_shape=(*(of_one * len(given)), result_like(first, (tiling.tiles,), jnp.float32)),
        grid=(tiling.tiles,),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="fp8_store_gated",
    )(*views)
    scales = groups.scale_shape(first.shape, group_size)
    stored = tuple(
        Grouped(arrays[i].reshape(first.shape), arrays[i + 1].reshape(scales))
        for i in range(0, len(arrays), 2)
    )
    return stored, largest


# ---- transposed codes, for dW = X^T G ------------------------------------------------------------

# GPUs multiply 8 bits along the last axis. As XLA's transposes these would change the layout, and
# so the speed, of all that is computed before.

# of a program: 128 bytes in a row of what it writes transposed, and of what it reads
ROWS, COLUMNS = 128, {1: 128, 2: 64, 4: 64}


def _transpose_body(to: Format | None, columns: int, *refs: jax.Ref) -> None:
    x_ref, *rest = refs
    row = pl.program_id(0) * ROWS + lax.iota(jnp.int32, ROWS)
    column = pl.program_id(1) * columns + lax.iota(jnp.int32, columns)
    place, there = pallas_tiles.part(x_ref, row, column)
    codes = plgpu.load(place, mask=there, other=0.0)
    if to is not None:
        absmax_ref, codes_ref, scale_ref, *rest = rest
        codes = matmul.codes_of(codes, absmax_ref[0], to)
        plgpu.store(pallas_tiles.part(codes_ref, row, column)[0], codes, mask=there)
        store_scale(scale_ref, absmax_ref[0], to)
    place, there = pallas_tiles.part(rest[0], column, row)
    plgpu.store(place, codes.T, mask=there)


def _transpose_call(
    to: Format | None,
    x: jax.Array,
    out: tuple[jax.ShapeDtypeStruct, ...],
    interpret: bool,
    *more: jax.Array,
) -> Any:
    columns = COLUMNS[x.dtype.itemsize]
    return pl.pallas_call(
        functools.partial(_transpose_body, to, columns),
        out_shape=out,
        grid=(pl.cdiv(x.shape[0], ROWS), pl.cdiv(x.shape[1], columns)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="fp8_transpose" if to is None else "fp8_quantize_both",
    )(x, *more)


@functools.partial(jax.jit, static_argnames=("interpret",))
def transpose(codes: jax.Array, interpret: bool = False) -> jax.Array:
    """The transpose of codes [rows, columns]."""
    (transposed,) = _transpose_call(
        None, codes, (result_like(codes, codes.shape[::-1], codes.dtype),), interpret
    )
    return transposed


@functools.partial(jax.jit, static_argnames=("to", "interpret"))
def quantize_both(
    x: jax.Array, absmax: jax.Array, to: Format, interpret: bool = False
) -> tuple[Quantized, jax.Array]:
    """`kernels.quantized` of a matrix, and the transpose of its codes; x is read once."""
    shapes = (x.shape, to.dtype), ((1,), jnp.float32), (x.shape[::-1], to.dtype)
    out = tuple(result_like(x, *shape) for shape in shapes)
    codes, scale, transposed = _transpose_call(to, x, out, interpret, absmax.reshape(1))
    return Quantized(codes, scale.reshape(1, 1)), transposed
