"""Codecs of optimizer slots, the formats of their scales, and splits of master weights."""

import dataclasses
import re

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.affine import affine, affine_paper
from optax_lowmem._src.arrays.codecs.base import GroupCodec, Layout, StoredSlot
from optax_lowmem._src.arrays.codecs.companded import (
    CompandedCodec,
    linear,
    linear4,
    linear_paper,
    softsign,
    softsign4,
    softsign_paper,
    sqrt,
    sqrt4,
    sqrt_paper,
)
from optax_lowmem._src.arrays.codecs.expansion import (
    expanded,
    expanded_dynamic,
    expanded_e4m3,
    expanded_e5m2,
)
from optax_lowmem._src.arrays.codecs.float8 import dynamic, e4m3, e5m2
from optax_lowmem._src.arrays.codecs.mapped import log4, normal4
from optax_lowmem._src.arrays.codecs.master import (
    SPLITS,
    BitSplit,
    MasterSplit,
    UlpSplit,
    master_split,
    split_of,
)
from optax_lowmem._src.arrays.compiled import compiled

__all__ = [
    "BitSplit", "CODECS", "CompandedCodec", "GroupCodec", "Layout", "MasterSplit", "NAMES",
    "SPLITS", "StoredSlot", "UlpSplit", "affine", "affine_paper", "check_groups", "check_stored",
    "decode_array", "dynamic", "e4m3", "e5m2", "encode_array", "expanded", "expanded_dynamic",
    "expanded_e4m3", "expanded_e5m2", "linear", "linear4", "linear_paper", "log4",
    "master_split", "normal4", "softsign", "softsign4", "softsign_paper", "split_of", "sqrt",
    "sqrt4", "sqrt_paper",
]  # fmt: skip

_FLOATS = (e4m3, e5m2, dynamic, expanded_e4m3, expanded_e5m2, expanded_dynamic)
CODECS: dict[str, GroupCodec] = {
    codec.name: codec
    for codec in (
        softsign(), softsign_paper(), sqrt(), sqrt_paper(), linear(), linear_paper(),
        linear(signed=False), linear_paper(signed=False), linear4(), linear4(signed=False),
        softsign4(), sqrt4(), normal4(), log4(), affine(), affine_paper(),
        *(build(signed) for build in _FLOATS for signed in (True, False)),
    )
}  # fmt: skip


def _pairs() -> dict[str, tuple[GroupCodec, GroupCodec]]:
    """Return the name of each codec's function -> its signed and its unsigned form, if any."""
    forms: dict[str, list[GroupCodec]] = {}
    for codec in CODECS.values():
        name = re.sub("-u?int8|-u?int(?=4)", "", codec.name).replace("-", "_")
        forms.setdefault(name, []).append(codec)
    return {name: (codecs[0], codecs[-1]) for name, codecs in forms.items()}


# short name -> the codecs of slots with and without negative values
NAMES: dict[str, tuple[GroupCodec, GroupCodec]] = {
    "int8": (softsign(), sqrt()),
    "int4": (softsign4(), dataclasses.replace(linear4(signed=False), scale=softsign4().scale)),
    **_pairs(),
}


def check_groups(x: jax.Array, group_size: int) -> None:
    """Raise for an array or group size that has no groups."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"an array of shape {x.shape} has no groups: its last axis must have elements "
            "(reshape a 0-d array to (1,))"
        )
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")


def check_stored(
    codec: GroupCodec, codes: jax.Array, scales: jax.Array, group_size: int, length: int | None
) -> int:
    """Check codes and scales; return the length of the last axis of their values."""
    check_groups(codes, group_size)
    if length is None:
        if codec.codes_per_byte > 1:
            raise ValueError(
                f"{codec.name} stores {codec.codes_per_byte} codes per byte, so {codes.shape[-1]} "
                "bytes do not determine the length of the values' last axis: pass length="
            )
        length = codes.shape[-1]
    forms = codec.storage((*codes.shape[:-1], length), group_size)
    given = StoredSlot(codes, scales)
    if not given.is_like(forms):
        raise ValueError(
            f"got {given.text}, but {codec.name} in groups of {group_size} stores {forms.text}: "
            "pass the codec and group_size that encoded them"
        )
    return length


@compiled
def encode_array(
    codec: GroupCodec, x: jax.Array, group_size: int, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Encode an array of rank 1 or more as codes and scales, shaped as in `codec.storage`.

    Args:
      codec: the codec to store it with.
      x: values [..., n], f32 or 16-bit.
      group_size: neighbours on the last axis that share a scale.
      noise: uniforms in [0, 1) of x's shape; None rounds to nearest.

    Raises:
      TypeError: if x is neither f32 nor 16-bit.
      ValueError: if x has no last axis or no elements on it.
    """
    check_groups(x, group_size)
    if x.dtype != jnp.float32 and not numerics.is_narrow(x.dtype):
        raise TypeError(f"codecs store f32 or 16-bit values, got {x.dtype}: cast them to f32")
    x = numerics.widen(x)
    codec.check_group_size(group_size)
    layout = Layout(group_size, x.shape[-1])
    stored, divisor = codec.measure(layout.to_groups(x))
    return codec.pack(codec.quantize(x, layout.to_elements(divisor), noise)), stored


@compiled
def decode_array(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    group_size: int,
    length: int | None = None,
) -> jax.Array:
    """Decode the codes and scales of `encode_array` to f32 values.

    Args:
      codec: the codec that encoded them.
      codes: stored codes, [..., n] if they have 8 bits.
      scales: [..., ceil(n / group_size)].
      group_size: neighbours on the last axis that share a scale.
      length: n; required if a byte stores several codes.

    Raises:
      ValueError: if codes and scales do not match each other or the codec.
    """
    length = check_stored(codec, codes, scales, group_size, length)
    unit = Layout(group_size, length).to_elements(codec.units(scales))
    return codec.dequantize(codec.unpack(codes, length), unit)
