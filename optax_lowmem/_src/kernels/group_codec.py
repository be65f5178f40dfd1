"""Encode and decode one array, in plain jnp or by a GPU kernel.

The implementation is chosen at trace time by `unsupported`, never by catching errors. A program of
the kernel handles a tile of whole groups, so it computes a group's maximum and codes from one read
of the array; XLA reads it twice.
"""

import functools
from typing import Any

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
from optax_lowmem._src.arrays.groups import MAX_ELEMENTS, Tile, Tiling
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
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS, Operand, Program

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
def _unknown(codec: GroupCodec) -> str | None:
    """Return an operation of a codec that generated Triton does not support, or None."""
    tiling = Tiling((32,), 32, 128)
    x = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    codes, scales = codec.storage((1, 32), 32)
    scales = jax.ShapeDtypeStruct((1,), scales.dtype)
    key = jax.ShapeDtypeStruct((1,), jnp.uint32)
    encoding = functools.partial(_encode_tile, codec, tiling, "")
    decoding = functools.partial(_decode_tile, codec, tiling)
    missing = gpu_triton.missing(encoding, [x, key, codes, scales])
    return missing or gpu_triton.missing(decoding, [codes, scales, x])


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
    how = _launch_options(tiling, tile, backend)
    stored, scale = gpu_kernel.launch(body, operands, out_shape, name="group_encode", **how)
    return stored.reshape(codes.shape), scale.reshape(scales.shape)


@functools.partial(jax.jit, static_argnames=("codec", "group_size", "length", "tile", "backend"))
def decode_by_kernel(
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


# ---- the choice of the implementation ------------------------------------------------------------

IMPLEMENTATIONS = ("xla", *BACKENDS)
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "int8", "uint8")))
_MAX_LANES = 1 << 14  # 16 elements per thread of the largest program

# jitted, so that the default branch beside a kernel is traced once per shape
_encode_by_xla = jax.jit(encode_plain, static_argnames=("codec", "group_size", "slot"))
_decode_by_xla = jax.jit(decode_array, static_argnames=("codec", "group_size", "length"))


def unsupported(x: Shaped, group_size: int, codec: GroupCodec | None = None) -> str | None:
    """Return why no kernel supports an array on this platform, or None if one does.

    `x` may be values or codes; without a codec, the answer is for any with one code per byte.
    """
    return platform.no_kernel_reason(x) or _array_reason(x, group_size, codec)


def _array_reason(
    x: Shaped, group_size: int, codec: GroupCodec | None, backend: str | None = None
) -> str | None:
    """Return why the kernels (of one backend) do not support an array, or None."""
    if codec is not None and codec.no_tile_reason is not None:
        return codec.no_tile_reason
    missing = platform.no_backend_reason(backend)
    if missing is not None:
        return missing
    if codec is not None and (backend or platform.backend()) == "triton":
        unknown = _unknown(codec)
        if unknown is not None:
            return f"{codec.name} uses `{unknown}`, which generated Triton does not support"
    if jnp.dtype(x.dtype) not in _DTYPES:
        return f"{x.dtype} is not one of {', '.join(dtype.name for dtype in _DTYPES)}"
    if x.size == 0:
        return "it has no elements"
    if x.size > MAX_ELEMENTS:
        return f"{x.size} elements are more than 32-bit offsets can address"
    lanes = Tiling(x.shape, group_size, 1).lanes
    return f"a group has {lanes} lanes, over {_MAX_LANES}" if lanes > _MAX_LANES else None


def _choose(codec: GroupCodec, x: Shaped, group_size: int, implementation: str | None) -> str:
    """Return the implementation for an array; raise if the requested one does not support it."""
    if implementation is None:
        return "xla" if unsupported(x, group_size, codec) else platform.backend()
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation must be {names} or None, got {implementation!r}")
    if implementation == "xla":
        return implementation
    reason = platform.no_gpu_reason() or platform.explicit_axes_reason(x)
    reason = reason or _array_reason(x, group_size, codec, implementation)
    if reason is not None:
        raise ValueError(
            f"implementation={implementation!r} does not support this {x.dtype}{list(x.shape)} "
            f"array: {reason}. Pass implementation=None to select one that does."
        )
    return implementation


def encode(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int = 32,
    key: jax.Array | None = None,
    slot: str = "",
    *,
    implementation: str | None = None,
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
    chosen = _choose(codec, x, group_size, implementation)
    if chosen == "xla":
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
        return encode_by_kernel(codec, x, group_size, key, slot, backend=chosen)

    def plain(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _encode_by_xla(codec, x, group_size, key, slot)

    if implementation is not None:
        return kernel(x, key)
    return with_fallback("cuda", kernel, plain, x, key)


def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int = 32,
    length: int | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Decode one array's codes and scales to f32 values, with the fastest implementation.

    If the values are used in the same jit, `implementation="xla"` is faster: XLA fuses the
    elementwise decoding into their use, so that the f32 values are never stored. Codes that share
    bytes need `length`, the values on the last axis.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem._src.kernels import group_codec
      >>> codec = lowmem.codecs.softsign()
      >>> stored = group_codec.encode(codec, jnp.array([0.5, 0.0, -1.0]))
      >>> group_codec.decode(codec, *stored)[2].item()
      -1.0
    """
    length = check_stored(codec, codes, scales, group_size, length)
    chosen = _choose(codec, codes, group_size, implementation)
    if chosen == "xla":
        return left_to_xla(
            lambda codes, scales: decode_array(codec, codes, scales, group_size, length),
            sharding_of_values(codes, length), codes, scales,
        )  # fmt: skip

    def kernel(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return decode_by_kernel(codec, codes, scales, group_size, length, backend=chosen)

    def plain(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _decode_by_xla(codec, codes, scales, group_size, length)

    if implementation is not None:
        return kernel(codes, scales)
    return with_fallback("cuda", kernel, plain, codes, scales)
