"""Floats that sampled weights are cast to: 16 and 32 bits, and a few bits and a scale per block."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import numerics

_LEAST_EXPONENT = -100  # of a block's maximum: below, the smallest number would not be a normal f32


@dataclasses.dataclass(frozen=True)
class Wide:
    """A float of its own range.

    Attributes:
      name: of its dtype.
      mantissa: bits.
    """

    name: str
    mantissa: int


@dataclasses.dataclass(frozen=True)
class Scaled:
    r"""FP_{e,m} with a power of two as the scale of each block (OCP MX, for blocks of 32 x 32).

    A block's maximum lies in the highest of `ranges` binades, each of 2^m numbers; below them are
    2^m subnormal ones. Numbers beyond the largest become the largest.

    Attributes:
      name: as arguments have it.
      mantissa: m, bits.
      ranges: binades of normal numbers: 2^e - 1, less those kept for Inf and NaN.
      largest: number of the highest binade, as if that were [1, 2).
    """

    name: str
    mantissa: int
    ranges: int
    largest: float

    def most(self, absmax: jax.Array) -> jax.Array:
        """The largest number, of blocks with these maxima."""
        return jnp.float32(self.largest) * numerics.power_of_two(_top(absmax))

    def cast(self, x: jax.Array, absmax: jax.Array) -> jax.Array:
        """f32 values rounded to nearest, ties to even, to those of the format.

        Args:
          x: f32 values.
          absmax: the largest magnitude of each one's block.

        Where a maximum is not finite, neither are its block's values.
        """
        top, size = _top(absmax), jnp.abs(x)
        step = jnp.maximum(_exponent(size), top - (self.ranges - 1)) - self.mantissa
        # at most 2^(mantissa + 1) steps: an integer that the rounding takes
        low = jnp.clip(step, -126, 126)
        whole = numerics.round_to_int(size * numerics.power_of_two(-low)).astype(jnp.float32)
        near = jnp.minimum(whole * numerics.power_of_two(low), self.most(absmax))
        sign = numerics.to_bits(x) & jnp.uint32(0x80000000)
        cast = numerics.from_bits(numerics.to_bits(near) | sign)
        finite = numerics.to_bits(absmax) < numerics.INF_BITS
        return jnp.where(finite, cast, x + (absmax - absmax))


def _top(absmax: jax.Array) -> jax.Array:
    """The exponent of a block's highest binade."""
    return jnp.maximum(_exponent(absmax), _LEAST_EXPONENT)


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of positive f32 values; -127 for 0 and subnormal ones."""
    return lax.bitcast_convert_type(numerics.to_bits(x) >> 23, jnp.int32) - 127


Format = Wide | Scaled


def scaled(exponent: int, mantissa: int, ranges: int | None = None) -> Scaled:
    """FP_{e,m} whose codes are all numbers, or which has so many normal binades."""
    count = (1 << exponent) - 1 if ranges is None else ranges
    name = f"fp{1 + exponent + mantissa}_e{exponent}m{mantissa}"
    return Scaled(name, mantissa, count, 2 - 2.0**-mantissa)


WIDE = {
    name: Wide(name, mantissa)
    for name, mantissa in (("bfloat16", 7), ("float16", 10), ("float32", 23))
}
_SCALED = (
    Scaled("mxfp8_e4m3", 3, 15, 1.75),  # 1.875 2^8 is NaN
    Scaled("mxfp8_e5m2", 2, 30, 1.75),  # the exponent of all ones is Inf and NaN
    Scaled("mxfp6_e3m2", 2, 7, 1.75),
    Scaled("mxfp6_e2m3", 3, 3, 1.875),
    Scaled("mxfp4", 1, 3, 1.5),  # E2M1
)
FORMATS: dict[str, Format] = WIDE | {one.name: one for one in _SCALED}


def format_of(name: str) -> Format:
    """The format of a name.

    Raises:
      ValueError: for another name.
    """
    if name not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
