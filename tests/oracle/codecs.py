"""Group codecs in float64, from Algorithms 2 and 3 and eq. 3 and 4 of the FlashOptim paper.

Everything works on a group view: an array (..., n_groups, G) with scales (..., n_groups).
Arithmetic is float64, so a result is within about 1e-16 relative of the exact one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Codec:
    """The scale is the maximum of `pre`; `compress` and `expand` are phi and its inverse."""

    name: str
    signed: bool
    pre: Callable[[Array], Array]
    post: Callable[[Array], Array]
    compress: Callable[[Array], Array]
    expand: Callable[[Array], Array]
    bits: int = 8

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def lowest(self) -> int:
        return -self.levels if self.signed else 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int8 if self.signed else np.uint8)


def _same(x: Array) -> Array:
    return x


def _root(x: Array) -> Array:
    return np.sqrt(np.maximum(x, 0.0))  # maximum keeps NaN


linear = Codec("linear", True, _same, _same, _same, _same)
linear_unsigned = Codec("linear_unsigned", False, _same, _same, _same, _same)
linear4 = Codec("linear4", True, _same, _same, _same, _same, bits=4)
linear4_unsigned = Codec("linear4_unsigned", False, _same, _same, _same, _same, bits=4)
softsign = Codec(
    "softsign", True, _same, _same, lambda r: 2 * r / (1 + np.abs(r)), lambda z: z / (2 - np.abs(z))
)
sqrt = Codec("sqrt", False, _root, np.square, _same, _same)
softsign4 = dataclasses.replace(softsign, name="softsign4", bits=4)
sqrt4 = dataclasses.replace(sqrt, name="sqrt4", bits=4)


def mapped(name: str, signed: bool, table: Array) -> Codec:
    """4-bit codec whose code k stands for table[k] of the maximum, linear in between."""
    places = np.linspace(0, 1, len(table))

    def compress(r: Array) -> Array:
        return np.copysign(np.interp(np.abs(r), table, places), r)

    def expand(z: Array) -> Array:
        return np.copysign(np.interp(np.abs(z), places, table), z)

    return Codec(name, signed, _same, _same, compress, expand, bits=4)


def normal_table() -> Array:
    """NF4's magnitudes below 0: means of neighbouring quantiles, as its authors compute them."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    quantiles = [statistics.NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    return np.array([0.0, *reversed(quantiles)]) / quantiles[0]


normal4 = mapped("normal4", True, normal_table())
log4 = mapped("log4", False, np.array([0.0, *2.0 ** np.arange(-14.0, 1)]))
_EIGHT = (linear, linear_unsigned, softsign, sqrt)
_FOUR = (linear4, linear4_unsigned, softsign4, sqrt4, normal4, log4)
CODECS = {c.name: c for c in (*_EIGHT, *_FOUR)}


# -- groups ------------------------------------------------------------------------------------


def group_view(x: Array, group_size: int) -> Array:
    """(..., last) -> (..., ceil(last / G), G); the last group is filled with zeros."""
    x = np.asarray(x)
    last = x.shape[-1]
    n_groups = -(-last // group_size)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, n_groups * group_size - last)]
    return np.pad(x, padding).reshape(*x.shape[:-1], n_groups, group_size)


def ungroup(groups: Array, last: int) -> Array:
    """The inverse of `group_view` for a last axis of length `last`."""
    return groups.reshape(*groups.shape[:-2], -1)[..., :last]


# -- scales ------------------------------------------------------------------------------------


def exact_scale(codec: Codec, x: Array) -> Array:
    """The group maximum in float64; NaN where the group holds a NaN or an infinity."""
    top = np.max(np.abs(codec.pre(np.asarray(x, np.float64))), axis=-1)
    return np.where(np.isfinite(top), top, np.nan)


# -- rounding ----------------------------------------------------------------------------------


def round_half_away(x: Array) -> Array:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def round_half_up(x: Array) -> Array:
    """floor(x + 0.5), what the flashoptim package does: -63.5 becomes -63."""
    return np.floor(x + 0.5)


ROUNDINGS = {"half_away": round_half_away, "flashoptim": round_half_up, "half_even": np.rint}


# -- encode and decode -------------------------------------------------------------------------


def decode(codec: Codec, codes: Array, scale: Array) -> Array:
    """Codes (whole or, for midpoints, fractional) and scales to float64 values."""
    z = np.asarray(codes, np.float64) / codec.levels
    with np.errstate(invalid="ignore", over="ignore"):
        return codec.post(codec.expand(z) * np.asarray(scale, np.float64)[..., None])


def companded(codec: Codec, x: Array, scale: Array) -> Array:
    """Compute x's position in codes: phi(x / s) times the largest one, clipped to the ends."""
    s = np.asarray(scale, np.float64)[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(s > 0, codec.pre(np.asarray(x, np.float64)) / s, 0.0)
    ratio = np.nan_to_num(np.clip(ratio, -1.0 if codec.signed else 0.0, 1.0), nan=0.0)
    return codec.compress(ratio) * codec.levels


def neighbours(codec: Codec, x: Array, scale: Array) -> tuple[Array, Array, Array]:
    """(lo, hi, p_up): dec(lo) <= x < dec(hi), P(up) = (x - dec(lo)) / (dec(hi) - dec(lo)).

    hi == lo at the top code; x beyond the scale counts as the end code's value.
    """
    top = codec.levels
    lo = np.clip(np.floor(companded(codec, x, scale)), codec.lowest, top)
    shape = (*np.shape(scale), 1)
    ends = [decode(codec, np.full(shape, code), scale) for code in (codec.lowest, top)]
    value = np.clip(np.asarray(x, np.float64), *ends)
    # floor() can be one off when x is a code's own value: settle it on decoded values.
    lo = np.where((decode(codec, lo, scale) > value) & (lo > codec.lowest), lo - 1, lo)
    up = np.minimum(lo + 1, top)
    lo = np.where(
        (decode(codec, up, scale) <= value) & (up > lo) & (np.asarray(scale)[..., None] > 0), up, lo
    )
    hi = np.minimum(lo + 1, top)
    below, above = decode(codec, lo, scale), decode(codec, hi, scale)
    with np.errstate(invalid="ignore"):
        p_up = np.where(
            above > below, (value - below) / np.where(above > below, above - below, 1.0), 0.0
        )
    return lo.astype(codec.dtype), hi.astype(codec.dtype), p_up


def encode(
    codec: Codec,
    x: Array,
    scale: Array | None = None,
    *,
    rounding: str = "half_away",
    noise: Array | None = None,
    floor: bool = False,
) -> tuple[Array, Array]:
    """Group view -> (codes, scale). `scale` is the stored one; None takes the exact maximum.

    noise: uniforms in [0, 1); the higher code is taken where noise < P(up); `rounding` is unused.
    floor: code 0 becomes 1 wherever x > 0 (the variance floor).
    """
    scale = exact_scale(codec, x) if scale is None else np.asarray(scale, np.float64)
    if noise is None:
        codes = ROUNDINGS[rounding](companded(codec, x, scale))
    else:
        lo, hi, p_up = neighbours(codec, x, scale)
        codes = np.where(noise < p_up, hi, lo)
    if floor:
        codes = np.where((codes == 0) & (np.asarray(x) > 0), 1, codes)
    return codes.astype(codec.dtype), scale
