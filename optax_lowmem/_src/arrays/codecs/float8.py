"""8-bit floating-point codecs, scaled by the group's maximum: OCP E4M3 and E5M2, dynamic map."""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.base import E8M8Scale, Float32Scale
from optax_lowmem._src.arrays.codecs.companded import CompandedCodec
from optax_lowmem._src.arrays.codecs.mapped import Knots, MappedCodec

# ---- E4M3 and E5M2: the OCP FP8 formats ----------------------------------------------------------


_LARGEST = 1.75  # mantissa of a format's largest number
_MANTISSA = 0x007FFFFF
_ONE_BITS = 0x3F800000
_HALF_BITS = 0x3F000000
_SIGN = 0x80000000


class Odds(NamedTuple):
    """Coefficients of P(up) between powers: u A / (A + bend (1 - u)), A = s + slope u + start.

    Here s = (n + u) / N, in the notation of `MinifloatCodec.odds`.
    """

    slope: jax.Array
    start: jax.Array  # minus `slope`
    bend: jax.Array


@dataclasses.dataclass(frozen=True)
class MinifloatCodec(CompandedCodec):
    r"""Codec that rounds t = y / s \cdot MAX to an 8-bit float.

    Codes number the format's magnitudes in order. Let t be in units of the smallest normal number.
    If t is normal (t >= 1), the upper bits of the f32 t, minus those of 1/2, are its code, and the
    lower bits are the fraction of the distance to the next. If t is subnormal, the same holds for
    (t + 1) / 2, which is greater than t exactly then.
    """

    mantissa: ClassVar[int]  # number of bits
    lowest: ClassVar[int]  # exponent of the smallest normal number
    highest: ClassVar[int]  # exponent of the largest number, which is 1.75 times 2^highest

    @property
    def _unit(self) -> float:
        """Return the largest number, in units of the smallest normal one."""
        return _LARGEST * 2.0 ** (self.highest - self.lowest)

    @property
    def top_octaves(self) -> float:
        """Return log2 of the largest number plus a rounding margin, for `round_octaves`."""
        return math.log2(self._unit) + 2.0**-20

    @property
    def _shift(self) -> int:
        """Return the number of f32 mantissa bits between two neighbouring codes."""
        return 23 - self.mantissa

    @property
    def levels(self) -> int:
        """Return the code of the largest finite number."""
        return (1 << self.mantissa) * (self.highest - self.lowest + 1) + round(
            0.75 * (1 << self.mantissa)
        )

    @property
    def smallest(self) -> float:
        """Return the number of code 1 relative to the largest."""
        return 2.0 ** (self.lowest - self.mantissa - self.highest) / _LARGEST

    def _steps(self, t: jax.Array) -> jax.Array:
        """Return the position of t >= 0, in units of 2^-shift codes (int32)."""
        bits = lax.bitcast_convert_type(jnp.maximum(t, t * 0.5 + jnp.float32(0.5)), jnp.int32)
        return bits - jnp.int32(_HALF_BITS)

    def _number(self, steps: jax.Array) -> jax.Array:
        """Invert `_steps`, relative to the largest number; the ends 0 and 1 are exact."""
        t = lax.bitcast_convert_type(steps + jnp.int32(_HALF_BITS), jnp.float32)
        return jnp.minimum(t, 2 * t - 1) * jnp.float32(1 / self._unit)

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return the position of y / s MAX among the magnitudes, linear between neighbours."""
        steps = self._steps(y * divisor * jnp.float32(self._unit))
        return steps.astype(jnp.float32) * jnp.float32(2.0**-self._shift)

    def expand(self, z: jax.Array) -> jax.Array:
        """Return the number at a position, relative to the largest."""
        steps = (jnp.abs(z) * jnp.float32(1 << self._shift)).astype(jnp.int32)
        bits = numerics.to_bits(self._number(steps))
        return numerics.from_bits(bits | (numerics.to_bits(z) & jnp.uint32(_SIGN)))

    # -- powers of the numbers: see expansion.py

    def octaves(self, code: jax.Array) -> jax.Array:
        """Return log2 of a code's (int32) number relative to the largest; -inf for code 0."""
        return numerics.log2(self._number(code << self._shift))

    def odds(self, root: jax.Array) -> Odds:
        r"""Return the `Odds` of `round_octaves` for groups that decode to numbers^r, r = `root`.

        Normal numbers are (n + u) 2^e with an integer n in [N, 2 N), N = 2^mantissa; subnormal ones
        have n < N. Between n and n + 1, P = ((n + u)^r - n^r) / ((n + 1)^r - n^r). The expression

            u (6 n + 4 - 2 r + (1 + r) u) / (6 n + 1 + r + 2 (2 - r) u)

        equals P at r = -1, 1 and 2, and differs by O(1 / n^3) at other r. The next order shifts n
        by e = (r - 2) (r + 1) / (20 (n + 1/2)), and n in the denominator additionally by
        0.22 e (r - 1) / (n + 1/2); here all numbers use the shift at n + 1/2 = 1.125 N. The error
        of P for E4M3 and E5M2 is then at most

            r up to   n = 1          other subnormal   normal
            2         2^-9,  2^-10   2^-12, 2^-14      2^-18, 2^-15
            4         2^-6,  2^-7    2^-9,  2^-10      2^-14, 2^-11
            7 (8)     2^-3,  2^-5    2^-6,  2^-6       2^-10, 2^-7
            14.3      0.26           2^-4              2^-7

        (r = 2 belongs to a group that spans 36 octaves in E4M3 and 64 in E5M2, r = 7 to 125, and
        the largest r to all of f32.) For r -> 0 the gaps are small and P is a ratio of logarithms.
        """
        normal = 1 << self.mantissa
        unit = 1 / (6 * normal)  # s = (n + u) / N
        middle = 1.125 * normal
        shift = 6 * unit / (20 * middle)
        less = root - 1
        curve = root * less - 2
        return Odds(
            root * jnp.float32(unit) - jnp.float32(5 * unit),
            root * jnp.float32(-3 * unit) + jnp.float32(9 * unit) + curve * jnp.float32(shift),
            less * (curve * jnp.float32(0.22 * shift / middle) + jnp.float32(3 * unit)),
        )

    def round_octaves(
        self, octaves: jax.Array, uniforms: jax.Array | None, odds: Odds
    ) -> jax.Array:
        """Return codes (int32, at least 1) of numbers from log2; the largest has `top_octaves`.

        Uniforms round stochastically between powers, with each group's `Odds`; None rounds numbers
        to nearest.
        """
        one, t = 1 << self._shift, numerics.exp2(octaves)
        steps = jnp.clip(self._steps(t), jnp.int32(one), jnp.int32(self.levels * one))
        if uniforms is None:
            return (steps + jnp.int32(one // 2)) >> self._shift
        s = jnp.minimum(t, _one_to_two(steps))  # t if it is subnormal
        w = _one_to_two(steps << self.mantissa)  # 1 + u
        above = odds.slope * w + s + odds.start
        stays = uniforms * (odds.bend * (2 - w) + above) - (w * above - above)
        return (steps >> self._shift) + (numerics.to_bits(stays) >> 31).astype(jnp.int32)


def _one_to_two(bits: jax.Array) -> jax.Array:
    """Return the f32 in [1, 2) with the mantissa of the given f32 bits (int32)."""
    mantissa = bits & jnp.int32(_MANTISSA)
    return lax.bitcast_convert_type(mantissa | jnp.int32(_ONE_BITS), jnp.float32)


@dataclasses.dataclass(frozen=True)
class E4M3Codec(MinifloatCodec):
    """OCP E4M3: code 1 is 2^-9 and code 126 is 448; 127 (NaN) is not used."""

    mantissa = 3
    lowest = -6
    highest = 8


@dataclasses.dataclass(frozen=True)
class E5M2Codec(MinifloatCodec):
    """OCP E5M2: code 1 is 2^-16 and code 123 is 57344; 124 to 127 (infinity, NaN) are not used."""

    mantissa = 2
    lowest = -14
    highest = 15


def _scale(signed: bool) -> E8M8Scale | Float32Scale:
    """Return the scale format of first (signed) or second moments, which change more slowly."""
    return E8M8Scale() if signed else Float32Scale()


def e4m3(signed: bool = True) -> E4M3Codec:
    """FP8 E4M3 of x / max: relative error 1/16, down to 1/14336 of the maximum.

    Signed: int8 codes and a 16-bit scale (1 + 2/G bytes per value). Unsigned: uint8 codes, at least
    1 where v > 0, and an f32 scale (1 + 4/G). A code is the bit pattern of the number's magnitude;
    negative numbers have the negated code instead of the format's sign bit.
    """
    return E4M3Codec(scale=_scale(signed), signed=signed)


def e5m2(signed: bool = True) -> E5M2Codec:
    """FP8 E5M2 of x / max: relative error 1/8, down to 1e-9 of the maximum; else as `e4m3`."""
    return E5M2Codec(scale=_scale(signed), signed=signed)


# ---- the dynamic exponent map of 8-bit optimizers (Dettmers et al., 2022) ------------------------


_DECADES = 7


@functools.cache
def _knots(signed: bool) -> Knots:
    """Return (code, value) pairs between which the map is linear.

    Decade i has n = 2^i codes (unsigned: 2^(i + 1)), the centres of n equal parts of
    [10^(i - 7), 10^(i - 6)]; 0 and 1 have separate codes. The published signed map has one more
    positive code, for 1. Here 1 replaces the last centre on both sides, since the largest value of
    a group may be negative.
    """
    knots, code = [(0.0, 0.0)], 1
    for decade in range(_DECADES):
        items = 1 << (decade if signed else decade + 1)
        last = items - 1 - (signed and decade == _DECADES - 1)
        for item in sorted({0, last}):
            mean = 0.1 + 0.9 * (item + 0.5) / items
            knots.append((code + item, mean * 10.0 ** (decade - _DECADES + 1)))
        code += last + 1
    return (*knots, (code, 1.0))


@dataclasses.dataclass(frozen=True)
class DynamicCodec(MappedCodec):
    """Dynamic map: seven decades below the maximum, each with twice the codes of the next lower."""

    top_octaves: ClassVar[float] = 0.0  # `round_octaves` clips rounding errors above it

    @property
    def smallest(self) -> float:
        """Return the value of code 1 relative to the largest."""
        return self.knots[1][1]

    @property
    def knots(self) -> Knots:
        """Return the first and last code of each decade, with their values."""
        return _knots(self.signed)

    # -- powers of the numbers: see expansion.py

    def octaves(self, code: jax.Array) -> jax.Array:
        """Return log2 of a code's (int32) value; -inf for code 0."""
        return numerics.log2(self.expand(code.astype(jnp.float32)))

    def odds(self, root: jax.Array) -> jax.Array:
        """Return the factor of `round_octaves` for groups that decode to values^`root`."""
        return root * jnp.float32(math.log(2))

    def round_octaves(
        self, octaves: jax.Array, uniforms: jax.Array | None, odds: jax.Array
    ) -> jax.Array:
        """Return codes (int32, at least 1) of values 2^octaves; P is exact, at two logarithms more.

        `octaves` is at most a rounding error above `top_octaves`; see `MinifloatCodec`.
        """
        octaves = jnp.minimum(octaves, jnp.float32(0))
        z = jnp.clip(self.position(numerics.exp2(octaves), jnp.float32(1)), 1, self.levels)
        if uniforms is None:
            return numerics.round_to_int(z)
        lo = jnp.floor(z)
        low = numerics.log2(self.expand(lo))
        gap = numerics.log2(self.expand(jnp.minimum(lo + 1, self.levels))) - low
        # P = (x - dec(lo)) / (dec(hi) - dec(lo)), numerator and denominator divided by dec(lo)
        rises = uniforms * jnp.expm1(gap * odds) < jnp.expm1((octaves - low) * odds)
        return numerics.round_to_int(lo + rises.astype(jnp.float32))


def dynamic(signed: bool = True) -> DynamicCodec:
    """8-bit dynamic map: int8 and a 16-bit scale, or uint8 (at least 1 where v > 0) and f32.

    1 + 2/G (signed) or 1 + 4/G bytes per value. Near the maximum codes are 1/71 (signed) or 1/142
    of it apart; each lower decade has half as many codes. The unsigned map is the published one;
    the signed map's largest magnitude is 1 instead of 0.993.
    """
    return DynamicCodec(scale=E8M8Scale() if signed else Float32Scale(), signed=signed)
