"""Dynamic range expansion (COAT, section 4): a power of each group fills its codec's range."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.codecs.base import GroupCodec, Span, guard
from optax_lowmem._src.codecs.float8 import (
    DynamicCodec,
    E4M3Codec,
    MinifloatCodec,
    dynamic,
    e4m3,
    e5m2,
)
from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.reprs import ShowsChanges

_K_BITS = 15  # of a word: 4 of the exponent, the rest of the mantissa
_K_DROPPED = 23 - (_K_BITS - 4)
_MAX_DROPPED = _K_BITS - 1  # f32 has a sign, a maximum none
_K_LEAST = 123 << (_K_BITS - 4)  # 2^-4
_MIN_NORMAL = 2.0**-126
_ORDER_SHIFT = (1 << 31) - numerics.MIN_NORMAL_BITS
_DEEP = 120  # octaves of a group; two ends of f32 are 252 apart
_SHIFT = 126.0  # of such a group's maximum
_KEPT_OF_K = 1 - 2.0**-18  # f32 rounding may not lift k over what the minimum allows
_SLACK = 2.0**-19  # of a value: f32 rounding of logarithms and powers
_SLACK_PER_OCTAVE = 2.0**-21  # and of every octave under the maximum


@dataclasses.dataclass(frozen=True)
class ExpansionScale(ShowsChanges):
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

    def representable(self, k: jax.Array) -> jax.Array:
        """The largest k that can be stored and is not over a given one."""
        bits = jnp.clip(
            lax.bitcast_convert_type(k, jnp.int32),
            jnp.int32(_K_LEAST << _K_DROPPED),
            jnp.int32((_K_LEAST + (1 << _K_BITS) - 1) << _K_DROPPED),
        )
        return lax.bitcast_convert_type((bits >> _K_DROPPED) << _K_DROPPED, jnp.float32)

    def encode(self, absmax: jax.Array, k: jax.Array) -> jax.Array:
        """The word of a maximum's bits (a multiple of 2^14) and of a `representable` k."""
        return (absmax << 1) | ((numerics.to_bits(k) >> _K_DROPPED) - jnp.uint32(_K_LEAST))

    def decode(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The f32 maximum, and k as f32."""
        k = ((stored & jnp.uint32((1 << _K_BITS) - 1)) + jnp.uint32(_K_LEAST)) << _K_DROPPED
        absmax = (stored >> _K_BITS) << _MAX_DROPPED
        return numerics.from_bits(absmax), numerics.from_bits(k)


class Power(NamedTuple):
    """The constants of a group for `quantize`."""

    inverse: jax.Array  # 2^shift / maximum; the shift keeps x inverse in f32
    k: jax.Array
    start: jax.Array  # log2 of what the maximum becomes, less k shift
    odds: Any  # of the inner codec


class Root(NamedTuple):
    """The constants of a group for `dequantize`."""

    absmax: jax.Array
    half: jax.Array  # 1 / (2 k): of octaves, in two factors, of which none leaves f32


@dataclasses.dataclass(frozen=True)
class ExpandedCodec(GroupCodec):
    r"""f(x) = sign(x) |x|^k, k = \log_{R}(R_{format}), R = max / min of a group's magnitudes.

    With y = (|x| / max)^k in the domain of the inner codec, whose code 1 is 1 / R_format of its
    largest: x = max * dec(code)^{1/k}, so the normalisation by sqrt(min max) of the paper drops
    out. The minimum is over what is not 0; k is at most 4095, also in a constant group.
    Every x that is not 0 has a code of at least 1, which is the group's minimum or just under it.
    Logarithms and powers of two are to 2^-22 in GPU kernels: codes next to a tie may differ from
    XLA's, by one. An element costs two of each in a step, rounding stochastically none more
    (`MinifloatCodec.odds` has its bias).

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

    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return the bits of |x|, and those in an order in which zeros and subnormals come last."""
        magnitude = numerics.to_bits(x) & jnp.uint32(numerics.MAGNITUDE_MASK)
        # modulo 2^32; in signed order, since the minimum is of int32
        order = lax.bitcast_convert_type(magnitude + jnp.uint32(_ORDER_SHIFT), jnp.int32)
        return Span(numerics.magnitude_bits(x, self.signed)), Span(order, largest=False)

    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, Power]:
        """Stored words, and the power of each group, as stored."""
        absmax, order = ends
        absmax = guard(absmax.astype(jnp.uint32)) + ((1 << _MAX_DROPPED) - 1)
        absmax = (absmax >> _MAX_DROPPED) << _MAX_DROPPED
        # the bits of the smallest magnitude that is not 0, or of a 0
        smallest = lax.bitcast_convert_type(order, jnp.uint32) - jnp.uint32(_ORDER_SHIFT)
        deep = (absmax - smallest).astype(jnp.int32) > jnp.int32(_DEEP << 23)
        some = numerics.at_least(absmax, numerics.MIN_NORMAL_BITS)
        inverse = numerics.quotient(jnp.float32(1), numerics.from_bits(some))
        inverse = jnp.where(deep, inverse * jnp.float32(2.0**_SHIFT), inverse)
        shift = jnp.where(deep, jnp.float32(_SHIFT), jnp.float32(0))
        octaves = shift - numerics.log2(numerics.from_bits(smallest) * inverse)
        # octaves under 2^-12 ask for more than the largest k of any codec
        wanted = jnp.float32(-math.log2(self.inner.smallest) * _KEPT_OF_K)
        k = numerics.quotient(wanted, jnp.maximum(octaves, jnp.float32(2.0**-12)))
        k = self.scale.representable(k)
        start = jnp.float32(self.inner.top_octaves) - shift * k
        odds = self.inner.odds(numerics.quotient(jnp.float32(1), k))
        return self.scale.encode(absmax, k), Power(inverse, k, start, odds)

    def _magnitude(self, x: jax.Array) -> jax.Array:
        # on the bits, which `measure` takes too
        magnitude = numerics.to_bits(x) & jnp.uint32(numerics.MAGNITUDE_MASK)
        return numerics.from_bits(magnitude) if self.signed else x

    def _octaves(self, x: jax.Array, power: Power) -> jax.Array:
        """log2 of the expanded values; of the largest it is the inner codec's `top_octaves`."""
        return numerics.log2(self._magnitude(x) * power.inverse) * power.k + power.start

    def quantize(self, x: jax.Array, divisor: Power, noise: jax.Array | None = None) -> jax.Array:
        """Codes of f32 values, elementwise; `divisor` (of `measure`) and `noise` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: the power of each element's group.
          noise: uniforms in [0, 1) for stochastic rounding; None rounds to nearest (of the expanded
            values).
        """
        codes = self.inner.round_octaves(self._octaves(x, divisor), noise, divisor.odds)
        codes = jnp.where(self._magnitude(x) >= jnp.float32(_MIN_NORMAL), codes, jnp.int32(0))
        codes = jnp.where(x < 0, -codes, codes) if self.signed else codes
        return numerics.low_byte(codes, self.dtype)

    def units(self, stored: jax.Array) -> Root:
        """The maximum and root of each group, of its stored word."""
        absmax, k = self.scale.decode(stored)
        return Root(absmax, numerics.quotient(jnp.float32(0.5), k))

    def _restore(self, octaves: jax.Array, unit: Root) -> jax.Array:
        """|x| of the logarithm of an expanded value."""
        factor = numerics.exp2(octaves * unit.half)
        return unit.absmax * factor * factor

    def dequantize(self, codes: jax.Array, unit: Root) -> jax.Array:
        """f32 values of codes, elementwise; the group's root broadcasts."""
        codes = codes.astype(jnp.int32)
        y = self._restore(self.inner.octaves(jnp.maximum(codes, -codes)), unit)
        if not self.signed:
            return y
        sign = codes.astype(jnp.uint32) & jnp.uint32(~numerics.MAGNITUDE_MASK & 0xFFFFFFFF)
        return numerics.from_bits(numerics.to_bits(y) | sign)

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Upper bound of |decode(encode(x)) - x| for each element of a finite group view.

        Half a code (nearest) or a whole one either side of z, in decoded units, plus f32 rounding,
        which grows with the octaves between x and the maximum, and what is flushed to 0.
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
    """A codec around which each group's range is expanded: 1 + 4/G bytes a value.

    Deviations from the published implementation: R_format as in the paper (229376 for E4M3, there
    100352); the minimum leaves out zeros wherever they are; codes use maximum and k as stored, in
    4 bytes per group instead of 12; stochastic rounding is between decoded neighbours.
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
