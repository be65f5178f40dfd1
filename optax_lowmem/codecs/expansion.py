"""Dynamic range expansion (COAT, section 4): a power of each group fills its codec's range."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._core import numerics
from optax_lowmem.codecs.base import GroupCodec
from optax_lowmem.codecs.dynamic import DynamicCodec, dynamic
from optax_lowmem.codecs.minifloat import E4M3Codec, MinifloatCodec, e4m3, e5m2
from optax_lowmem.codecs.scales import guard

_MANTISSA = 0x007FFFFF
_K_BITS = 15  # of a word: 4 of the exponent, the rest of the mantissa
_K_DROPPED = 23 - (_K_BITS - 4)
_MAX_DROPPED = _K_BITS - 1  # f32 has a sign, a maximum none
_K_LEAST = 123 << (_K_BITS - 4)  # 2^-4
_ONE_BITS = 0x3F800000
_LOG2E = math.log2(math.e)
_KEPT_OF_K = 1 - 2.0**-18  # f32 rounding may not lift k over what the minimum allows
_SLACK = 2.0**-19  # of a value: f32 rounding of logarithms and powers
_SLACK_PER_OCTAVE = 2.0**-21  # and of every octave under the maximum


@dataclasses.dataclass(frozen=True)
class ExpansionScale:
    """Maximum and exponent k of a group in one word: 17 bits of an f32, rounded up, and 15 of k.

    k has 4 exponent and 11 mantissa bits, from 2^-4 to 4095, and is rounded down. The smallest k
    that f32 asks for is log2(229376) / 252 = 0.07 (E4M3); under the largest, codes next to each
    other are at most 2^-13 apart (E4M3), relative.

    What is rounded here moves every code of the group: with fewer bits of k a second moment at
    decay 0.999 ends 30 to 60 % too small when codes are rounded to nearest (k rounded down lowers
    the minimum at each step), with fewer of the maximum 40 % too large. 17 + 15 balances both, and
    has the least noise of stochastic rounding but for 16 + 16.
    """

    name: str = "f17+k15"
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.uint32))
    relative_error: float = 2.0**-9
    absolute_error: float = 0.0

    def encode(self, absmax: jax.Array, k: jax.Array) -> jax.Array:
        """The word of a maximum's bits (a multiple of 2^14) and of k, which is rounded down."""
        steps = (numerics.to_bits(k) >> _K_DROPPED).astype(jnp.int32) - _K_LEAST
        steps = jnp.clip(steps, 0, (1 << _K_BITS) - 1)
        return (absmax << 1) | steps.astype(jnp.uint32)

    def decode(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The f32 maximum, and k as f32."""
        k = ((stored & jnp.uint32((1 << _K_BITS) - 1)) + jnp.uint32(_K_LEAST)) << _K_DROPPED
        absmax = (stored >> _K_BITS) << _MAX_DROPPED
        return numerics.from_bits(absmax), numerics.from_bits(k)


class Power(NamedTuple):
    """What `quantize` needs of a group."""

    exponent: jax.Array  # of the maximum, with f32's bias
    inverse: jax.Array  # 1 / the maximum's mantissa
    k: jax.Array
    rate: jax.Array  # ln(2) / k: from octaves of the expanded domain to e-folds of x


class Root(NamedTuple):
    """What `dequantize` needs of a group."""

    absmax: jax.Array
    half: jax.Array  # 1 / (2 k): of octaves, in two factors, of which none leaves f32


def _log2(x: jax.Array) -> jax.Array:
    return lax.log(x) * jnp.float32(_LOG2E)


def _mantissa(bits: jax.Array) -> jax.Array:
    """In [1, 2), as f32."""
    return numerics.from_bits((bits & jnp.uint32(_MANTISSA)) | jnp.uint32(_ONE_BITS))


def _exponent(bits: jax.Array) -> jax.Array:
    """Of f32 bits without a sign, with the bias, as f32."""
    return (bits >> 23).astype(jnp.int32).astype(jnp.float32)


def _magnitude_bits(x: jax.Array) -> jax.Array:
    return numerics.to_bits(x) & jnp.uint32(numerics.MAGNITUDE_MASK)


def _smallest_bits(x: jax.Array) -> jax.Array:
    """Bits of the smallest magnitude over the last axis that is not 0 (infinity without one)."""
    bits = _magnitude_bits(x).astype(jnp.int32)
    below = jnp.where(bits >= numerics.MIN_NORMAL_BITS, numerics.INF_BITS - bits, 0)
    return (numerics.INF_BITS - jnp.maximum(jnp.max(below, axis=-1), 0)).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class ExpandedCodec(GroupCodec):
    r"""f(x) = sign(x) |x|^k, k = \log_{R}(R_{format}), R = max / min of a group's magnitudes.

    With y = (|x| / max)^k in the domain of the inner codec, whose code 1 is 1 / R_format of its
    largest: x = max * dec(code)^{1/k}, so the normalisation by sqrt(min max) of the paper drops
    out. The minimum is over what is not 0; k is at most 4095, also in a constant group.
    Every x that is not 0 has a code of at least 1, which is the group's minimum or just under it.

    Attributes:
      inner: the codec of the expanded values; its own scale is not used.
    """

    scale: ExpansionScale = dataclasses.field(default_factory=ExpansionScale)
    inner: MinifloatCodec | DynamicCodec = dataclasses.field(default_factory=E4M3Codec)

    def __post_init__(self) -> None:
        if self.signed != self.inner.signed or not self.guarded:
            raise ValueError(
                f"ExpandedCodec(signed={self.signed}, guarded={self.guarded}) of a codec with "
                f"signed={self.inner.signed}: build it with expanded(inner)"
            )

    @property
    def levels(self) -> int:
        """The largest code."""
        return self.inner.levels

    @property
    def name(self) -> str:
        """For example `expanded-e4m3-int8`."""
        return f"expanded-{self.inner.name}"

    def measure(self, x: jax.Array) -> tuple[jax.Array, Power]:
        """Stored words [..., groups] of a group view, and the power of each group, as stored."""
        absmax = guard(numerics.absmax_bits(x, self.signed)) + ((1 << _MAX_DROPPED) - 1)
        absmax = (absmax >> _MAX_DROPPED) << _MAX_DROPPED
        smallest = _smallest_bits(x)
        ratio = numerics.quotient(_mantissa(absmax), _mantissa(smallest))
        octaves = _exponent(absmax) - _exponent(smallest) + _log2(ratio)
        wanted = jnp.float32(-math.log2(self.inner.smallest) * _KEPT_OF_K)
        # octaves under 2^-12 ask for more than the largest k of any codec
        k = numerics.quotient(wanted, jnp.maximum(octaves, jnp.float32(2.0**-12)))
        stored = self.scale.encode(absmax, k)
        _, k = self.scale.decode(stored)
        inverse = numerics.quotient(jnp.float32(1), _mantissa(absmax))
        rate = numerics.quotient(jnp.float32(math.log(2)), k)
        return stored, Power(_exponent(absmax), inverse, k, rate)

    def _position(self, x: jax.Array, power: Power) -> tuple[jax.Array, jax.Array]:
        """z in [1, levels], and log2 of the expanded value, of x as if it were not 0."""
        bits = _magnitude_bits(x)
        # exponents apart: x / max may be under f32, and powers of two cancel exactly
        octaves = _exponent(bits) - power.exponent + _log2(_mantissa(bits) * power.inverse)
        octaves = jnp.minimum(octaves * power.k, jnp.float32(0))
        z = self.inner.position(jnp.exp2(octaves), jnp.float32(1))
        return jnp.clip(z, 1, self.levels), octaves

    def _octaves(self, z: jax.Array) -> jax.Array:
        """log2 of the inner codec's value at a position of at least 1."""
        return _log2(self.inner.expand(z))

    def quantize(self, x: jax.Array, divisor: Power, noise: jax.Array | None = None) -> jax.Array:
        """Codes of f32 values, elementwise; `divisor` (of `measure`) and `noise` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: the power of each element's group.
          noise: uniforms in [0, 1) for stochastic rounding; None rounds to nearest (of the expanded
            values).
        """
        z, octaves = self._position(x, divisor)
        if noise is not None:
            lo = jnp.floor(z)
            low = self._octaves(lo)
            gap = self._octaves(jnp.minimum(lo + 1, self.levels)) - low
            # P = (x - dec(lo)) / (dec(hi) - dec(lo)), both over dec(lo)
            over = jnp.expm1((octaves - low) * divisor.rate)
            rises = noise * jnp.expm1(gap * divisor.rate) < over
            z = lo + rises.astype(jnp.float32)
        live = _magnitude_bits(x) >= jnp.uint32(numerics.MIN_NORMAL_BITS)
        z = jnp.where(live, z, jnp.float32(0))
        return numerics.round_to_signed_byte(z, x) if self.signed else numerics.round_to_byte(z)

    def units(self, stored: jax.Array) -> Root:
        """The maximum and root of each group, of its stored word."""
        absmax, k = self.scale.decode(stored)
        return Root(absmax, numerics.quotient(jnp.float32(0.5), k))

    def _restore(self, z: jax.Array, unit: Root) -> jax.Array:
        """|x| at a position z, 0 at 0."""
        factor = jnp.exp2(self._octaves(jnp.maximum(z, 1)) * unit.half)
        return unit.absmax * jnp.where(z > 0, factor, jnp.float32(0)) * factor

    def dequantize(self, codes: jax.Array, unit: Root) -> jax.Array:
        """f32 values of codes, elementwise; the group's root broadcasts."""
        z = codes.astype(jnp.int32).astype(jnp.float32)
        y = self._restore(jnp.abs(z), unit)
        return jnp.where(z < 0, -y, y)

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Upper bound of |decode(encode(x)) - x| for each element of a finite group view.

        Half a code (nearest) or a whole one either side of z, in decoded units, plus f32 rounding,
        which grows with the octaves between x and the maximum.
        """
        stored, power = self.measure(x)
        power = jax.tree.map(lambda a: a[..., None], power)
        unit = jax.tree.map(lambda a: a[..., None], self.units(stored))
        z, octaves = self._position(x, power)
        width = jnp.float32(1.0 if stochastic else 0.5)
        up = self._restore(jnp.minimum(z + width, self.levels), unit)
        down = self._restore(jnp.maximum(z - width, 1), unit)
        exact = jnp.abs(x)
        depth = -numerics.quotient(octaves, power.k)
        slack = exact * (_SLACK + _SLACK_PER_OCTAVE * depth)
        live = exact >= jnp.float32(2.0**-126)
        return jnp.where(live, jnp.maximum(up - exact, exact - down) + slack, jnp.float32(0))


def expanded(inner: MinifloatCodec | DynamicCodec) -> ExpandedCodec:
    """A codec around which each group's range is expanded: 1 + 4/G bytes a value.

    Deviations from the published implementation: R_format as in the paper (229376 for E4M3, there
    100352); the minimum leaves out zeros wherever they are; codes use maximum and k as stored, in
    4 bytes a group instead of 12; stochastic rounding is between decoded neighbours.
    """
    return ExpandedCodec(inner=inner, signed=inner.signed)


def expanded_e4m3(signed: bool = True) -> ExpandedCodec:
    """COAT's codec of both moments: E4M3 after expansion."""
    return expanded(e4m3(signed))


def expanded_e5m2(signed: bool = True) -> ExpandedCodec:
    """E5M2 after expansion."""
    return expanded(e5m2(signed))


def expanded_dynamic(signed: bool = True) -> ExpandedCodec:
    """The dynamic map after expansion."""
    return expanded(dynamic(signed))
