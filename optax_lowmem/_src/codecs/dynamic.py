"""The dynamic exponent map of 8-bit optimizers (Dettmers et al., 2022)."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.companded import CompandedCodec
from optax_lowmem._src.codecs.scales import E8M8Scale, Float32Scale
from optax_lowmem._src.core import numerics

_DECADES = 7

Knots = tuple[tuple[float, float], ...]


@functools.cache
def _knots(signed: bool) -> Knots:
    """(code, value) between which the map is linear.

    Decade i has n = 2^i (unsigned: twice that) codes for the means of the n equal parts of
    [10^(i - 7), 10^(i - 6)]; 0 and 1 are apart. The published signed map has one code more above
    zero than below, for 1; here the last mean gives way to 1 on both sides, since the largest
    value of a group may be negative.
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


def _interpolate(x: jax.Array, knots: Knots) -> jax.Array:
    """Piecewise linear through the knots and beyond the last: selections, no gathers."""
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(knots, knots[1:], strict=False)]
    y = x * jnp.float32(slopes[0])
    for (x0, y0), slope in zip(knots[1:-1], slopes[1:], strict=True):
        y = jnp.where(x >= jnp.float32(x0), (x - jnp.float32(x0)) * slope + jnp.float32(y0), y)
    return y


@dataclasses.dataclass(frozen=True)
class DynamicCodec(CompandedCodec):
    """Seven decades under the maximum, each with twice the codes of the one below."""

    top_octaves: ClassVar[float] = 0.0  # `round_octaves` takes what is over

    @property
    def smallest(self) -> float:
        """Code 1 as a share of the largest code."""
        return _knots(self.signed)[1][1]

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return the position of y / s in the map, linear between neighbouring codes."""
        return _interpolate(y * divisor, tuple((y, x) for x, y in _knots(self.signed)))

    def expand(self, z: jax.Array) -> jax.Array:
        """The map at a position."""
        y = _interpolate(jnp.abs(z), _knots(self.signed))
        return jnp.where(z < 0, -y, y)

    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """P = z - lo: decoded values are linear between neighbouring codes."""
        return noise < z - lo

    # -- powers of the numbers: see _src/codecs/expansion.py

    def octaves(self, code: jax.Array) -> jax.Array:
        """log2 of the map at a code (int32); minus infinity at 0."""
        return numerics.log2(self.expand(code.astype(jnp.float32)))

    def odds(self, root: jax.Array) -> jax.Array:
        """Return the factor for `round_octaves` of groups with the map to the power `root`."""
        return root * jnp.float32(math.log(2))

    def round_octaves(
        self, octaves: jax.Array, noise: jax.Array | None, odds: jax.Array
    ) -> jax.Array:
        """Codes (int32) of at least 1 of numbers 2^octaves; P is exact, with two logarithms more.

        Args:
          octaves: at most a rounding over `top_octaves`.
          noise: uniforms for stochastic rounding between powers; None rounds numbers to nearest.
          odds: of each element's group.
        """
        octaves = jnp.minimum(octaves, jnp.float32(0))
        z = jnp.clip(self.position(numerics.exp2(octaves), jnp.float32(1)), 1, self.levels)
        if noise is None:
            return numerics.round_to_int(z)
        lo = jnp.floor(z)
        low = numerics.log2(self.expand(lo))
        gap = numerics.log2(self.expand(jnp.minimum(lo + 1, self.levels))) - low
        # P = (x - dec(lo)) / (dec(hi) - dec(lo)), both over dec(lo)
        rises = noise * jnp.expm1(gap * odds) < jnp.expm1((octaves - low) * odds)
        return numerics.round_to_int(lo + rises.astype(jnp.float32))


def dynamic(signed: bool = True) -> DynamicCodec:
    """8-bit dynamic map: int8 and a 16-bit scale, or uint8 (at least 1 where v > 0) and f32.

    1 + 2/G or 1 + 4/G bytes a value. Near the maximum codes are 1/71 (signed) or 1/142 of it apart,
    a tenth and half as many of them for every decade below. The unsigned map is the published one;
    the signed one has 1 instead of 0.993 as its largest magnitude.
    """
    return DynamicCodec(scale=E8M8Scale() if signed else Float32Scale(), signed=signed)
