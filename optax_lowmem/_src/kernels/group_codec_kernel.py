"""GPU kernels that encode and decode one array.

A program handles a tile of whole groups, so it computes a group's maximum and codes from one read
of the array; XLA reads it twice. Kernel bodies call the same codec as the plain implementation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import GroupCodec, decode_array
from optax_lowmem._src.arrays.groups import Tile, Tiling
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel, gpu_triton, group_codec
from optax_lowmem._src.kernels.gpu_kernel import Operand, Program

_MOST_WARPS = 32  # per program


def _encode_tile(
    codec: GroupCodec, tiling: Tiling, slot: str, program: Program, *arrays: Operand
) -> None:
    x_at, *key_at, codes_at, scales_at = arrays
    tile = program.index()
    place = gpu_kernel.Place.of(tiling, tile)
    # lanes and groups of padding are 0, so they cannot raise the maximum of a real group
    x = numerics.widen(place.load(x_at))
    uniforms = None
    if key_at:
        seeds = gpu_kernel.seeds(tiling, tile, key_at[0].load(0))
        uniforms = numerics.uniform(random.slot_bits(*seeds, tiling.lanes, slot))
    codes, scales = codec.encode(x, uniforms)
    gpu_kernel.Place.of(tiling, tile, codec.codes_per_byte).store(codes_at, codec.pack(codes))
    place.store_scales(scales_at, scales)


def _decode_tile(
    codec: GroupCodec,
    tiling: Tiling,
    program: Program,
    codes_at: Operand,
    scales_at: Operand,
    x_at: Operand,
) -> None:
    tile = program.index()
    place, of_codes = (
        gpu_kernel.Place.of(tiling, tile, each) for each in (1, codec.codes_per_byte)
    )
    codes = codec.unpack(of_codes.load(codes_at), tiling.lanes)
    place.store(x_at, codec.decode(codes, place.load_scales(scales_at)))


def _launch_options(tiling: Tiling, tile: Tile, backend: str) -> dict[str, Any]:
    """Return the grid, warps and backend, as arguments of `gpu_kernel.launch`."""
    # a group wider than a tile gets more threads instead of more elements per thread
    warps = min(_MOST_WARPS, tile.warps * max(1, tiling.lanes // tile.elements))
    return {"grid": (tiling.tiles,), "warps": warps, "backend": backend}


@functools.cache
def unknown(codec: GroupCodec) -> str | None:
    """Return an operation of a codec that generated Triton does not support, or None."""
    tiling = Tiling((32,), 32, 128)
    x = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    codes, scales = codec.storage((1, 32), 32)
    scales = jax.ShapeDtypeStruct((1,), scales.dtype)
    key = jax.ShapeDtypeStruct((1,), jnp.uint32)
    encode = functools.partial(_encode_tile, codec, tiling, "")
    decode = functools.partial(_decode_tile, codec, tiling)
    return gpu_triton.missing(encode, [x, key, codes, scales]) or gpu_triton.missing(
        decode, [codes, scales, x]
    )


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "slot", "tile", "backend"))
def encode(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int,
    key: jax.Array | None = None,
    slot: str = "",
    tile: Tile = Tile(),  # noqa: B008 (frozen)
    backend: str = "pallas",
) -> tuple[jax.Array, jax.Array]:
    """Run `group_codec.encode_plain` as one kernel; `backend` is that of `gpu_kernel.launch`."""
    tiling = Tiling(x.shape, group_size, tile.elements)
    plain = functools.partial(group_codec.encode_plain, codec, group_size=group_size)
    codes, scales = jax.eval_shape(plain, x, key=key)
    viewed = tiling.element_view(x)
    in_bytes = jax.eval_shape(tiling.of_bytes(codec.codes_per_byte).element_view, codes)
    out_shape = (result_like(codes, in_bytes.shape), result_like(scales, (tiling.groups,)))
    body = functools.partial(_encode_tile, codec, tiling, slot)
    operands = [viewed] if key is None else [viewed, key.reshape(1)]
    how = _launch_options(tiling, tile, backend)
    stored, scale = gpu_kernel.launch(body, operands, out_shape, name="group_encode", **how)
    return stored.reshape(codes.shape), scale.reshape(scales.shape)


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "length", "tile", "backend"))
def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int,
    length: int | None = None,
    tile: Tile = Tile(),  # noqa: B008 (frozen)
    backend: str = "pallas",
) -> jax.Array:
    """Run `decode_array` as one kernel; `backend` is that of `gpu_kernel.launch`."""
    plain = functools.partial(decode_array, codec, group_size=group_size, length=length)
    values = jax.eval_shape(plain, codes, scales)
    tiling = Tiling(values.shape, group_size, tile.elements)
    viewed = tiling.of_bytes(codec.codes_per_byte).element_view(codes)
    out_shape = result_like(values, jax.eval_shape(tiling.element_view, values).shape)
    body = functools.partial(_decode_tile, codec, tiling)
    operands, how = [viewed, scales.reshape(-1)], _launch_options(tiling, tile, backend)
    (x,) = gpu_kernel.launch(body, operands, [out_shape], name="group_decode", **how)
    return x.reshape(values.shape)
