"""Magnitudes as 8-bit floats of a group's maximum: E4M3 and E5M2 of the OCP FP8 formats."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._core import numerics
from optax_lowmem.codecs.companded import CompandedCodec
from optax_lowmem.codecs.scales import E8M8Scale, Float32Scale


@dataclasses.dataclass(frozen=True)
class MinifloatCodec(CompandedCodec):
    r"""t = y / s \cdot MAX, rounded as an 8-bit float rounds.

    A format's magnitudes in order are its codes. In a binade of exponent e they lie
    2^{e - mantissa} apart, and those under 2^{lowest} as in the lowest binade, so with
    e = max(exponent(t), lowest) the position is z = t 2^{mantissa - e} + 2^{mantissa} (e - lowest).
    """

    mantissa: ClassVar[int]  # bits
    lowest: ClassVar[int]  # exponent of the smallest normal number
    highest: ClassVar[int]  # exponent of the largest number, which is 1.75 times 2^highest

    @property
    def levels(self) -> int:
        """The code of the largest finite number."""
        return (1 << self.mantissa) * (self.highest - self.lowest + 1) + round(
            0.75 * (1 << self.mantissa)
        )

    @property
    def smallest(self) -> float:
        """Code 1 as a share of the largest code."""
        return 2.0 ** (self.lowest - self.mantissa - self.highest) / 1.75

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """The place of y / s MAX among the format's magnitudes, linear between neighbours."""
        # in units of 2^(highest + 1): the largest number is 0.875
        t = y * divisor * jnp.float32(0.875)
        lowest = self.lowest - self.highest - 1
        exponent = (numerics.to_bits(t) >> 23).astype(jnp.int32) - 127
        exponent = jnp.maximum(exponent, lowest)
        steps = t * numerics.power_of_two(self.mantissa - exponent)
        return steps + ((exponent - lowest) * (1 << self.mantissa)).astype(jnp.float32)

    def expand(self, z: jax.Array) -> jax.Array:
        """The number at a position, in units of the largest."""
        magnitude, binade = jnp.abs(z), jnp.float32(1 << self.mantissa)
        above = jnp.maximum(jnp.floor(magnitude * (1 / binade)) - 1, jnp.float32(0))
        steps = magnitude - above * binade
        power = self.lowest - self.mantissa - self.highest - 1
        # 8 / 7 in f32, times 0.875, rounds to exactly 1
        unit = numerics.power_of_two(above.astype(jnp.int32) + power) * jnp.float32(8 / 7)
        return jnp.where(z < 0, -steps * unit, steps * unit)

    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """P = z - lo: decoded values are linear between neighbouring codes."""
        return noise < z - lo


@dataclasses.dataclass(frozen=True)
class E4M3Codec(MinifloatCodec):
    """448 is code 126, 2^-9 code 1; 127 is the format's NaN and not used."""

    mantissa = 3
    lowest = -6
    highest = 8


@dataclasses.dataclass(frozen=True)
class E5M2Codec(MinifloatCodec):
    """57344 is code 123, 2^-16 code 1; 124 to 127 are the format's infinity and NaN."""

    mantissa = 2
    lowest = -14
    highest = 15


def _scale(signed: bool) -> E8M8Scale | Float32Scale:
    """Of a moving average that moves fast, or slowly: see the scale formats."""
    return E8M8Scale() if signed else Float32Scale()


def e4m3(signed: bool = True) -> E4M3Codec:
    """FP8 E4M3 of x / max: relative error 1/16, down to 1/14336 of the maximum.

    int8 codes and a 16-bit scale (1 + 2/G bytes a value), or uint8 codes, at least 1 where v > 0,
    and an f32 scale (1 + 4/G). A code is the bit pattern of the number's magnitude; a negative
    number has the negative code, not the sign bit of the format.
    """
    return E4M3Codec(scale=_scale(signed), signed=signed)


def e5m2(signed: bool = True) -> E5M2Codec:
    """FP8 E5M2 of x / max: relative error 1/8, down to 1e-9 of the maximum; else as `e4m3`."""
    return E5M2Codec(scale=_scale(signed), signed=signed)
