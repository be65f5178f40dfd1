"""Dynamic range expansion (COAT, section 4): a power per group uses the full range of a codec."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.base import GroupCodec, ScaleFormat, Span, guard
from optax_lowmem._src.arrays.codecs.float8 import (
    DynamicCodec,
    E4M3Codec,
    MinifloatCodec,
    dynamic,
    e4m3,
    e5m2,
)
from optax_lowmem._src.arrays.typing import PyTree

_K_BITS = 15  # stored bits of k: 4 of the exponent, 11 of the mantissa
_K_DROPPED = 23 - (_K_BITS - 4)
_MAX_DROPPED = _K_BITS - 1  # the sign bit of the maximum is not stored either
_K_LEAST = 123 << (_K_BITS - 4)  # 2^-4
_MIN_NORMAL = 2.0**-126
_ORDER_SHIFT = (1 << 31) - numerics.MIN_NORMAL_BITS
_DEEP = 120  # octaves in a group above which its values are shifted; f32 has 252
_SHIFT = 126.0  # octaves of that shift
_KEPT_OF_K = 1 - 2.0**-18  # margin: f32 rounding must not raise k above what the minimum allows
_SLACK = 2.0**-19  # relative f32 rounding error of logarithms and powers
_SLACK_PER_OCTAVE = 2.0**-21  # and for each octave below the maximum


@dataclasses.dataclass(frozen=True)
class ExpansionScale(ScaleFormat):
    """Maximum and exponent k of a group in 32 bits: 17 of the f32 maximum, 15 of k.

    The maximum is rounded up. k has 4 exponent and 11 mantissa bits (2^-4 to 4095) and is rounded
    down. The smallest k that f32 values need is log2(229376) / 252 = 0.07 (E4M3). At the largest k,
    neighbouring codes of E4M3 differ by at most 2^-12, relative.

    These rounding errors shift every code of the group. With fewer bits of k, a second moment with
    decay 0.999 ends 30 to 60 % too small when codes are rounded to nearest (rounding k down lowers
    the minimum at each step); with fewer bits of the maximum it ends 40 % too large. 17 + 15
    balances both, and only 16 + 16 has less noise under stochastic rounding.
    """

    name = "f17+k15"
    dtype = jnp.dtype(jnp.uint32)
    relative_error = 2.0**-9

    def representable(self, k: jax.Array) -> jax.Array:
        """Return the largest storable k that is at most the given one."""
        bits = jnp.clip(
            lax.bitcast_convert_type(k, jnp.int32),
            jnp.int32(_K_LEAST << _K_DROPPED),
            jnp.int32((_K_LEAST + (1 << _K_BITS) - 1) << _K_DROPPED),
        )
        return lax.bitcast_convert_type((bits >> _K_DROPPED) << _K_DROPPED, jnp.float32)

    def encode(self, absmax: jax.Array, k: jax.Array) -> jax.Array:
        """Return the uint32 of a maximum's bits (a multiple of 2^14) and a `representable` k."""
        return (absmax << 1) | ((numerics.to_bits(k) >> _K_DROPPED) - jnp.uint32(_K_LEAST))

    def decode(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the f32 maximum, and k as f32."""
        k = ((stored & jnp.uint32((1 << _K_BITS) - 1)) + jnp.uint32(_K_LEAST)) << _K_DROPPED
        absmax = (stored >> _K_BITS) << _MAX_DROPPED
        return numerics.from_bits(absmax), numerics.from_bits(k)


class Power(NamedTuple):
    """Constants of a group for `quantize`."""

    inverse: jax.Array  # 2^shift / maximum; the shift keeps x * inverse in f32's range
    k: jax.Array
    start: jax.Array  # log2 of the expanded maximum, minus k * shift
    odds: PyTree  # of the inner codec


class Root(NamedTuple):
    """Constants of a group for `dequantize`."""

    absmax: jax.Array
    half: jax.Array  # 1 / (2 k): the root is two equal factors, neither of which underflows


@dataclasses.dataclass(frozen=True)
class ExpandedCodec(GroupCodec):
    r"""f(x) = sign(x) |x|^k, k = \log_{R}(R_{format}), R = max / min of a group's magnitudes.

    The inner codec encodes y = (|x| / max)^k; its code 1 is 1 / R_format of its largest value.
    Decoding gives x = max * dec(code)^{1/k}, so the paper's normalisation by sqrt(min max) cancels.
    The minimum is over nonzero values; k is at most 4095, also in a constant group. Every nonzero x
    has a code of at least 1, which decodes to the group's minimum or slightly less. Logarithms and
    powers of two have errors of 2^-22 in GPU kernels, so codes next to a tie may differ from XLA's
    by one. A step takes two logarithms and two powers per element; stochastic rounding adds none
    (`MinifloatCodec.odds` states its bias).
    """

    scale: ExpansionScale = dataclasses.field(default_factory=ExpansionScale)
    # the codec of the expanded values; its scale is not used
    inner: MinifloatCodec | DynamicCodec = dataclasses.field(default_factory=E4M3Codec)

    def __post_init__(self) -> None:
        if self.signed != self.inner.signed or not self.guarded:
            raise ValueError(
                f"ExpandedCodec got signed={self.signed}, guarded={self.guarded}, but needs "
                f"signed={self.inner.signed} like its inner codec, and guarded=True: build it with "
                "expanded(inner)"
            )

    @property
    def levels(self) -> int:
        """Return the largest code."""
        return self.inner.levels

    @property
    def name(self) -> str:
        """Return for example `expanded-e4m3-int8`."""
        return f"expanded-{self.inner.name}"

    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return the bits of |x|, and these bits reordered: zeros and subnormals come last."""
        magnitude = numerics.to_bits(x) & jnp.uint32(numerics.MAGNITUDE_MASK)
        # wraps modulo 2^32; as int32, whose minimum is taken
        order = lax.bitcast_convert_type(magnitude + jnp.uint32(_ORDER_SHIFT), jnp.int32)
        return Span(numerics.magnitude_bits(x, self.signed)), Span(order, largest=False)

    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, Power]:
        """Return stored maxima and k, and each group's `Power` of these rounded values."""
        absmax, order = ends
        absmax = guard(absmax.astype(jnp.uint32)) + ((1 << _MAX_DROPPED) - 1)
        absmax = (absmax >> _MAX_DROPPED) << _MAX_DROPPED
        # the bits of the smallest nonzero magnitude, or of 0 if there is none
        smallest = lax.bitcast_convert_type(order, jnp.uint32) - jnp.uint32(_ORDER_SHIFT)
        deep = (absmax - smallest).astype(jnp.int32) > jnp.int32(_DEEP << 23)
        some = numerics.at_least(absmax, numerics.MIN_NORMAL_BITS)
        inverse = numerics.quotient(jnp.float32(1), numerics.from_bits(some))
        inverse = jnp.where(deep, inverse * jnp.float32(2.0**_SHIFT), inverse)
        shift = jnp.where(deep, jnp.float32(_SHIFT), jnp.float32(0))
        octaves = shift - numerics.log2(numerics.from_bits(smallest) * inverse)
        # fewer octaves would need more than the largest k, with any codec
        wanted = jnp.float32(-math.log2(self.inner.smallest) * _KEPT_OF_K)
        k = numerics.quotient(wanted, jnp.maximum(octaves, jnp.float32(2.0**-12)))
        k = self.scale.representable(k)
        start = jnp.float32(self.inner.top_octaves) - shift * k
        odds = self.inner.odds(numerics.quotient(jnp.float32(1), k))
        return self.scale.encode(absmax, k), Power(inverse, k, start, odds)

    def _magnitude(self, x: jax.Array) -> jax.Array:
        # from the bits, which `measure` computes too
        magnitude = numerics.to_bits(x) & jnp.uint32(numerics.MAGNITUDE_MASK)
        return numerics.from_bits(magnitude) if self.signed else x

    def _octaves(self, x: jax.Array, power: Power) -> jax.Array:
        """Return log2 of the expanded values; the largest has the inner codec's `top_octaves`."""
        return numerics.log2(self._magnitude(x) * power.inverse) * power.k + power.start

    def quantize(
        self, x: jax.Array, divisor: Power, uniforms: jax.Array | None = None
    ) -> jax.Array:
        """Return codes of f32 values; without uniforms, expanded values are rounded to nearest."""
        codes = self.inner.round_octaves(self._octaves(x, divisor), uniforms, divisor.odds)
        codes = jnp.where(self._magnitude(x) >= jnp.float32(_MIN_NORMAL), codes, jnp.int32(0))
        codes = jnp.where(x < 0, -codes, codes) if self.signed else codes
        return numerics.low_byte(codes, self.dtype)

    def units(self, stored: jax.Array) -> Root:
        """Return the maximum and root of each group, from its stored scale."""
        absmax, k = self.scale.decode(stored)
        return Root(absmax, numerics.quotient(jnp.float32(0.5), k))

    def _restore(self, octaves: jax.Array, unit: Root) -> jax.Array:
        """Return |x| from log2 of the expanded value."""
        factor = numerics.exp2(octaves * unit.half)
        return unit.absmax * factor * factor

    def dequantize(self, codes: jax.Array, unit: Root) -> jax.Array:
        """Return f32 values of codes, elementwise; the group's root broadcasts."""
        codes = codes.astype(jnp.int32)
        y = self._restore(self.inner.octaves(jnp.maximum(codes, -codes)), unit)
        if not self.signed:
            return y
        sign = codes.astype(jnp.uint32) & jnp.uint32(~numerics.MAGNITUDE_MASK & 0xFFFFFFFF)
        return numerics.from_bits(numerics.to_bits(y) | sign)

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Return an upper bound of |decode(encode(x)) - x| per element of a finite group view.

        It is the decoded distance to half a code (nearest) or one code on either side of z, plus
        f32 rounding, which grows with the octaves between x and the maximum, and flushing to 0.
        """
        stored, power = self.measure(x)
        power = jax.tree.map(lambda a: a[..., None], power)
        unit = jax.tree.map(lambda a: a[..., None], self.units(stored))
        octaves = self._octaves(x, power)
        octaves = jnp.minimum(octaves - self.inner.top_octaves, jnp.float32(0))
        z = jnp.clip(self.inner.position(jnp.exp2(octaves), jnp.float32(1)), 1, self.levels)
        width = jnp.float32(1.0 if stochastic else 0.5)
        up, down = (
            self._restore(numerics.log2(self.inner.expand(jnp.clip(at, 1, self.levels))), unit)
            for at in (z + width, z - width)
        )
        exact = jnp.abs(x)
        depth = -numerics.quotient(octaves, power.k)
        slack = exact * (_SLACK + _SLACK_PER_OCTAVE * depth) + 2 * _MIN_NORMAL
        live = exact >= jnp.float32(_MIN_NORMAL)
        return jnp.where(live, jnp.maximum(up - exact, exact - down) + slack, jnp.float32(0))


def expanded(inner: MinifloatCodec | DynamicCodec) -> ExpandedCodec:
    """Add dynamic range expansion to a codec: 1 + 4/G bytes per value.

    Deviations from the published implementation: R_format is the paper's (229376 for E4M3 instead
    of 100352); the minimum excludes all zeros; codes use maximum and k as stored, in 4 bytes per
    group instead of 12; stochastic rounding is between decoded neighbours.
    """
    return ExpandedCodec(inner=inner, signed=inner.signed)


def expanded_e4m3(signed: bool = True) -> ExpandedCodec:
    """E4M3 with dynamic range expansion: COAT's codec of both moments."""
    return expanded(e4m3(signed))


def expanded_e5m2(signed: bool = True) -> ExpandedCodec:
    """E5M2 with dynamic range expansion."""
    return expanded(e5m2(signed))


def expanded_dynamic(signed: bool = True) -> ExpandedCodec:
    """The dynamic map with dynamic range expansion."""
    return expanded(dynamic(signed))
