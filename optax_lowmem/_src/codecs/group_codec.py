"""Encode and decode of one array: in plain jnp, and by the fastest implementation.

The choice is made while tracing and depends on `supported`, never on caught errors.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs import (
    GroupCodec,
    check_groups,
    check_stored,
    decode_array,
    encode_array,
)
from optax_lowmem._src.core import explicit, random
from optax_lowmem._src.core.groups import MAX_ELEMENTS, Tiling
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS

# ---- in plain jnp: the specification, and the path without a kernel ------------------------------


def encode_plain(
    codec: GroupCodec, x: jax.Array, group_size: int, key: jax.Array | None = None, slot: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales, as `codec.storage` has them, of an array [..., n].

    Args:
      codec: how to store it.
      x: values [..., n], f32 or 16-bit.
      group_size: neighbours on the last axis that share a scale.
      key: a uint32 scalar for stochastic rounding, as of `random.leaf_key`; None rounds to nearest.
      slot: which slot of the leaf, for the random bits.
    """
    noise = None if key is None else random.uniforms(key, x.shape, group_size, slot)
    return encode_array(codec, x, group_size, noise)


def decode_plain(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int,
    length: int | None = None,
) -> jax.Array:
    """f32 values of `encode`'s codes and scales, of this `length` where codes share bytes."""
    return decode_array(codec, codes, scales, group_size, length)


# ---- the choice of the implementation ------------------------------------------------------------

IMPLEMENTATIONS = ("xla", *BACKENDS)
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "int8", "uint8")))
_MAX_LANES = 1 << 14  # 16 elements for each thread of the largest program

# traced once for arrays of a shape, where tracing is all that they are for
_encode_by_xla = jax.jit(encode_plain, static_argnames=("codec", "group_size", "slot"))
_decode_by_xla = jax.jit(decode_plain, static_argnames=("codec", "group_size", "length"))


def supported(x: Any, group_size: int, codec: GroupCodec | None = None) -> str | None:
    """Return the reason why the kernels cannot take an array here, or None where they can.

    Args:
      x: values or codes, or their `jax.ShapeDtypeStruct`.
      group_size: neighbours on the last axis that share a scale.
      codec: how it is stored; by default with a code in each byte.
    """
    return platform.no_kernel_reason(x) or _array_reason(x, group_size, codec)


def _array_reason(
    x: Any, group_size: int, codec: GroupCodec | None, backend: str | None = None
) -> str | None:
    """Return the reason why the kernels (of one backend) cannot take an array, or None."""
    if codec is not None and codec.no_tile_reason is not None:
        return codec.no_tile_reason
    missing = platform.no_backend_reason(backend)
    if missing is not None:
        return missing
    if codec is not None and (backend or platform.backend()) == "triton":
        from optax_lowmem._src.codecs import group_codec_triton

        unknown = group_codec_triton.unknown(codec)
        if unknown is not None:
            return f"{codec.name} uses `{unknown}`, which generated Triton has no form for"
    if jnp.dtype(x.dtype) not in _DTYPES:
        return f"{x.dtype} is not one of {', '.join(dtype.name for dtype in _DTYPES)}"
    if x.size == 0:
        return "it has no elements"
    if x.size > MAX_ELEMENTS:
        return f"{x.size} elements are more than 32-bit offsets reach"
    lanes = Tiling(x.shape, group_size, 1).lanes
    return f"a group takes {lanes} lanes, over {_MAX_LANES}" if lanes > _MAX_LANES else None


def _choose(codec: GroupCodec, x: Any, group_size: int, implementation: str | None) -> str:
    """Return the implementation for an array; raise where one was asked for and cannot take it."""
    if implementation is None:
        return "xla" if supported(x, group_size, codec) else platform.backend()
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation must be {names} or None, got {implementation!r}")
    if implementation == "xla":
        return implementation
    reason = platform.no_device_reason() or platform.explicit_axes_reason(x)
    reason = reason or _array_reason(x, group_size, codec, implementation)
    if reason is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot take this {x.dtype}{list(x.shape)} array: "
            f"{reason}. Pass implementation=None to use what can."
        )
    return implementation


def _encode_anywhere(
    codec: GroupCodec, x: jax.Array, group_size: int, key: jax.Array | None, slot: str
) -> tuple[jax.Array, jax.Array]:
    """`encode_plain`, on Explicit axes too, where codes and scales lie as in an optimizer."""
    forms = codec.storage(x.shape, group_size)
    lies = tuple(explicit.of_state(slot, x, form.shape, group_size) for form in forms)
    encode = functools.partial(_with_key, codec, group_size, slot)
    return explicit.left_to_xla(encode, lies, x, key)


def _with_key(codec: GroupCodec, group_size: int, slot: str, x: Any, key: Any) -> Any:
    return encode_plain(codec, x, group_size, key, slot)


def _decode_anywhere(
    codec: GroupCodec, codes: jax.Array, scales: jax.Array, group_size: int, length: int
) -> jax.Array:
    """`decode_plain`, on Explicit axes too, where the values lie as the codes."""

    def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return decode_plain(codec, codes, scales, group_size, length)

    lies = explicit.of_values(codes, length)
    return explicit.left_to_xla(decode, lies, codes, scales)


def encode(
    codec: GroupCodec,
    x: jax.Array,
    group_size: int = 32,
    key: jax.Array | None = None,
    slot: str = "",
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of one array, by the fastest implementation.

    Args:
      codec: how to store it.
      x: values [..., n] of any rank over 0, f32 or 16-bit.
      group_size: neighbours on the last axis that share a scale.
      key: a uint32 scalar for stochastic rounding; None rounds to nearest. The same key gives the
        same bits everywhere.
      slot: which slot of a leaf, where several share a key.
      implementation: `xla`, `pallas` or `triton` (NVIDIA GPUs), or None for what is fastest here.

    Returns:
      (codes, scales [..., ceil(n / group_size)]), as `codec.storage` has them.

    Raises:
      ValueError: for an array without a last axis or elements on it, or where the implementation
        asked for cannot take it.

    Memory: a kernel reads x once and writes codes and scales; nothing else is allocated.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem._src.codecs import group_codec
      >>> codes, scales = group_codec.encode(lowmem.codecs.linear(), jnp.arange(-2.0, 3.0))
      >>> codes.tolist(), scales.tolist()
      ([-127, -64, 0, 64, 127], [2.0])
    """
    check_groups(x, group_size)
    chosen = _choose(codec, x, group_size, implementation)
    if chosen == "xla":
        return _encode_anywhere(codec, x, group_size, key, slot)
    from optax_lowmem._src.codecs import group_codec_triton

    def kernel(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return group_codec_triton.encode(codec, x, group_size, key, slot, backend=chosen)

    def plain(x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _encode_by_xla(codec, x, group_size, key, slot)

    if implementation is not None:
        return kernel(x, key)
    # a computation for the host's CPU may be traced on a machine with a GPU
    return jax.lax.platform_dependent(x, key, cuda=kernel, default=plain)


def decode(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int = 32,
    length: int | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """f32 values of one array's codes and scales, by the fastest implementation.

    Where what uses the values is in the same jit, `implementation="xla"` is faster: the decoding is
    elementwise and XLA fuses it there, so that the f32 values are never stored.

    Args:
      codec: how they were stored.
      codes: as they are stored, of any rank over 0.
      scales: [..., ceil(n / group_size)].
      group_size: neighbours on the last axis that share a scale.
      length: n, where codes share bytes.
      implementation: `xla`, `pallas` or `triton` (NVIDIA GPUs), or None for what is fastest here.

    Raises:
      ValueError: for codes and scales that do not belong together or to the codec, or where the
        implementation asked for cannot take them.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem._src.codecs import group_codec
      >>> codec = lowmem.codecs.softsign()
      >>> stored = group_codec.encode(codec, jnp.array([0.5, 0.0, -1.0]))
      >>> group_codec.decode(codec, *stored)[2].item()
      -1.0
    """
    length = check_stored(codec, codes, scales, group_size, length)
    chosen = _choose(codec, codes, group_size, implementation)
    if chosen == "xla":
        return _decode_anywhere(codec, codes, scales, group_size, length)
    from optax_lowmem._src.codecs import group_codec_triton

    def kernel(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return group_codec_triton.decode(codec, codes, scales, group_size, length, backend=chosen)

    def plain(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _decode_by_xla(codec, codes, scales, group_size, length)

    if implementation is not None:
        return kernel(codes, scales)
    return jax.lax.platform_dependent(codes, scales, cuda=kernel, default=plain)
