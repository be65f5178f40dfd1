"""FP8 formats, the dynamic map and dynamic range expansion in float64, from the papers.

COAT, sections 3 and 4.2 and appendices F and G.4; the OCP 8-bit floating point specification;
Dettmers et al., "8-bit Optimizers via Block-wise Quantization". A table holds the non-negative
values of a format in order: its index is a code. Groups are arrays (..., n_groups, G) with
statistics (..., n_groups).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


# -- formats -----------------------------------------------------------------------------------


def minifloat_table(exponent_bits: int, mantissa_bits: int, reserved: int) -> Array:
    """Magnitudes of an IEEE-like 8-bit float but the `reserved` highest patterns (Inf, NaN)."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for pattern in range(128 - reserved):
        exponent, mantissa = divmod(pattern, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


def dynamic_map(signed: bool) -> Array:
    """The published map: 256 numbers from -1 (signed) or 0 to 1."""
    data = [0.0, 1.0]
    for i in range(7):
        boundaries = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = (boundaries[:-1] + boundaries[1:]) / 2 * 10.0 ** (i - 6)
        data += [*means, *(-means if signed else ())]
    return np.sort(data)


def dynamic_table(signed: bool) -> Array:
    """Its magnitudes; in the signed map 1 replaces 0.993, which has it above zero only."""
    table = dynamic_map(signed)
    table = table[table >= 0]
    return np.delete(table, -2) if signed else table


def table_of(kind: str, signed: bool) -> Array:
    """Of a format, as shares of its largest value."""
    if kind == "dynamic":
        return dynamic_table(signed)
    table = minifloat_table(4, 3, 1) if kind == "e4m3" else minifloat_table(5, 2, 4)
    return table / table[-1]


# -- rounding ----------------------------------------------------------------------------------


def nearest(table: Array, ratio: Array) -> Array:
    """Codes of magnitudes in [0, 1], to nearest."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, ratio, side="right")


def neighbours(values: Array, x: Array) -> tuple[Array, Array, Array]:
    """(lo, hi, P(up)) of magnitudes x among the decoded values [..., codes] of their groups."""
    top = values.shape[-1] - 1
    lo = (values[..., None, :] <= x[..., None]).sum(-1) - 1
    lo = np.clip(lo, 0, top)
    hi = np.minimum(lo + 1, top)
    below, above = (np.take_along_axis(values, code, -1) for code in (lo, hi))
    gap = np.where(above > below, above - below, 1.0)
    return lo, hi, np.clip((x - below) / gap, 0, 1) * (above > below)


# -- expansion ---------------------------------------------------------------------------------


def dynamic_range(x: Array) -> Array:
    """R = max / min of the magnitudes of each group that are not 0 (definition 1); 1 for none."""
    magnitude = np.abs(np.float64(x))
    low = np.min(np.where(magnitude > 0, magnitude, np.inf), axis=-1)
    high = np.max(magnitude, axis=-1)
    return np.where(high > 0, high / np.where(high > 0, low, 1), 1.0)


def exponent(table: Array, ratio: Array) -> Array:
    """k = log_R(R_format); infinite for R = 1."""
    with np.errstate(divide="ignore"):
        return np.log2(table[-1] / table[1]) / np.log2(ratio)


def expanded(x: Array, absmax: Array, k: Array) -> Array:
    """f(|x|) over f(max), in [0, 1]."""
    top = np.where(absmax > 0, absmax, 1.0)[..., None]
    return np.minimum(np.abs(np.float64(x)) / top, 1.0) ** k[..., None]


def contracted(ratio: Array, absmax: Array, k: Array) -> Array:
    """The inverse of `expanded`, for any shape behind that of the groups."""
    return absmax[..., None] * ratio ** (1 / k[..., None])


def round_trip(table: Array, x: Array) -> Array:
    """Decoded values as the paper has them, normalised by C = sqrt(min max) (appendix G.4).

    Groups need two different magnitudes and no zeros. The scale maps max^k to the largest value.
    """
    magnitude = np.abs(np.float64(x))
    centre = np.sqrt(magnitude.min(-1, keepdims=True) * magnitude.max(-1, keepdims=True))
    k = exponent(table, dynamic_range(x))[..., None]
    powered = (magnitude / centre) ** k
    scale = powered.max(-1, keepdims=True)
    back = (table[nearest(table, powered / scale)] * scale) ** (1 / k)
    return np.sign(x) * back * centre
