"""Codecs that compand magnitudes: a group's maximum is its scale, a code a position below it."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.base import GroupCodec
from optax_lowmem._src.codecs.scales import Float32Scale, ScaleFormat
from optax_lowmem._src.core import numerics

_EPS = float(jnp.finfo(jnp.float32).eps)
_MIN_NORMAL = float(jnp.finfo(jnp.float32).tiny)
_PAPER_MIN_ABSMAX = 1e-12  # the official implementation's floor


@dataclasses.dataclass(frozen=True)
class CompandedCodec(GroupCodec):
    r"""Stores a slot as codes and the maximum of each group.

    With magnitudes y (of the companded domain), s the scale as it is stored and L the largest code,
    the position of a value is z(y / s) in [0, L]; the code is z rounded, to nearest (half away from
    zero), or stochastically between the two *decoded* neighbours,
    P(up) = (x - dec(lo)) / (dec(hi) - dec(lo)), so that E[decode(encode(x))] = x.

    Attributes:
      scale: format of the scale of a group.
      guarded: codes use the scale as stored, zero and non-finite groups are exact, and a
        non-negative codec gives a code of at least 1 to every v > 0. False is the paper's form.
      signed: whether values may be negative.
    """

    scale: ScaleFormat = dataclasses.field(default_factory=Float32Scale)

    least: ClassVar[float] = _MIN_NORMAL  # magnitude of the least normal number

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - self.signed) - 1

    def magnitude(self, x: jax.Array) -> jax.Array:
        """Non-negative values of the companded domain whose group maximum is the scale."""
        return jnp.abs(x)

    def restore(self, y: jax.Array) -> jax.Array:
        """Inverse of `magnitude` for non-negative values."""
        return y

    def divisor(self, scale: jax.Array) -> jax.Array:
        """Return the factor that `position` takes, from a scale (f32, may be 0); once per group."""
        one = jnp.float32(1)
        inverse = numerics.quotient(one, jnp.where(scale == 0, one, scale))
        return jnp.where(scale == 0, jnp.float32(0), inverse)

    @abc.abstractmethod
    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """z in [0, levels] of y, at most a rounding above; 0 in a group of scale 0."""

    def unit(self, scale: jax.Array) -> jax.Array:
        """Return the unit of the values of `expand`, from a scale; computed once per group."""
        return scale

    @abc.abstractmethod
    def expand(self, z: jax.Array) -> jax.Array:
        """y at a position z, in units of the group's `unit`."""

    @abc.abstractmethod
    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """Return whether noise < P(up) for a position z over the code lo, without a division."""

    def decode_magnitude(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """|x| (f32) of a non-negative code."""
        return self.restore(self.expand(code) * self.unit(scale))

    def measure(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Stored scales [..., groups] of a group view, and the inverse of each."""
        absmax = self._absmax(x)
        stored = self.scale.encode(numerics.to_bits(absmax))
        if self.guarded:
            return stored, self.divisor(self.scale.decode(stored))
        return stored, self.divisor(jnp.maximum(absmax, jnp.float32(_PAPER_MIN_ABSMAX)))

    def _absmax(self, x: jax.Array) -> jax.Array:
        """Return the largest magnitude of each group.

        A kernel takes it of the magnitudes, which `quantize` needs in any case: with the values
        themselves its assembler computes the magnitudes twice, before and after the reduction.
        """
        if not self.signed and numerics.in_kernel():
            return numerics.from_bits(numerics.absmax_bits(self.magnitude(x), self.signed))
        return self.magnitude(numerics.from_bits(numerics.absmax_bits(x, self.signed)))

    def quantize(
        self, x: jax.Array, divisor: jax.Array, noise: jax.Array | None = None
    ) -> jax.Array:
        """Codes of f32 values, elementwise; `divisor` (of `measure`) and `noise` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: of each element's group.
          noise: uniforms in [0, 1) for stochastic rounding; None rounds to nearest.
        """
        y = self.magnitude(x)
        z = jnp.minimum(self.position(y, divisor), jnp.float32(self.levels))
        if noise is None and not self.guarded:
            return self._paper_codes(x, z)
        if noise is not None:
            lo = jnp.floor(z)
            z = lo + self.rises(noise, z, lo).astype(jnp.float32)
        if self.signed:  # the sign last: XLA on CPU would else keep two f32 divisions
            return numerics.round_to_signed_byte(z, x)
        if self.guarded:  # subnormals are 0 on every backend
            normal = y >= self.least if numerics.in_kernel() else x >= _MIN_NORMAL
            z = jnp.maximum(z, normal.astype(jnp.float32))
        return numerics.round_to_byte(z)

    def _paper_codes(self, x: jax.Array, z: jax.Array) -> jax.Array:
        """floor(x + 0.5) of the signed position, as the official implementation rounds."""
        signed = jnp.where(x < 0, -z, z) if self.signed else z
        return jnp.floor(signed + jnp.float32(0.5)).astype(jnp.int32).astype(self.dtype)

    def units(self, stored: jax.Array) -> jax.Array:
        """Return the unit of each group for `dequantize`, from its stored scale."""
        return self.unit(self.scale.decode(stored))

    def dequantize(self, codes: jax.Array, unit: jax.Array) -> jax.Array:
        """f32 values of codes, elementwise; the group's `unit` broadcasts."""
        # expand() is odd in every signed codec, so the sign needs no selection
        y = self.expand(codes.astype(jnp.int32).astype(jnp.float32)) * unit
        return y if self.signed else self.restore(y)

    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        r"""Upper bound of |decode(encode(x)) - x| for each element of a finite group view.

        Half a code (nearest) or a whole one (stochastic) either side of z, in decoded units; plus
        what the stored scale loses of the group maximum, plus f32 rounding (16 ulp); a floored
        element is off by at most one code.
        """
        y = self.magnitude(x)
        absmax = jnp.max(y, axis=-1, keepdims=True)
        scale = jnp.where(absmax == 0, jnp.float32(1), absmax)
        slack, shift = 1 + self.scale.relative_error, self.scale.absolute_error
        low, high = jnp.maximum(scale / slack - shift, 0), scale * slack + shift
        z = self.position(y, self.divisor(scale))
        width = jnp.float32(1.0 if stochastic else 0.5)
        if not self.signed and self.guarded:
            width = jnp.where(z < 1, jnp.float32(1), width)
        up = self.decode_magnitude(jnp.minimum(z + width, self.levels), high)
        down = self.decode_magnitude(jnp.maximum(z - width, 0.0), low)
        exact = self.restore(y)
        bound = jnp.maximum(up - exact, exact - down) + 16 * _EPS * exact
        return jnp.where(absmax == 0, jnp.float32(0), bound)
