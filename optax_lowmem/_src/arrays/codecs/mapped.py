"""Codecs with a table of magnitudes relative to the group's maximum: 4-bit normal and log maps."""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays.codecs.base import E8M8Scale
from optax_lowmem._src.arrays.codecs.companded import CompandedCodec

Knots = tuple[tuple[float, float], ...]


def _interpolate(x: jax.Array, knots: Knots) -> jax.Array:
    """Interpolate linearly between the knots, and beyond the last: by selections, not gathers."""
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(knots, knots[1:], strict=False)]
    y = x * jnp.float32(slopes[0])
    for (x0, y0), slope in zip(knots[1:-1], slopes[1:], strict=True):
        y = jnp.where(x >= jnp.float32(x0), (x - jnp.float32(x0)) * slope + jnp.float32(y0), y)
    return y


class MappedCodec(CompandedCodec):
    """Codec whose codes index a table of magnitudes relative to the group's maximum."""

    @property
    @abc.abstractmethod
    def knots(self) -> Knots:
        """Return (code, relative magnitude) pairs, (0, 0) to (levels, 1); linear in between."""

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return the position of y / s in the table, linear between neighbouring codes."""
        return _interpolate(y * divisor, tuple((y, x) for x, y in self.knots))

    def expand(self, z: jax.Array) -> jax.Array:
        """Return the table's value at a position."""
        y = _interpolate(jnp.abs(z), self.knots)
        return jnp.where(z < 0, -y, y) if self.signed else y


# ---- normal: first moments in 4 bits, at quantiles of a normal distribution ----------------------

# The magnitudes of NF4's negative numbers (Dettmers et al., QLoRA, 2023, arXiv 2305.14314, equation
# 4): quantiles of N(0, 1), evenly spaced in probability from 1/2 to (31/32 + 29/30) / 2, divided by
# the largest.
_NORMAL = (0, 0.091049976, 0.184773403, 0.284441309, 0.394917426, 0.525072959, 0.696192806, 1)


@dataclasses.dataclass(frozen=True)
class NormalCodec(MappedCodec):
    """Magnitudes at quantiles of a normal distribution, symmetric around 0; signed only."""

    scale: E8M8Scale = dataclasses.field(default_factory=E8M8Scale)

    bits = 4

    def __post_init__(self) -> None:
        if not self.signed:
            raise ValueError("NormalCodec supports signed values only: use lowmem.codecs.log4()")

    @property
    def knots(self) -> Knots:
        """Return every code with its relative magnitude."""
        return tuple(enumerate(_NORMAL))


def normal4() -> NormalCodec:
    """4-bit codes with NF4's magnitudes and a 16-bit scale; 0.5 + 2/G bytes per value.

    Codes are -7 to 7, so that a value and its negative have the same error; the published map has
    one more positive number. The error is at most half (nearest) or all (stochastic) of the widest
    gap, which is 0.304 of the group's maximum. The group size must be even.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> codec = normal4()
      >>> stored = lowmem.codecs.encode_array(codec, jnp.array([-2.0, 0.3, 0.0]), 32)
      >>> lowmem.codecs.decode_array(codec, *stored, 32, length=3).round(3).tolist()
      [-2.0, 0.3700000047683716, 0.0]
    """
    return NormalCodec()


# ---- log: second moments in 4 bits, codes at equal ratios ----------------------------------------


@functools.cache
def _powers(levels: int, ratio: float) -> Knots:
    return ((0.0, 0.0), *((code, ratio ** (code - levels)) for code in range(1, levels + 1)))


@dataclasses.dataclass(frozen=True)
class LogCodec(MappedCodec):
    """Magnitudes at equal ratios below the maximum; non-negative values only."""

    scale: E8M8Scale = dataclasses.field(default_factory=E8M8Scale)
    signed: bool = False

    bits = 4
    ratio: ClassVar[float] = 2.0  # between neighbouring codes

    def __post_init__(self) -> None:
        if self.signed:
            raise ValueError(
                "LogCodec supports non-negative values only: use lowmem.codecs.normal4()"
            )

    @property
    def knots(self) -> Knots:
        """Return every code with its relative magnitude."""
        return _powers(self.levels, self.ratio)


def log4() -> LogCodec:
    """4-bit codes an octave apart, for second moments; 0.5 + 2/G bytes per value.

    Code 15 is the group's maximum, each lower code half of the next, and code 1, for all smaller
    positive values too, 2^-14 of the maximum. From there up, the error is at most a third (nearest)
    of a value, or all of it (stochastic). The scale has 16 bits, and the group size must be even.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> codec = log4()
      >>> stored = lowmem.codecs.encode_array(codec, jnp.array([4.0, 1.1, 1e-9]), 32)
      >>> lowmem.codecs.decode_array(codec, *stored, 32, length=3).tolist()
      [4.0, 1.0, 0.000244140625]
    """
    return LogCodec()
