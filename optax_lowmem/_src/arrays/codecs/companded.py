"""Companding codecs: codes of companded magnitudes relative to the group's maximum."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.base import (
    MAX_SCALE,
    E8M8Scale,
    Float16Scale,
    Float32Scale,
    GroupCodec,
    Span,
)

_EPS = float(jnp.finfo(jnp.float32).eps)
_MIN_NORMAL = float(jnp.finfo(jnp.float32).tiny)
_MAX_ROOT = float(jnp.finfo(jnp.float32).max) ** 0.5 * (1 - 2.0**-20)
_PAPER_MIN_ABSMAX = 1e-12  # minimum of the official implementation

AbsmaxScale = Float32Scale | E8M8Scale | Float16Scale


@dataclasses.dataclass(frozen=True)
class CompandedCodec(GroupCodec):
    r"""Store a slot as codes and the maximum of each group.

    Let y be the magnitudes in the companded domain, s the stored scale and L the largest code. A
    value has the position z(y / s) in [0, L]. Its code is z rounded to nearest (half away from
    zero), or stochastically between the two *decoded* neighbours,
    P(up) = (x - dec(lo)) / (dec(hi) - dec(lo)), so that E[decode(encode(x))] = x.

    Attributes:
      scale: storage format of the group scales.
      guarded: whether codes use the scale as stored, zero groups decode to 0, non-finite groups to
        NaN, and unsigned codes of v > 0 are at least 1. False is the paper's form.
      signed: whether values may be negative.
    """

    scale: AbsmaxScale = dataclasses.field(default_factory=Float32Scale)

    least: ClassVar[float] = _MIN_NORMAL  # `magnitude` of the smallest normal number

    @property
    def levels(self) -> int:
        """Return the largest code."""
        return 2 ** (self.bits - self.signed) - 1

    def magnitude(self, x: jax.Array) -> jax.Array:
        """Return the non-negative values whose group maximum is the scale."""
        return jnp.abs(x)

    def restore(self, y: jax.Array) -> jax.Array:
        """Invert `magnitude`, for non-negative values."""
        return y

    def divisor(self, scale: jax.Array) -> jax.Array:
        """Return the `divisor` of `position`, from a scale (f32, may be 0); once per group."""
        one = jnp.float32(1)
        inverse = numerics.quotient(one, jnp.where(scale == 0, one, scale))
        return jnp.where(scale == 0, jnp.float32(0), inverse)

    @abc.abstractmethod
    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return z in [0, levels] of y, up to rounding; 0 if the scale is 0."""

    def unit(self, scale: jax.Array) -> jax.Array:
        """Return the unit of the results of `expand`, from a scale; computed once per group."""
        return scale

    def expand(self, z: jax.Array) -> jax.Array:
        """Return y at a position z, divided by the group's `unit`."""
        return z

    def rises(self, u: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """Return u < P(up), without a division, for a position z with floor `lo`.

        P(up) is z - lo where decoded values are linear between neighbouring codes.
        """
        return u < z - lo

    def decode_magnitude(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """Return |x| (f32) of a non-negative code."""
        return self.restore(self.expand(code) * self.unit(scale))

    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return the bits of |x|, or of `magnitude(x)` if unsigned in a GPU kernel.

        `quantize` needs the magnitudes in any case; if x is reduced instead, the GPU's assembler
        computes them twice, before and after the reduction.
        """
        y = self.magnitude(x) if not self.signed and numerics.in_gpu_kernel() else x
        return (Span(numerics.magnitude_bits(y, self.signed)),)

    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Return stored scales, and the `divisor` of each."""
        absmax = numerics.from_bits(ends[0].astype(jnp.uint32))
        if self.signed or not numerics.in_gpu_kernel():
            absmax = self.magnitude(absmax)
        stored = self.scale.encode(numerics.to_bits(absmax))
        if self.guarded:
            return stored, self.divisor(self.scale.decode(stored))
        return stored, self.divisor(jnp.maximum(absmax, jnp.float32(_PAPER_MIN_ABSMAX)))

    def quantize(
        self, x: jax.Array, divisor: jax.Array, uniforms: jax.Array | None = None
    ) -> jax.Array:
        y = self.magnitude(x)
        z = jnp.minimum(self.position(y, divisor), jnp.float32(self.levels))
        if uniforms is None and not self.guarded:  # rounded as by the official implementation
            position = jnp.where(x < 0, -z, z) if self.signed else z
            return jnp.floor(position + jnp.float32(0.5)).astype(jnp.int32).astype(self.dtype)
        if uniforms is not None:
            lo = jnp.floor(z)
            z = lo + self.rises(uniforms, z, lo).astype(jnp.float32)
        if self.signed:  # the sign is applied last: otherwise XLA on CPU keeps two f32 divisions
            return numerics.round_to_signed_byte(z, x)
        if self.guarded:  # subnormals are 0 on every backend
            normal = y >= self.least if numerics.in_gpu_kernel() else x >= _MIN_NORMAL
            z = jnp.maximum(z, normal.astype(jnp.float32))
        return numerics.round_to_byte(z)

    def units(self, stored: jax.Array) -> jax.Array:
        return self.unit(self.scale.decode(stored))

    def dequantize(self, codes: jax.Array, unit: jax.Array) -> jax.Array:
        # expand() is odd in every signed codec, so the sign needs no selection
        y = self.expand(codes.astype(jnp.int32).astype(jnp.float32)) * unit
        return y if self.signed else self.restore(y)

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        r"""Return an upper bound of |decode(encode(x)) - x| per element of a finite group view.

        It is the decoded distance to half a code (nearest) or one code (stochastic) on either side
        of z, plus the rounding error of the stored scale, plus f32 rounding (16 ulp, and flushing
        to 0). Elements raised to code 1 are off by at most one code.
        """
        y = self.magnitude(x)
        absmax = jnp.max(y, axis=-1, keepdims=True)
        scale = jnp.where(absmax == 0, jnp.float32(1), absmax)
        if self.guarded:
            scale = jnp.minimum(scale, jnp.float32(MAX_SCALE))
        slack, shift = 1 + self.scale.relative_error, self.scale.absolute_error
        low, high = jnp.maximum(scale / slack - shift, 0), scale * slack + shift
        z = jnp.minimum(self.position(y, self.divisor(scale)), jnp.float32(self.levels))
        width = jnp.float32(1.0 if stochastic else 0.5)
        if not self.signed and self.guarded:
            width = jnp.where(z < 1, jnp.float32(1), width)
        up = self.decode_magnitude(jnp.minimum(z + width, self.levels), high)
        down = self.decode_magnitude(jnp.maximum(z - width, 0.0), low)
        exact = self.restore(y)
        bound = jnp.maximum(up - exact, exact - down) + 16 * _EPS * exact + 2 * _MIN_NORMAL
        return jnp.where(absmax == 0, jnp.float32(0), bound)


# ---- softsign: momentum as companded int8 (FlashOptim Algorithm 2, equation 3) -------------------


@dataclasses.dataclass(frozen=True)
class SoftsignCodec(CompandedCodec):
    """phi(x) = 2 x / (1 + |x|), phi^-1(z) = z / (2 - |z|) on x = m / s."""

    scale: AbsmaxScale = dataclasses.field(default_factory=E8M8Scale)
    bits: int = 8

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return L phi(y / s) as 2 L - 2 L / (1 + y / s), with an error of 2^-14 (L = 127).

        Nothing overflows, and infinity gives 2 L. With 1 / s computed once per group, an element
        costs two multiply-adds and a reciprocal.
        """
        most = jnp.float32(2 * self.levels)
        return most - numerics.quotient(most, 1 + y * divisor)

    def expand(self, z: jax.Array) -> jax.Array:
        """Return z / (2 L - |z|)."""
        return numerics.quotient(z, 2 * self.levels - jnp.abs(z))

    def rises(self, u: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """Return u < P with P = (z - lo) (2 L - 1 - lo) / (2 L - z).

        This is P(up) of expand(lo), expand(z) and expand(lo + 1). With a = 2 L - 1 - lo and
        w = 2 L - z, P = (a + 1 - w) a / w, so u < P is (a + u) w < a a + a.
        """
        a, w = (2 * self.levels - 1) - lo, 2 * self.levels - z
        return (a + u) * w < a * a + a


def softsign() -> SoftsignCodec:
    """Companded int8 with a 16-bit scale of f32's range: the default for `mu`.

    1 + 2/G bytes per value. The error is at most half a code: under 0.4 % of the group maximum.
    """
    return SoftsignCodec()


def softsign4() -> SoftsignCodec:
    """Companded 4-bit codes, two per byte, with a 16-bit scale; 0.5 + 2/G bytes per value.

    Codes are -7 to 7. The error is at most half a code (nearest) or one code (stochastic); the
    widest code is a quarter of the group's maximum. The group size must be even.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> codec = softsign4()
      >>> stored = lowmem.codecs.encode_array(codec, jnp.array([-2.0, 0.3, 0.0]), 32)
      >>> lowmem.codecs.decode_array(codec, *stored, 32, length=3).round(3).tolist()
      [-2.0, 0.3330000042915344, 0.0]
    """
    return SoftsignCodec(bits=4)


def softsign_paper() -> SoftsignCodec:
    """The paper's form: FP16 scales, codes from the unrounded maximum, floor(x + 0.5)."""
    return SoftsignCodec(scale=Float16Scale(), guarded=False)


# ---- sqrt: second moment as uint8 of its root (FlashOptim Algorithm 3, equation 4) ---------------


@dataclasses.dataclass(frozen=True)
class SqrtCodec(CompandedCodec):
    """phi(v) = sqrt(v), scaled by its group maximum; non-negative values only."""

    signed: bool = False
    bits: int = 8

    least: ClassVar[float] = 2.0**-63 * (1 - 2.0**-20)  # allows for approximate roots

    def magnitude(self, x: jax.Array) -> jax.Array:
        """Return sqrt(v)."""
        return jnp.sqrt(x)

    def restore(self, y: jax.Array) -> jax.Array:
        """Return y^2."""
        return y * y

    def divisor(self, scale: jax.Array) -> jax.Array:
        """Return L / s, or 0 for a group of zeros; it cannot overflow, since s > 2^-63."""
        return self.levels * super().divisor(scale)

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return L sqrt(v) / s."""
        return y * divisor

    def unit(self, scale: jax.Array) -> jax.Array:
        """Return s / L; if guarded, with s^2 kept finite (16-bit scales round up to 2^64)."""
        if self.guarded:
            most = jnp.float32(_MAX_ROOT)  # a comparison keeps NaN on every backend
            scale = jnp.where(scale > most, most, scale)
        return scale * jnp.float32(1 / self.levels)

    def rises(self, u: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """Return u < P with P = (z^2 - lo^2) / (2 lo + 1): unbiased in v, not in sqrt(v)."""
        return lo * (lo + 2 * u) + u < z * z


def sqrt() -> SqrtCodec:
    """uint8 of sqrt(v) with an f32 scale, never 0 where v > 0: the default for `nu`.

    1 + 4/G bytes per value. The error of sqrt(v) is at most half a code, s / 510. Positive values
    under half a code get code 1, which bounds m / sqrt(v) (the paper's form divides by zero there).
    """
    return SqrtCodec()


def sqrt4() -> SqrtCodec:
    """4-bit codes of sqrt(v) with a 16-bit scale, never 0 where v > 0; 0.5 + 2/G bytes per value.

    Codes are 0 to 15. The error of sqrt(v) is at most half a code (nearest: s / 30) or one code
    (stochastic). Positive values under 1/225 of the group's maximum get code 1, which is 1/225. The
    group size must be even.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> codec = sqrt4()
      >>> stored = lowmem.codecs.encode_array(codec, jnp.array([225.0, 63.0, 1e-9]), 32)
      >>> lowmem.codecs.decode_array(codec, *stored, 32, length=3).round().tolist()
      [225.0, 64.0, 1.0]
    """
    return SqrtCodec(scale=E8M8Scale(), bits=4)


def sqrt_paper() -> SqrtCodec:
    """The paper's form: FP16 scales, codes from the unrounded maximum, code 0 for small v."""
    return SqrtCodec(scale=Float16Scale(), guarded=False)


# ---- linear: in 8 bits (the ablation of FlashOptim's Figures 4 and 5) or 4 -----------------------


@dataclasses.dataclass(frozen=True)
class LinearCodec(CompandedCodec):
    """Codes of x / s times the largest code, without companding."""

    bits: int = 8

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """Return levels y / s; levels / s alone would overflow for s < 1e-36."""
        return y * divisor * self.levels

    def unit(self, scale: jax.Array) -> jax.Array:
        """Return s / levels."""
        return scale * jnp.float32(1 / self.levels)


def linear(signed: bool = True) -> LinearCodec:
    """int8 (signed) or uint8 with an f32 scale; 1 + 4/G bytes per value, error at most s / 2L."""
    return LinearCodec(signed=signed)


def linear_paper(signed: bool = True) -> LinearCodec:
    """The form of the paper's ablation: FP16 scales, code 0 for small v."""
    return LinearCodec(scale=Float16Scale(), guarded=False, signed=signed)


def linear4(signed: bool = True) -> LinearCodec:
    r"""4-bit codes, two per byte, with an f32 scale; 0.5 + 4/G bytes per value.

    .. math:: q = \mathrm{round}(L x / s), \quad L = 7 \text{ (signed) or } 15, \quad
        s = \max_{\text{group}} |x|

    The error is at most s / 2L (nearest: s / 14, s / 30) or s / L (stochastic). If unsigned,
    positive values have a code of at least 1, so the error may be s / L. The group size must be
    even.

    Args:
      signed: True for codes -7 to 7; False for 0 to 15, for non-negative values.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> codec, x = linear4(), jnp.array([-1.75, 0.1, 1.0])
      >>> codes, scales = lowmem.codecs.encode_array(codec, x, 32)
      >>> codes.shape, codes.dtype, scales.tolist()
      ((2,), dtype('uint8'), [1.75])
      >>> lowmem.codecs.decode_array(codec, codes, scales, 32, length=3).tolist()
      [-1.75, 0.0, 1.0]
    """
    return LinearCodec(bits=4, signed=signed)
