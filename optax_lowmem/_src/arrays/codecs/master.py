"""Split of an f32 master weight into a 16-bit weight and a correction of 8 or 16 bits.

The scheme `bits` (bf16 only) is integer arithmetic on the bits of the f32. The scheme `ulp` is
FlashOptim's Algorithm 1 (equations 1 and 2); fp16 needs it, and bf16 has it for comparison. With 24
bits both can round stochastically: the stored value is then w in expectation, so that steps far
below its resolution add up. Otherwise they round to nearest. Corrections of `bits` are signed
integers, those of `ulp` unsigned with an offset, so that the dtypes of a weight and its correction
determine the scheme.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.reprs import ShowsChanges

Bits = jax.Array | None
_LARGEST = 3.3895313892515355e38  # of bf16; only smaller values are rounded up: none becomes inf


@dataclasses.dataclass(frozen=True)
class MasterSplit(ShowsChanges, abc.ABC):
    """Storage of the f32 master weight w as a 16-bit weight p and a correction.

    Attributes:
      bits: bits of weight and correction together, 24 or 32.
      stochastic: whether a step rounds stochastically; with 32 bits it never does.
    """

    bits: int = 24
    stochastic: bool = False

    @property
    def name(self) -> str:
        """Return `bits-24`, `ulp-32`, ..."""
        return f"{'ulp' if isinstance(self, UlpSplit) else 'bits'}-{self.bits}"

    @property
    def width(self) -> int:
        """Return the number of bits of the correction."""
        return self.bits - 16

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the correction."""

    @property
    def zero(self) -> int:
        """Return the correction of a master weight that equals its 16-bit weight."""
        return 0

    @abc.abstractmethod
    def round(self, w: jax.Array, dtype: jnp.dtype, random_bits: Bits = None) -> jax.Array:
        """Return 16-bit weights p of f32 master weights w, rounded by `random_bits` (uint32)."""

    @abc.abstractmethod
    def correction(self, w: jax.Array, p: jax.Array, random_bits: Bits = None) -> jax.Array:
        """Return the correction that brings p closest to w; p need not be `round(w)`.

        With random bits it is unbiased if p is `round(w)` with the same bits.
        """

    @abc.abstractmethod
    def join(self, p: jax.Array, correction: jax.Array) -> jax.Array:
        """Return the master weight (f32) of a weight and its correction."""

    def split(
        self, w: jax.Array, dtype: jnp.dtype, random_bits: Bits = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return weights and corrections of master weights w (f32)."""
        p = self.round(w, dtype, random_bits)
        return p, self.correction(w, p, random_bits)


def _bf16_bits(p: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class BitSplit(MasterSplit):
    r"""p is the upper 16 bits of w, rounded half up; the correction is the signed remainder.

    Let k be the width of the correction and b the bits of w. With 24 bits, b is the upper 24,
    rounded to nearest even, or stochastically by adding 8 random bits below them. Then
    p = (b + 2^(k-1)) >> k and c = b - (p << k). Joining is one shift and one addition. Splitting a
    joined weight changes no bit, however it is rounded, so a zero update is exact. 24 bits:
    relative error at most 2^-16 (stochastically 2^-15, and exact in expectation); 32 bits: every
    finite f32 is restored exactly.
    """

    @property
    def dtype(self) -> jnp.dtype:
        """Return int8 or int16."""
        return jnp.dtype(jnp.int8 if self.bits == 24 else jnp.int16)

    def _lifted(self, w: jax.Array, random_bits: Bits) -> jax.Array:
        """Return the bits of w; for 24 bits increased so that dropping the lowest 8 rounds."""
        b = numerics.canonical_nan(numerics.to_bits(w))
        if self.bits == 32:
            return b
        if random_bits is None:
            return b + 0x7F + ((b >> 8) & 1)
        return b + jnp.where(jnp.abs(w) < jnp.float32(_LARGEST), random_bits >> 24, jnp.uint32(0))

    def round(
        self, w: jax.Array, dtype: jnp.dtype = jnp.bfloat16, random_bits: Bits = None
    ) -> jax.Array:
        """Return the nearest bf16 weights; ties are rounded away from zero.

        With 24 bits w is first rounded to 24 bits, at random or to nearest, so a value within 2^-8
        of a spacing from a tie may be rounded to either side.
        """
        return self.split(w, dtype, random_bits)[0]

    def correction(self, w: jax.Array, p: jax.Array, random_bits: Bits = None) -> jax.Array:
        """Return b - (p << k), clamped if p is not the rounding of w."""
        t, weight = self._lifted(w, random_bits) >> (32 - self.bits), _bf16_bits(p)
        half = 1 << (self.width - 1)
        c = jnp.clip((t - (weight << self.width)).astype(jnp.int32), -half, half - 1)
        magnitude = weight & 0x7FFF
        other_sign = (t >> (self.bits - 1)) != (weight >> 15)
        c = jnp.where(other_sign, jnp.where(magnitude == 0, 0, -half), c)
        rounded = (t + half) >> self.width == weight
        return jnp.where((magnitude >= 0x7F80) & ~rounded, 0, c).astype(self.dtype)

    def split(
        self, w: jax.Array, dtype: jnp.dtype = jnp.bfloat16, random_bits: Bits = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return weights and corrections; here p is the rounding of w, so no clamp is needed."""
        b = self._lifted(w, random_bits)
        weight = ((b + 0x8000) >> 16).astype(jnp.uint16)
        # the remainder is the bits of b below the upper 16, read as a signed integer
        correction = (b >> (32 - self.bits)).astype(self.dtype)
        return lax.bitcast_convert_type(weight, jnp.bfloat16), correction

    def join(self, p: jax.Array, correction: jax.Array) -> jax.Array:
        """Return the f32 with bits (p << k) + c.

        c < 0 with p = 0 (a user's edit) counts as 0: 0 + (-1) would be 0xFFFFFFFF, a NaN.
        """
        weight, c = _bf16_bits(p), correction.astype(jnp.int32)
        c = jnp.where((weight & 0x7FFF) == 0, jnp.maximum(c, 0), c)
        joined = (weight << self.width) + c.astype(jnp.uint32)
        return numerics.from_bits(joined << (32 - self.bits))


@dataclasses.dataclass(frozen=True)
class UlpSplit(MasterSplit):
    r"""p rounded to nearest even, and rho = round(N (w - p) / (ULP(p) / 2)) (Alg. 1, eq. 1 and 2).

    N = 2^(k-1) - 1 (127 or 32767); rho is stored unsigned, as rho + 2^(k-1). With bits rho is
    rounded stochastically, unless the nearest rho already restores w (in f32). fp16, 24 bits: mean
    relative error under 1e-6 in fp16's normal range; 32 bits: exact there. bf16, 32 bits: exact in
    99.7 %. Weights under 2^-60 are scaled by 2^64 for the arithmetic, so that no remainder is
    subnormal: XLA on a CPU flushes those to 0.
    """

    @property
    def dtype(self) -> jnp.dtype:
        """Return uint8 or uint16."""
        return jnp.dtype(jnp.uint8 if self.bits == 24 else jnp.uint16)

    @property
    def zero(self) -> int:
        """Return the offset 2^(k-1)."""
        return 1 << (self.width - 1)

    def _half_ulp(self, p: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return log2 of a weight's scaling factor, and of its scaled ULP / 2 as two summands.

        The summands are integers of half its size, so that their powers of two are normal numbers.
        """
        info = jnp.finfo(p.dtype)
        bits = numerics.to_bits(p.astype(jnp.float32))
        exponent = ((bits & numerics.MAGNITUDE_MASK) >> 23).astype(jnp.int32) - 127
        lift = jnp.where(exponent < -60, 64, 0)
        exponent = jnp.maximum(exponent, int(info.minexp)) + lift - info.nmant - 1
        low = exponent // 2
        return lift, low, exponent - low

    def round(self, w: jax.Array, dtype: jnp.dtype, random_bits: Bits = None) -> jax.Array:
        """Return `w` rounded to nearest even, also with random bits."""
        return numerics.narrow(w, dtype)

    def correction(self, w: jax.Array, p: jax.Array, random_bits: Bits = None) -> jax.Array:
        """Return rho + 2^(k-1); rho is clipped to [-N, N], and is 0 where p is not finite."""
        weight = numerics.widen(p)
        lift, low, high = self._half_ulp(p)
        up = numerics.power_of_two(lift)
        e = jnp.where(jnp.isfinite(weight), w * up - weight * up, jnp.float32(0))
        e = e * numerics.power_of_two(-low) * numerics.power_of_two(-high)
        top = jnp.float32(self.zero - 1)
        exact = jnp.clip(e, -1, 1) * top
        rho = jnp.where(exact < 0, -jnp.floor(0.5 - exact), jnp.floor(exact + 0.5))
        stored = (rho.astype(jnp.int32) + self.zero).astype(self.dtype)
        if random_bits is None or self.bits == 32:
            return stored
        low = jnp.floor(exact)
        rho = jnp.minimum(low + (numerics.uniform(random_bits) < exact - low), top)
        drawn = (rho.astype(jnp.int32) + self.zero).astype(self.dtype)
        return jnp.where(self.join(p, stored) == w, stored, drawn)

    def join(self, p: jax.Array, correction: jax.Array) -> jax.Array:
        """Return p + rho / N * ULP(p) / 2."""
        weight = numerics.widen(p)
        lift, low, high = self._half_ulp(p)
        rho = (correction.astype(jnp.int32) - self.zero).astype(jnp.float32)
        e = rho * jnp.float32(1 / (self.zero - 1))
        e = e * numerics.power_of_two(low) * numerics.power_of_two(high)
        return (weight * numerics.power_of_two(lift) + e) * numerics.power_of_two(-lift)


def master_split(
    dtype: jnp.dtype, bits: int, scheme: str = "bits", rounding: str = "nearest"
) -> MasterSplit:
    """Return the split for 16-bit weights of a dtype; fp16 always uses `ulp`."""
    stochastic = rounding == "stochastic" and bits == 24
    if scheme == "ulp" or jnp.dtype(dtype) == jnp.float16:
        return UlpSplit(bits, stochastic)
    return BitSplit(bits, stochastic)


def split_of(correction_dtype: jnp.dtype) -> MasterSplit:
    """Return the split that made a correction, from the correction's dtype."""
    for split in SPLITS.values():
        if split.dtype == correction_dtype:
            return split
    names = ", ".join(split.dtype.name for split in SPLITS.values())
    raise ValueError(f"a correction must have dtype {names}; got {correction_dtype}")


SPLITS: dict[str, MasterSplit] = {
    split.name: split for split in (BitSplit(24), BitSplit(32), UlpSplit(24), UlpSplit(32))
}
