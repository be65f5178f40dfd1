"""Encode and decode one array, in plain jnp; encode it by a GPU kernel where there is one.

The implementation is chosen at trace time by `unsupported`, never by catching errors. A program of
the kernel handles a tile of whole groups, so it computes a group's maximum and codes from one read
of the array; XLA reads it twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import (
    GroupCodec,
    check_groups,
    check_stored,
    decode_array,
    encode_array,
)
from optax_lowmem._src.arrays.groups import Tile, Tiling
from optax_lowmem._src.arrays.sharding import (
    left_to_xla,
    sharding_of,
    sharding_of_values,
    state_sharding,
)
from optax_lowmem._src.arrays.typing import Shaped
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel, gpu_triton, platform
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.kernels.gpu_kernel import Operand, Program

# ---- in plain jnp: the specification, and the path without a kernel ------------------------------


def encode_plain(
    codec: GroupCodec, x: jax.Array, group_size: int, key: jax.Array | None = None, slot: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Encode as `encode`, with random numbers from a key: the specification of every kernel."""
    uniforms = None if key is None else random.uniforms(key, x.shape, group_size, slot)
    return encode_array(codec, x, group_size, uniforms)


# ---- the kernel ----------------------------------------------------------------------------------

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
        key = key_at[0].load(0)
        row = random.mix(key + gpu_kernel.counters(tiling, tile))[:, None]
        lane = random.lane_seeds(key, lax.iota(jnp.uint32, tiling.lanes))
        uniforms = numerics.uniform(random.slot_bits(row, lane, tiling.lanes, slot))
    codes, scales = codec.encode(x, uniforms)
    gpu_kernel.Place.of(tiling, tile, codec.codes_per_byte).store(codes_at, codec.pack(codes))
    place.store_scales(scales_at, scales)


@functools.cache
def _unknown(codec: GroupCodec) -> str | None:
    """Return an operation of a codec that generated Triton does not support, or None."""
    tiling = Tiling((32,), 32, 128)
    x = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    codes, scales = codec.storage((1, 32), 32)
    scales = jax.ShapeDtypeStruct((1,), scales.dtype)
    key = jax.ShapeDtypeStruct((1,), jnp.uint32)
    encoding = functools.partial(_encode_tile, codec, tiling, "")
    return gpu_triton.missing(encoding, [x, key, codes, scales])


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "slot", "tile", "backend"))
def encode_by_kernel(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int,
    key: jax.Array | None = None,
    slot: str = "",
    tile: Tile = Tile(),  # noqa: B008 (frozen)
    backend: str = "pallas",
) -> tuple[jax.Array, jax.Array]:
    """Run `encode_plain` as one kernel; `backend` is that of `gpu_kernel.launch`."""
    tiling = Tiling(x.shape, group_size, tile.elements)
    plain = functools.partial(encode_plain, codec, group_size=group_size)
    codes, scales = jax.eval_shape(plain, x, key=key)
    viewed = tiling.element_view(x)
    in_bytes = jax.eval_shape(tiling.of_bytes(codec.codes_per_byte).element_view, codes)
    out_shape = (result_like(codes, in_bytes.shape), result_like(scales, (tiling.groups,)))
    body = functools.partial(_encode_tile, codec, tiling, slot)
    operands = [viewed] if key is None else [viewed, key.reshape(1)]
    # a group wider than a tile gets more threads instead of more elements per thread
    warps = min(_MOST_WARPS, tile.warps * max(1, tiling.lanes // tile.elements))
    stored, scale = gpu_kernel.launch(
        body, operands, out_shape, (tiling.tiles,),
        warps=warps, name="group_encode", backend=backend,
    )  # fmt: skip
    return stored.reshape(codes.shape), scale.reshape(scales.shape)


# ---- the choice of the implementation ------------------------------------------------------------

_MAX_LANES = 1 << 14  # 16 elements per thread of the largest program

# jitted, so that the default branch beside a kernel is traced once per shape
_encode_by_xla = jax.jit(encode_plain, static_argnames=("codec", "group_size", "slot"))


def unsupported(x: Shaped, group_size: int, codec: GroupCodec | None = None) -> str | None:
    """Return why no kernel encodes an array on this platform, or None if one does.

    Without a codec, the answer is for any with one code per byte.
    """
    reason = platform.no_array_reason(x)
    if reason is None and codec is not None:
        reason = codec.no_tile_reason
        if reason is None and platform.backend() == "triton":
            unknown = _unknown(codec)
            if unknown is not None:
                reason = f"{codec.name} uses `{unknown}`, which generated Triton does not support"
    if reason is not None:
        return reason
    lanes = Tiling(x.shape, group_size, 1).lanes
    return f"a group has {lanes} lanes, over {_MAX_LANES}" if lanes > _MAX_LANES else None


def encode(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int = 32,
    key: jax.Array | None = None,
    slot: str = "",
) -> tuple[jax.Array, jax.Array]:
    """Return codes and scales of an array [..., n], with the fastest implementation.

    A `key` rounds stochastically, with the same bits in every implementation; `slot` tells the
    slots that share a key apart.

    Memory: a kernel reads x once and writes codes and scales; nothing else is allocated.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem._src.kernels import group_codec
      >>> codes, scales = group_codec.encode(lowmem.codecs.linear(), jnp.arange(-2.0, 3.0))
      >>> codes.tolist(), scales.tolist()
      ([-127, -64, 0, 64, 127], [2.0])
    """
    check_groups(x, group_size)
    if unsupported(x, group_size, codec) is not None:
        # on Explicit axes, codes and scales are sharded as in an optimizer's state
        forms = codec.storage(x.shape, group_size)
        shardings = tuple(
            state_sharding(slot, x.shape, sharding_of(x), form.shape, (group_size,))
            for form in forms
        )
        return left_to_xla(
            lambda x, key: encode_plain(codec, x, group_size, key, slot), shardings, x, key
        )

    def kernel(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return encode_by_kernel(codec, x, group_size, key, slot, backend=platform.backend())

    def plain(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _encode_by_xla(codec, x, group_size, key, slot)

    return with_fallback("cuda", kernel, plain, x, key)


def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int = 32,
    length: int | None = None,
) -> jax.Array:
    """Decode one array's codes and scales to f32 values, by XLA, which fuses this into their use.

    Codes that share bytes need `length`, the values on the last axis.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem._src.kernels import group_codec
      >>> codec = lowmem.codecs.softsign()
      >>> stored = group_codec.encode(codec, jnp.array([0.5, 0.0, -1.0]))
      >>> group_codec.decode(codec, *stored)[2].item()
      -1.0
    """
    length = check_stored(codec, codes, scales, group_size, length)
    return left_to_xla(
        lambda codes, scales: decode_array(codec, codes, scales, group_size, length),
        sharding_of_values(codes, length), codes, scales,
    )  # fmt: skip
