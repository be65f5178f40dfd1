"""Formats of sampled weights: 16- and 32-bit floats, and narrow ones with a scale per block."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.hyperparameters import check_choice

# Least exponent of a block's maximum; below it, the smallest number would not be a normal f32.
_LEAST_EXPONENT = -100


@dataclasses.dataclass(frozen=True)
class Wide:
    """Floating-point format without a scale, by its dtype's name and mantissa bits."""

    name: str
    mantissa: int


@dataclasses.dataclass(frozen=True)
class Scaled:
    r"""FP_{e,m} with a power-of-two scale per block (OCP MX, for blocks of 32 x 32).

    A block's maximum is in the highest of `binades` binades, each of 2^m numbers; below them are
    2^m subnormal numbers. Magnitudes over the largest number saturate.
    """

    name: str  # the name in arguments
    mantissa: int  # m, the mantissa bits
    binades: int  # of normal numbers: 2^e - 1, less those reserved for Inf and NaN
    largest: float  # the largest number, with the highest binade scaled to [1, 2)

    def most(self, absmax: jax.Array) -> jax.Array:
        """Return the largest representable number of blocks with these maxima."""
        return jnp.float32(self.largest) * numerics.power_of_two(_top(absmax))

    def cast(self, x: jax.Array, absmax: jax.Array) -> jax.Array:
        """Round f32 values to the format, to nearest, ties to even.

        `absmax` is the largest magnitude of each value's block. If it is not finite, no result is.
        """
        top, size = _top(absmax), jnp.abs(x)
        step = jnp.maximum(_exponent(size), top - (self.binades - 1)) - self.mantissa
        # at most 2^(mantissa + 1) steps, within the range of round_to_int
        low = jnp.clip(step, -126, 126)
        whole = numerics.round_to_int(size * numerics.power_of_two(-low)).astype(jnp.float32)
        near = jnp.minimum(whole * numerics.power_of_two(low), self.most(absmax))
        sign = numerics.to_bits(x) & jnp.uint32(0x80000000)
        cast = numerics.from_bits(numerics.to_bits(near) | sign)
        finite = numerics.to_bits(absmax) < numerics.INF_BITS
        return jnp.where(finite, cast, x + (absmax - absmax))


def _top(absmax: jax.Array) -> jax.Array:
    """Return the exponent of a block's highest binade."""
    return jnp.maximum(_exponent(absmax), _LEAST_EXPONENT)


def _exponent(x: jax.Array) -> jax.Array:
    """Return floor(log2(x)) of positive f32 values; -127 for 0 and subnormal values."""
    return lax.bitcast_convert_type(numerics.to_bits(x) >> 23, jnp.int32) - 127


Format = Wide | Scaled


def custom(exponent: int, mantissa: int, binades: int | None = None) -> Scaled:
    """Return FP_{e,m} without Inf and NaN, whose largest number is the last of its highest binade.

    `binades` is the number of normal ones, by default 2^e - 1.
    """
    count = (1 << exponent) - 1 if binades is None else binades
    name = f"fp{1 + exponent + mantissa}_e{exponent}m{mantissa}"
    return Scaled(name, mantissa, count, 2 - 2.0**-mantissa)


_FORMATS = (
    Wide("bfloat16", 7),
    Wide("float16", 10),
    Wide("float32", 23),
    Scaled("mxfp8_e4m3", 3, 15, 1.75),  # 1.875 2^8 is NaN
    Scaled("mxfp8_e5m2", 2, 30, 1.75),  # the exponent of all ones is Inf and NaN
    Scaled("mxfp6_e3m2", 2, 7, 1.75),
    Scaled("mxfp6_e2m3", 3, 3, 1.875),
    Scaled("mxfp4", 1, 3, 1.5),  # E2M1
)
FORMATS: dict[str, Format] = {format.name: format for format in _FORMATS}


def format_of(name: str) -> Format:
    check_choice("format", name, FORMATS)
    return FORMATS[name]
