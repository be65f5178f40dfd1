"""Encode and decode of one array as a GPU kernel each: Pallas, lowered through Triton.

A program takes a tile of whole groups, so a group's maximum and its codes come from one read of the
array, which XLA reads twice. The bodies call the codec that the plain form calls.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from optax_lowmem._src.codecs import GroupCodec, group_codec
from optax_lowmem._src.core import numerics, pallas_tiles, random
from optax_lowmem._src.core.groups import Tile, Tiling

_MOST_WARPS = 32  # of a program on a GPU


def _encode_tile(codec: GroupCodec, tiling: Tiling, slot: str, *refs: Any) -> None:
    x_ref, *key_ref, codes_ref, scales_ref = refs
    tile = pl.program_id(0)
    # lanes and groups that do not exist are 0: they cannot raise the maximum of one that does
    x = numerics.widen(pallas_tiles.load(tiling, x_ref, tile))
    noise = None
    if key_ref:
        bits = pallas_tiles.noise(tiling, tile, key_ref[0][0])
        noise = random.join_bits(*bits, tiling.lanes, slot)
    codes, scales = codec.encode(x, noise)
    pallas_tiles.store(tiling.of_bytes(codec.codes_per_byte), codes_ref, tile, codec.pack(codes))
    pallas_tiles.store_scales(tiling, scales_ref, tile, scales)


def _decode_tile(
    codec: GroupCodec, tiling: Tiling, codes_ref: Any, scales_ref: Any, x_ref: Any
) -> None:
    tile = pl.program_id(0)
    stored = pallas_tiles.load(tiling.of_bytes(codec.codes_per_byte), codes_ref, tile)
    codes = codec.unpack(stored, tiling.lanes)
    x = codec.decode(codes, pallas_tiles.load_scales(tiling, scales_ref, tile))
    pallas_tiles.store(tiling, x_ref, tile, x)


def _viewed(like: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A result in the kernel's shape; how it varies over a mesh is kept for `shard_map`."""
    return jax.ShapeDtypeStruct(shape, like.dtype, manual_axis_type=like.manual_axis_type)


def _call(
    body: Callable[..., None],
    tiling: Tiling,
    tile: Tile,
    out_shape: Any,
    name: str,
    interpret: bool,
) -> Callable[..., Any]:
    # a group wider than a tile gets more threads instead of more elements for each
    warps = min(_MOST_WARPS, tile.warps * max(1, tiling.lanes // tile.elements))
    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(tiling.tiles,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "slot", "tile", "interpret"))
def encode(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int,
    key: jax.Array | None = None,
    slot: str = "",
    tile: Tile = Tile(),  # noqa: B008 (frozen)
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`group_codec.encode_plain` in one kernel.

    Args:
      codec: how to store it.
      x: values [..., n], f32 or 16-bit.
      group_size: neighbours on the last axis that share a scale.
      key: a uint32 scalar for stochastic rounding; None rounds to nearest.
      slot: which slot of the leaf, for the random bits.
      tile: how the work is cut.
      interpret: run as plain JAX, on any device.
    """
    tiling = Tiling(x.shape, group_size, tile.elements)
    wanted = functools.partial(group_codec.encode_plain, codec, group_size=group_size)
    codes, scales = jax.eval_shape(wanted, x, key=key)
    viewed = tiling.element_view(x)
    in_bytes = jax.eval_shape(tiling.of_bytes(codec.codes_per_byte).element_view, codes)
    out_shape = (_viewed(codes, in_bytes.shape), _viewed(scales, (tiling.groups,)))
    body = functools.partial(_encode_tile, codec, tiling, slot)
    call = _call(body, tiling, tile, out_shape, "group_encode", interpret)
    stored, scale = call(viewed, *(() if key is None else (key.reshape(1),)))
    return stored.reshape(codes.shape), scale.reshape(scales.shape)


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "length", "tile", "interpret"))
def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int,
    length: int | None = None,
    tile: Tile = Tile(),  # noqa: B008 (frozen)
    interpret: bool = False,
) -> jax.Array:
    """`group_codec.decode_plain` in one kernel.

    Args:
      codec: how they were stored.
      codes: as they are stored.
      scales: [..., ceil(n / group_size)].
      group_size: neighbours on the last axis that share a scale.
      length: n, where codes share bytes.
      tile: how the work is cut.
      interpret: run as plain JAX, on any device.
    """
    wanted = functools.partial(
        group_codec.decode_plain, codec, group_size=group_size, length=length
    )
    values = jax.eval_shape(wanted, codes, scales)
    tiling = Tiling(values.shape, group_size, tile.elements)
    viewed = tiling.of_bytes(codec.codes_per_byte).element_view(codes)
    out_shape = _viewed(values, jax.eval_shape(tiling.element_view, values).shape)
    body = functools.partial(_decode_tile, codec, tiling)
    call = _call(body, tiling, tile, out_shape, "group_decode", interpret)
    return call(viewed, tiling.scale_view(scales)).reshape(values.shape)
