"""Master-weight splits: the paper's ULP scheme (Alg. 1), the integer scheme, a float correction.

A split gives (weight, correction) from float32; the joins give float32 back.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from .codecs import ROUNDINGS, Array


@dataclasses.dataclass(frozen=True)
class Format:
    dtype: np.dtype
    mantissa: int  # stored bits
    min_exponent: int  # of the normal numbers; subnormals share its ULP


FORMATS = {
    "bfloat16": Format(np.dtype(ml_dtypes.bfloat16), 7, -126),
    "float16": Format(np.dtype(np.float16), 10, -14),
}
LEVELS = {
    24: 127,
    32: 32767,
}  # Algorithm 1's constants; the text's 2^b - 1 does not fit a signed integer
CORRECTIONS = {24: np.int8, 32: np.int16}


def downcast(w: Array, fmt: str) -> Array:
    """float32 to the 16-bit format, nearest even."""
    with np.errstate(over="ignore"):
        return np.asarray(w, np.float32).astype(FORMATS[fmt].dtype)


def ulp_exponent(p: Array, fmt: str) -> Array:
    """log2 ULP(p): the spacing from |p| to the next number away from zero."""
    form = FORMATS[fmt]
    _, exponent = np.frexp(np.asarray(p).astype(np.float64))  # |p| = f * 2^exponent, f in [1/2, 1)
    exponent = np.where(np.asarray(p).astype(np.float64) == 0, form.min_exponent, exponent - 1)
    return (np.maximum(exponent, form.min_exponent) - form.mantissa).astype(np.int32)


# -- the paper's scheme ------------------------------------------------------------------------


def split_ulp(
    w: Array,
    fmt: str = "bfloat16",
    bits: int = 24,
    rounding: str = "half_away",
    arithmetic: type = np.float64,
) -> tuple[Array, Array]:
    """Algorithm 1, lines 1 to 8. arithmetic=np.float32 rounds every line as a float32 program does.

    A weight that overflows the format, and a NaN, get the correction 0.
    """
    w = np.asarray(w, np.float32)
    p = downcast(w, fmt)
    finite = np.isfinite(p.astype(np.float32))
    with np.errstate(invalid="ignore"):
        e = np.where(finite, w.astype(arithmetic) - p.astype(arithmetic), 0).astype(arithmetic)
    ell = ulp_exponent(np.where(finite, p, np.zeros_like(p)), fmt) - 1
    h = np.floor_divide(-ell, 2)
    e_norm = np.ldexp(np.ldexp(e, h), -ell - h)
    rho = ROUNDINGS[rounding](np.clip(e_norm, -1, 1) * arithmetic(LEVELS[bits]))
    return p, rho.astype(CORRECTIONS[bits])


def join_ulp(
    p: Array, rho: Array, fmt: str = "bfloat16", bits: int = 24, arithmetic: type = np.float64
) -> Array:
    """Algorithm 1, lines 9 to 13; float64 rounds once at the end, float32 at every line."""
    finite = np.isfinite(np.asarray(p).astype(np.float32))
    ell = ulp_exponent(np.where(finite, p, np.zeros_like(p)), fmt) - 1
    h = np.floor_divide(ell, 2)
    e = np.ldexp(
        np.ldexp(np.asarray(rho).astype(arithmetic) / arithmetic(LEVELS[bits]), h), ell - h
    )
    with np.errstate(over="ignore"):
        return (np.asarray(p).astype(arithmetic) + e).astype(np.float32)


# -- the integer scheme ------------------------------------------------------------------------


def canonical_bits(w: Array) -> Array:
    """uint32 bits with every NaN made 0x7fc00000."""
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > 0x7F800000, np.uint32(0x7FC00000), bits)


def split_bits(w: Array, bits: int = 24, noise: Array | None = None) -> tuple[Array, Array]:
    """bf16 weight and a signed int8 (24 bits) or int16 (32 bits) difference of bit patterns.

    With noise, uint8, 24 bits are rounded away from zero where it and what is cut off are at least
    256 together; what is above bf16's largest number is cut off.
    """
    b = canonical_bits(w).astype(np.int64)
    low = bits - 16
    if bits == 24 and noise is not None:
        up = (b & 0xFF) + noise.astype(np.int64) >= 256
        b = (b >> 8) + (up & ((b & 0x7FFFFFFF) < 0x7F7F0000))
    elif bits == 24:  # round to 24 bits, nearest even on bit 8
        b = (b + 0x7F + ((b >> 8) & 1)) >> 8
    p = (b + (1 << (low - 1))) >> low
    correction = (b - (p << low)).astype(CORRECTIONS[bits])
    return p.astype(np.uint16).view(ml_dtypes.bfloat16), correction


def join_bits(p: Array, correction: Array, bits: int = 24) -> Array:
    """Back by one shift and one add; a negative correction at +-0 counts as 0."""
    high = np.ascontiguousarray(p).view(np.uint16).astype(np.int64)
    correction = np.asarray(correction, np.int64)
    correction = np.where(((high & 0x7FFF) == 0) & (correction < 0), 0, correction)
    b = ((high << (bits - 16)) + correction) << (32 - bits)
    return b.astype(np.uint32).view(np.float32)


# -- a correction in the same 16-bit float (Kahan, Zamirai et al.) -----------------------------


def split_float(w: Array, fmt: str = "bfloat16") -> tuple[Array, Array]:
    p = downcast(w, fmt)
    with np.errstate(invalid="ignore"):
        e = np.asarray(w, np.float32) - p.astype(np.float32)
    return p, downcast(np.where(np.isfinite(e), e, 0), fmt)


def join_float(p: Array, correction: Array) -> Array:
    return np.asarray(p).astype(np.float32) + np.asarray(correction).astype(np.float32)


# -- Fig. 3 ------------------------------------------------------------------------------------


def _none(w: Array, fmt: str) -> Array:
    return downcast(w, fmt).astype(np.float32)


RECONSTRUCTIONS = {
    "none": _none,
    "float": lambda w, fmt: join_float(*split_float(w, fmt)),
    "ulp24": lambda w, fmt: join_ulp(*split_ulp(w, fmt, 24), fmt, 24),
    "ulp32": lambda w, fmt: join_ulp(*split_ulp(w, fmt, 32), fmt, 32),
    "bits24": lambda w, fmt: join_bits(*split_bits(w, 24), 24),
    "bits32": lambda w, fmt: join_bits(*split_bits(w, 32), 32),
}


def weights_of_exponent(exponent: int, samples: int = 2**14) -> Array:
    """Positive float32 of one binade (-127: subnormals), mantissas spread evenly."""
    step = np.arange(samples, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(12345)
    mantissa = (step % np.uint64(2**23)).astype(np.uint32)
    w = ((np.uint32(exponent + 127) << np.uint32(23)) | mantissa).view(np.float32)
    return w[w > 0]


def relative_error(scheme: str, w: Array, fmt: str = "bfloat16") -> Array:
    """|rebuilt - w| / |w| in float64, inf where the weight overflows the format."""
    rebuilt = RECONSTRUCTIONS[scheme](w, fmt).astype(np.float64)
    w = np.asarray(w, np.float64)
    return np.abs(rebuilt - w) / np.abs(w)


def error_by_exponent(scheme: str, fmt: str, exponents: range, samples: int = 2**14) -> Array:
    """Mean relative reconstruction error per float32 binade: one line of Figure 3."""
    return np.array(
        [relative_error(scheme, weights_of_exponent(k, samples), fmt).mean() for k in exponents]
    )
