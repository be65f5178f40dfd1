"""int8 with a zero-point per group (Q-Adam-mini, equation 1).

A code is stored less its zero-point, modulo 256: as many bytes, and a stored 0 is the value 0 in
every group, as it is in all other codecs. So arrays of zeros are a valid state.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.codecs.base import GroupCodec, Span, guard
from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.reprs import ShowsChanges

_PAPER_MIN_RANGE = 1e-5  # the reference implementation's floor
_FAR = 1024.0  # codes: further than this from the zero-point everything is clipped
_MIN_NORMAL = float(jnp.finfo(jnp.float32).tiny)
_MOST = float(jnp.finfo(jnp.float32).max) * (1 - 2.0**-20)
_SLACK = 2.0**-10  # of a code: f32 rounding of positions up to 255


@dataclasses.dataclass(frozen=True)
class AffineScale(ShowsChanges):
    """Scale and zero-point of a group in one word: 24 bits of an f32 (it has no sign), 8 of z."""

    name: str = "f24+z8"
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.uint32))
    relative_error: float = 2.0**-16
    absolute_error: float = 0.0

    def encode(self, delta: jax.Array, zero: jax.Array) -> jax.Array:
        """The word of a scale's bits (a multiple of 2^7) and of z + 128 in [0, 255]."""
        return (delta << 1) | zero.astype(jnp.uint32)

    def decode(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The f32 scale, and z as f32."""
        zero = (stored & jnp.uint32(0xFF)).astype(jnp.int32) - 128
        return numerics.from_bits((stored >> 8) << 7), zero.astype(jnp.float32)


class Grid(NamedTuple):
    """The grid of the codes of a group: x = (code - zero) * step."""

    step: jax.Array  # of `measure`, guarded: its inverse
    zero: jax.Array


def _wrapped(x: jax.Array) -> jax.Array:
    """The number of [-128, 127] that is x (int32) modulo 256."""
    return lax.shift_right_arithmetic(lax.shift_left(x, jnp.int32(24)), jnp.int32(24))


@dataclasses.dataclass(frozen=True)
class AffineCodec(GroupCodec):
    r"""q = clip(round(x / \Delta) + z, -128, 127), x = \Delta (q - z); stored: q - z modulo 256."""

    scale: AffineScale = dataclasses.field(default_factory=AffineScale)

    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return values and what tells that one is not finite; guarded, the bits of x and of -x."""
        if not self.guarded:
            return Span(x), Span(x, largest=False), Span(numerics.magnitude_bits(x))
        negated = numerics.from_bits(numerics.to_bits(x) ^ jnp.uint32(0x80000000))
        # in integers, where a NaN without a sign wins
        return tuple(Span(lax.bitcast_convert_type(y, jnp.int32)) for y in (x, negated))

    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, Grid]:
        """Stored words, and the grids of codes."""
        return self._guarded(*ends) if self.guarded else self._paper(*ends)

    def _guarded(self, *ends: jax.Array) -> tuple[jax.Array, Grid]:
        """The range holds 0; 254 steps of it leave room for the zero-point's own rounding."""
        high, low = (numerics.from_bits(jnp.maximum(bits, 0).astype(jnp.uint32)) for bits in ends)
        step = high * jnp.float32(1 / 254) + low * jnp.float32(1 / 254)
        bits = ((guard(numerics.to_bits(step)) + 0x7F) >> 7) << 7
        step = numerics.from_bits(bits)
        one = jnp.float32(1)
        inverse = numerics.quotient(one, jnp.where(step == 0, one, step))
        inverse = jnp.where(step == 0, jnp.float32(0), inverse)
        # in the middle of what keeps both ends within the codes: 127.5 + shift, rounded half up;
        # no product is added to, so that FMA changes no bit
        shift = (low - high) * jnp.float32(0.5) * inverse
        zero = numerics.round_to_int(jnp.clip(128 + jnp.floor(shift), 0, 255))
        return self.scale.encode(bits, zero), Grid(inverse, (zero - 128).astype(jnp.float32))

    def _paper(self, high: jax.Array, low: jax.Array, absmax: jax.Array) -> tuple[jax.Array, Grid]:
        """As the reference implementation: a range without 0 puts its zero-point at an end."""
        step = jnp.maximum(high - low, jnp.float32(_PAPER_MIN_RANGE)) / 255
        # a GPU's max and min skip NaN, and the NaN of inf - inf there does not bear rounding up
        finite = absmax.astype(jnp.uint32) < jnp.uint32(numerics.INF_BITS)
        step = jnp.where(finite, step, jnp.float32(jnp.nan))
        zero = jnp.clip(numerics.round_to_int(jnp.clip(-low / step, -_FAR, _FAR)), 0, 255)
        bits = ((numerics.to_bits(step) + 0x40) >> 7) << 7
        return self.scale.encode(bits, zero), Grid(step, (zero - 128).astype(jnp.float32))

    def quantize(self, x: jax.Array, divisor: Grid, noise: jax.Array | None = None) -> jax.Array:
        """Codes of f32 values, elementwise; `divisor` (of `measure`) and `noise` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: the grid of each element's group.
          noise: uniforms in [0, 1) for stochastic rounding; None rounds to nearest.
        """
        if not self.guarded:
            steps = numerics.quotient(x, divisor.step)
            return self._paper_codes(jnp.clip(steps, -_FAR, _FAR), divisor.zero, noise)
        z = jnp.clip(x * divisor.step + divisor.zero, -128, 127)
        if noise is not None:
            lo = jnp.floor(z)
            z = lo + (noise < z - lo).astype(jnp.float32)
        return self._stored(numerics.round_to_int(z), divisor.zero)

    def _stored(self, code: jax.Array, zero: jax.Array) -> jax.Array:
        """q - z modulo 256."""
        return numerics.low_byte(_wrapped(code - zero.astype(jnp.int32)), jnp.int8)

    def _paper_codes(self, steps: jax.Array, zero: jax.Array, noise: jax.Array | None) -> jax.Array:
        """x / step is rounded before the zero-point is added."""
        if noise is not None:
            lo = jnp.floor(steps)
            steps = lo + (noise < steps - lo).astype(jnp.float32)
        code = numerics.round_to_int(steps) + zero.astype(jnp.int32)
        return self._stored(jnp.clip(code, -128, 127), zero)

    def units(self, stored: jax.Array) -> Grid:
        """The grid of each group, of its stored word; guarded, no code decodes to infinity."""
        step, zero = self.scale.decode(stored)
        if self.guarded:
            most = numerics.quotient(jnp.float32(_MOST), jnp.maximum(127 - zero, 128 + zero))
            step = jnp.where(step > most, most, step)  # a comparison lets NaN pass everywhere
        return Grid(step, zero)

    def dequantize(self, codes: jax.Array, unit: Grid) -> jax.Array:
        """f32 values of codes, elementwise; the group's grid broadcasts."""
        zero = unit.zero.astype(jnp.int32)
        steps = _wrapped(codes.astype(jnp.int32) + zero) - zero
        return steps.astype(jnp.float32) * unit.step

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Half a step (nearest) or a whole one; of the guarded form, which clips nothing.

        Plus what a step loses that is flushed to 0, wholly or in part, and what it is shortened by
        in a group that ends within two steps of f32's largest number.
        """
        high = jnp.maximum(jnp.max(x, axis=-1, keepdims=True), 0)
        low = jnp.minimum(jnp.min(x, axis=-1, keepdims=True), 0)
        share = jnp.float32((1 + 2 * self.scale.relative_error) / 254)
        step = high * share - low * share
        width = jnp.float32((1.0 if stochastic else 0.5) + _SLACK)
        at_end = jnp.maximum(high, -low) > jnp.float32(_MOST) - 2 * step
        width = width + jnp.where(at_end, jnp.float32(1.5), jnp.float32(0))
        lost = jnp.where(high == low, jnp.float32(0), jnp.float32(3 * 254 * _MIN_NORMAL))
        return jnp.broadcast_to(step * width + lost, x.shape)


def affine() -> AffineCodec:
    """int8 with a zero-point: 1 + 4/G bytes a value, error at most 1/508 of the group's range.

    The range holds 0, which is exact, and has no floor but that of normal numbers: one under 3e-36
    decodes to 0. Deviations from the reference, whose range
    may leave out 0 (errors of 50 to 99.9 % in groups of one sign) and is at least 1e-5: 254 steps
    instead of 255, so that rounding the zero-point clips neither end; a 24-bit scale.
    """
    return AffineCodec()


def affine_paper() -> AffineCodec:
    """As the reference implementation has it: a floor of 1e-5, a range that may leave out 0.

    For whole groups of a power of two, which is all that it takes: the zeros that fill up another
    widen its range.
    """
    return AffineCodec(guarded=False)
