"""Codes with tokens as the last axis, for dW = X^T G: GPUs multiply 8 bits along the last axis.

As XLA's transposes they would change the layout, and so the speed, of all that is computed before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.core import pallas_tiles
from optax_lowmem._src.core.tiles import result_like
from optax_lowmem._src.switchback.quantized_matmul import Format, Quantized
from optax_lowmem._src.switchback.quantized_matmul import reference as matmul
from optax_lowmem._src.switchback.quantized_matmul.pallas_triton import store_scale

# of a program: 128 bytes in a row of what it writes turned, and of what it reads
ROWS, COLUMNS = 128, {1: 128, 2: 64, 4: 64}


def _body(to: Format | None, columns: int, *refs: Any) -> None:
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


def _call(to: Format | None, x: jax.Array, out: Any, interpret: bool, *more: jax.Array) -> Any:
    columns = COLUMNS[x.dtype.itemsize]
    return pl.pallas_call(
        functools.partial(_body, to, columns),
        out_shape=out,
        grid=(pl.cdiv(x.shape[0], ROWS), pl.cdiv(x.shape[1], columns)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="fp8_turn" if to is None else "fp8_quantize_both",
    )(x, *more)


@functools.partial(jax.jit, static_argnames=("interpret",))
def turn(codes: jax.Array, interpret: bool = False) -> jax.Array:
    """The transpose of codes [rows, columns]."""
    (turned,) = _call(None, codes, (result_like(codes, codes.shape[::-1], codes.dtype),), interpret)
    return turned


@functools.partial(jax.jit, static_argnames=("to", "interpret"))
def quantize_both(
    x: jax.Array, absmax: jax.Array, to: Format, interpret: bool = False
) -> tuple[Quantized, jax.Array]:
    """`reference.quantized` of a matrix, and the transpose of its codes; x is read once."""
    shapes = (x.shape, to.dtype), ((1,), jnp.float32), (x.shape[::-1], to.dtype)
    out = tuple(result_like(x, *shape) for shape in shapes)
    codes, scale, turned = _call(to, x, out, interpret, absmax.reshape(1))
    return Quantized(codes, scale.reshape(1, 1)), turned
