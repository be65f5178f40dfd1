"""Stored forms of a group's scale, and the error bound of an element encoded with it."""

from __future__ import annotations

import numpy as np

from .codecs import Array, Codec, decode, exact_scale, group_view, neighbours, ungroup
from .codecs import encode as encode_groups

E8M8_MIN, E8M8_MAX = 2.0**-126, 2.0**126


def e8m8_encode(scale: Array, noise: Array | None = None) -> Array:
    """uint16 code of the unsigned 8+8-bit float: the f32 bits, clamped in value, rounded at bit 15.

    With noise (uniforms in [0, 1)) the dropped 15 bits are the probability of the next code up.
    """
    value = np.clip(np.asarray(scale, np.float64), E8M8_MIN, E8M8_MAX).astype(
        np.float32
    )  # keeps NaN
    bits = value.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if noise is None:
        return ((bits + np.uint32(0x4000)) >> np.uint32(15)).astype(np.uint16)
    up = np.asarray(noise) * 2.0**15 < (bits & np.uint32(0x7FFF))
    return ((bits >> np.uint32(15)) + up).astype(np.uint16)


def e8m8_decode(code: Array) -> Array:
    bits = np.asarray(code, np.uint16).astype(np.uint32) << np.uint32(15)
    return bits.view(np.float32).astype(np.float64)


def round_scale(scale: Array, storage: str, noise: Array | None = None) -> Array:
    """The float64 value of a scale stored as 'exact', 'f32', 'fp16', 'e8m8' or 'e8m8_up'."""
    scale = np.asarray(scale, np.float64)
    if storage == "exact":
        return scale
    if storage == "e8m8":
        return e8m8_decode(e8m8_encode(scale, noise))
    if storage == "e8m8_up":
        return e8m8_decode(e8m8_encode(scale, np.zeros(scale.shape)))
    dtype = {"f32": np.float32, "fp16": np.float16}[storage]
    with np.errstate(over="ignore"):  # fp16: 65520 and above become inf, under 2^-25 become 0
        return scale.astype(np.float32).astype(dtype).astype(np.float64)


def encode_array(
    codec: Codec,
    x: Array,
    group_size: int = 32,
    *,
    scale: str = "f32",
    codes_by: str = "stored",
    rounding: str = "half_away",
    noise: Array | None = None,
    scale_noise: Array | None = None,
    floor: bool = False,
) -> tuple[Array, Array]:
    """Codes in x's shape and stored scales (..., n_groups).

    codes_by="stored" divides by the scale that decode will use; "exact" by the unrounded maximum,
    as the paper's pseudocode reads (its scale is cast to FP16 only when it is stored).
    """
    groups = group_view(np.asarray(x, np.float64), group_size)
    exact = exact_scale(codec, groups)
    stored = round_scale(exact, scale, scale_noise)
    used = stored if codes_by == "stored" else exact
    noise = None if noise is None else group_view(noise, group_size)
    codes, _ = encode_groups(codec, groups, used, rounding=rounding, noise=noise, floor=floor)
    return ungroup(codes, np.shape(x)[-1]), stored


def decode_array(codec: Codec, codes: Array, scales: Array, group_size: int = 32) -> Array:
    """float64 values in the codes' shape."""
    return ungroup(decode(codec, group_view(codes, group_size), scales), np.shape(codes)[-1])


def error_bound(
    codec: Codec, x: Array, scale: Array, kind: str = "nearest", floor: bool = False
) -> Array:
    """The largest |decode(encode(y)) - y| over the y between the same decoded neighbours as x.

    kind="nearest": rounding on the code axis, whose midpoint is not the midpoint of the decoded
    values where phi is curved; "half_gap": nearest decoded value; "gap": stochastic. What x exceeds
    the end code by is added, and with `floor` the first interval counts as a whole gap.
    """
    lo, hi, _ = neighbours(codec, x, scale)
    lo, hi = lo.astype(np.float64), hi.astype(np.float64)
    below, above = decode(codec, lo, scale), decode(codec, hi, scale)
    if kind == "gap":
        bound = above - below
    elif kind == "half_gap":
        bound = (above - below) / 2
    else:
        middle = decode(codec, (lo + hi) / 2, scale)
        bound = np.maximum(middle - below, above - middle)
    if floor:
        bound = np.where((lo == 0) & (np.asarray(x) > 0), above - below, bound)
    top = decode(codec, np.full_like(lo, codec.levels), scale)
    return bound + np.maximum(np.abs(x) - top, 0.0)
