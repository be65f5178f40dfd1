"""int8 with a zero-point per group (Q-Adam-mini, equation 1).

The stored code is q - z modulo 256, also one byte. So a stored 0 is the value 0 in every group, as
in all other codecs, and an array of zeros is a valid state.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.base import GroupCodec, ScaleFormat, Span, guard

_PAPER_MIN_RANGE = 1e-5  # minimum range of the reference implementation
_FAR = 1024.0  # codes: positions further than this from the zero-point are clipped in any case
_MIN_NORMAL = float(jnp.finfo(jnp.float32).tiny)
_MOST = float(jnp.finfo(jnp.float32).max) * (1 - 2.0**-20)
_SLACK = 2.0**-10  # codes: f32 rounding error of positions up to 255


@dataclasses.dataclass(frozen=True)
class AffineScale(ScaleFormat):
    """Scale and zero-point z of a group in 32 bits: 24 of the (positive) f32 scale, 8 of z."""

    name = "f24+z8"
    dtype = jnp.dtype(jnp.uint32)
    relative_error = 2.0**-16

    def encode(self, delta: jax.Array, zero: jax.Array) -> jax.Array:
        """Return the uint32 of a scale's bits (a multiple of 2^7) and z + 128 in [0, 255]."""
        return (delta << 1) | zero.astype(jnp.uint32)

    def decode(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the f32 scale, and z as f32."""
        zero = (stored & jnp.uint32(0xFF)).astype(jnp.int32) - 128
        return numerics.from_bits((stored >> 8) << 7), zero.astype(jnp.float32)


class Grid(NamedTuple):
    """The quantization grid of a group: x = (code - zero) * step."""

    step: jax.Array  # 1 / step if from a guarded codec's `measure`
    zero: jax.Array


def _wrapped(x: jax.Array) -> jax.Array:
    """Return x (int32) modulo 256, in [-128, 127]."""
    return lax.shift_right_arithmetic(lax.shift_left(x, jnp.int32(24)), jnp.int32(24))


@dataclasses.dataclass(frozen=True)
class AffineCodec(GroupCodec):
    r"""q = clip(round(x / \Delta) + z, -128, 127), stored as q - z mod 256; x = \Delta (q - z)."""

    scale: AffineScale = dataclasses.field(default_factory=AffineScale)

    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return x (maximum, minimum) and magnitude bits; if guarded, the bits of x and of -x."""
        if not self.guarded:
            return Span(x), Span(x, largest=False), Span(numerics.magnitude_bits(x))
        negated = numerics.from_bits(numerics.to_bits(x) ^ jnp.uint32(0x80000000))
        # as integers, of which a NaN without a sign bit is the largest
        return tuple(Span(lax.bitcast_convert_type(y, jnp.int32)) for y in (x, negated))

    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, Grid]:
        """Return stored scales and zero-points, and grids for `quantize`."""
        return self._guarded(*ends) if self.guarded else self._as_published(*ends)

    def _guarded(self, *ends: jax.Array) -> tuple[jax.Array, Grid]:
        """Use a range that includes 0, in 254 steps: one code is spare for rounding z."""
        high, low = (numerics.from_bits(jnp.maximum(bits, 0).astype(jnp.uint32)) for bits in ends)
        step = high * jnp.float32(1 / 254) + low * jnp.float32(1 / 254)
        bits = ((guard(numerics.to_bits(step)) + 0x7F) >> 7) << 7
        step = numerics.from_bits(bits)
        one = jnp.float32(1)
        inverse = numerics.quotient(one, jnp.where(step == 0, one, step))
        inverse = jnp.where(step == 0, jnp.float32(0), inverse)
        # z + 128 is 127.5 + shift rounded half up: the middle of the values that clip neither end;
        # no product is an operand of an addition, so that FMA changes no bit
        shift = (low - high) * jnp.float32(0.5) * inverse
        zero = numerics.round_to_int(jnp.clip(128 + jnp.floor(shift), 0, 255))
        return self.scale.encode(bits, zero), Grid(inverse, (zero - 128).astype(jnp.float32))

    def _as_published(
        self, high: jax.Array, low: jax.Array, magnitude: jax.Array
    ) -> tuple[jax.Array, Grid]:
        """Follow the reference implementation: if the range excludes 0, z is clipped to an end.

        The stored scale has 24 bits; codes are computed with the whole one. `magnitude` is the
        largest of |x| as bits.
        """
        step = jnp.maximum(high - low, jnp.float32(_PAPER_MIN_RANGE)) / 255
        # a GPU's max and min skip NaN, so only the magnitude shows it. The NaN is set here, since
        # rounding up would overflow the NaN of inf - inf
        # https://github.com/triton-lang/triton/pull/7349
        finite = magnitude.astype(jnp.uint32) < jnp.uint32(numerics.INF_BITS)
        step = jnp.where(finite, step, jnp.float32(jnp.nan))
        zero = jnp.clip(
            numerics.round_to_int(jnp.clip(-low / step, -_FAR, _FAR)), 0, 255
        )  # z + 128
        bits = ((numerics.to_bits(step) + 0x40) >> 7) << 7
        return self.scale.encode(bits, zero), Grid(step, (zero - 128).astype(jnp.float32))

    def quantize(self, x: jax.Array, divisor: Grid, uniforms: jax.Array | None = None) -> jax.Array:
        """Return codes of f32 values; `divisor` is the grid of each element's group."""
        if self.guarded:
            z = jnp.clip(x * divisor.step + divisor.zero, -128, 127)
        else:  # as in the reference implementation, which rounds before it adds the zero-point
            z = jnp.clip(numerics.quotient(x, divisor.step), -_FAR, _FAR)
        if uniforms is not None:
            lo = jnp.floor(z)
            z = lo + (uniforms < z - lo).astype(jnp.float32)
        code, zero = numerics.round_to_int(z), divisor.zero.astype(jnp.int32)
        if not self.guarded:
            code = jnp.clip(code + zero, -128, 127)
        return numerics.low_byte(_wrapped(code - zero), jnp.int8)  # q - z modulo 256

    def units(self, stored: jax.Array) -> Grid:
        """Return each group's grid, from its stored scale; if guarded, no code decodes to inf."""
        step, zero = self.scale.decode(stored)
        if self.guarded:
            most = numerics.quotient(jnp.float32(_MOST), jnp.maximum(127 - zero, 128 + zero))
            step = jnp.where(step > most, most, step)  # comparisons keep NaN on every backend
        return Grid(step, zero)

    def dequantize(self, codes: jax.Array, unit: Grid) -> jax.Array:
        zero = unit.zero.astype(jnp.int32)
        steps = _wrapped(codes.astype(jnp.int32) + zero) - zero
        return steps.astype(jnp.float32) * unit.step

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Return the error bound of guarded codecs, which clip nothing: half a step, or a step.

        The bound adds the error of steps that are flushed to 0 (or partly), and of steps that are
        shortened in groups that end within two steps of f32's largest number.
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
    """int8 with a zero-point: 1 + 4/G bytes per value, error at most 1/508 of the group's range.

    The range always includes 0, which is exact. Ranges below 3e-36 decode to 0. Deviations: the
    reference implementation's range may exclude 0 (errors of 50 to 99.9 % in groups of one sign)
    and is at least 1e-5; here there are 254 steps instead of 255, so that rounding the zero-point
    clips neither end, and the scale has 24 bits.
    """
    return AffineCodec()


def affine_paper() -> AffineCodec:
    """The reference implementation's form: a minimum range of 1e-5 that may exclude 0.

    Use it for whole groups with a power of two values only: zero padding would widen the range.
    """
    return AffineCodec(guarded=False)
