"""Values to which a step rounds weights without a correction: all of bf16, or those of 8-bit codes.

The 8-bit formats are those of Microscaling (OCP, 2023): neighbours share a scale, a power of two.
Their values have at most 7 significant bits, so bf16 arrays hold them exactly.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.base import Layout, StoredSlot
from optax_lowmem._src.arrays.hyperparameters import check_choice

_SCALE_BITS = 0x7F800000  # of f32: the power of two at or below a magnitude
_LEAST, _LARGEST = 2.0**-100, 2.0**125  # floats: Pallas cannot bitcast a constant for Triton


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Floats with `mantissa` bits after the leading one, at most `depth` binades below a group's.

    Values near x are the larger of 2^(floor(log2 |x|) - mantissa) and 2^(E - depth) apart, and the
    largest is 2^(E+1) - 2^(E - mantissa), with the least E for which that bounds the group. int8
    has `mantissa == depth`: all of its values are equally far apart.
    """

    name: str
    mantissa: int
    depth: int
    codes: DTypeLike  # dtype of the codes
    unit: float  # value of the code 1, relative to 2^E

    def spacing(self, x: jax.Array, layout: Layout) -> jax.Array:
        """Return the distance of the two values between which each element lies; f32."""
        return self._powers(x, layout)[1]

    def round(self, x: jax.Array, bits: jax.Array, layout: Layout) -> jax.Array:
        """Round f32 values stochastically, by random bits (uint32); return bf16.

        The mean of the result is x, and values of the format are unchanged. A group with a NaN or
        infinity becomes NaN.
        """
        top, spacing = self._powers(x, layout)
        position = x * _inverse(spacing)
        low = jnp.floor(position)
        # not floor(position + u), whose sum rounds up where u is nearly 1
        up = numerics.uniform(bits) < position - low
        rounded = jnp.where(up, low + 1, low) * spacing
        largest = top * jnp.float32(2 - 2.0**-self.mantissa)
        rounded = jnp.clip(rounded, -largest, largest)
        finite = top < jnp.float32(_LARGEST)
        return numerics.narrow(jnp.where(finite, rounded, jnp.float32(jnp.nan)), jnp.bfloat16)

    def group_powers(self, x: jax.Array, layout: Layout) -> jax.Array:
        """Return 2^E of each group, at most 2^125, which stands for a group that is not finite."""
        # a maximum over the largest value carries into the exponent
        carry = jnp.uint32((1 << (23 - self.mantissa)) - 1)
        power = (numerics.absmax_bits(layout.to_groups(x)) + carry) & jnp.uint32(_SCALE_BITS)
        return jnp.clip(numerics.from_bits(power), jnp.float32(_LEAST), jnp.float32(_LARGEST))

    def _powers(self, x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Return 2^E of each element's group, and the spacing of each element."""
        top = layout.to_elements(self.group_powers(x, layout))
        least = top * jnp.float32(2.0**-self.depth)
        own = numerics.from_bits(numerics.to_bits(x) & jnp.uint32(_SCALE_BITS))
        return top, jnp.maximum(own * jnp.float32(2.0**-self.mantissa), least)


def _inverse(power: jax.Array) -> jax.Array:
    """Return 1 / x for powers of two, exactly."""
    return numerics.from_bits(jnp.uint32(0x7F000000) - numerics.to_bits(power))


@dataclasses.dataclass(frozen=True)
class Bfloat16:
    """All values of bf16; the spacing is at most 2^-7 of a value."""

    name: str = "bfloat16"

    def spacing(self, x: jax.Array, layout: Layout) -> jax.Array:
        """Return an upper bound of the distance of the two values around each element; f32."""
        return jnp.abs(x) * jnp.float32(2.0**-7)

    def round(self, x: jax.Array, bits: jax.Array, layout: Layout) -> jax.Array:
        """Round f32 values stochastically to bf16, by random bits (uint32)."""
        return numerics.narrow_stochastically(x, bits)


BFLOAT16 = Bfloat16()
_CODED = {
    "int8": WeightFormat("int8", 6, 6, jnp.int8, 2.0**-6),
    "e4m3": WeightFormat("e4m3", 3, 16, jnp.float8_e4m3fn, 2.0**-7),
}
WEIGHT_FORMATS: dict[str, WeightFormat | Bfloat16] = {BFLOAT16.name: BFLOAT16, **_CODED}


def encode_weight(w: jax.Array, weights: str = "int8", group_size: int = 32) -> StoredSlot:
    """Return a weight as 8-bit codes and the exponents of its groups: 1.03 bytes per element.

    Exact for what a step with `Storage(weights=...)` of this format and group size returns; other
    values are rounded to nearest.

    Args:
      w: bf16 or f32 [..., n].
      weights: `int8` or `e4m3`.
      group_size: neighbours on the last axis that share a power of two.

    Returns:
      A `StoredSlot`: codes, int8 or float8_e4m3fn, of w's shape; scales, uint8
      [..., ceil(n / group_size)], are biased exponents, 255 for a group with NaN or infinity.

    Raises:
      ValueError: for an unknown format.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> stored = lowmem.codecs.encode_weight(jnp.full((64, 64), 0.75, jnp.bfloat16))
      >>> stored.codes.dtype, int(stored.codes[0, 0]), int(stored.scales[0, 0])
      (dtype('int8'), 96, 126)
      >>> float(lowmem.codecs.decode_weight(stored)[0, 0])
      0.75
    """
    check_choice("weights", weights, _CODED)
    form, layout = _CODED[weights], Layout(group_size, w.shape[-1])
    x = numerics.widen(w)
    power = form.group_powers(x, layout)
    unit = layout.to_elements(power) * jnp.float32(form.unit)
    finite = layout.to_elements(power) < jnp.float32(_LARGEST)
    scaled = jnp.where(finite, x * _inverse(unit), 0)
    codes = (jnp.round(scaled) if form.codes == jnp.int8 else scaled).astype(form.codes)
    exponents = (numerics.to_bits(power) >> 23).astype(jnp.uint8)
    finite_group = power < jnp.float32(_LARGEST)
    return StoredSlot(codes, jnp.where(finite_group, exponents, jnp.uint8(255)))


def decode_weight(stored: StoredSlot, group_size: int = 32) -> jax.Array:
    """Return the bf16 weight of `encode_weight`.

    Args:
      stored: its result.
      group_size: that of `encode_weight`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> stored = lowmem.codecs.encode_weight(jnp.ones((8, 64)), "e4m3")
      >>> lowmem.codecs.decode_weight(stored).dtype
      dtype(bfloat16)
    """
    (form,) = (form for form in _CODED.values() if form.codes == stored.codes.dtype)
    layout = Layout(group_size, stored.codes.shape[-1])
    power = numerics.from_bits(stored.scales.astype(jnp.uint32) << 23)  # infinity for 255
    unit = layout.to_elements(power) * jnp.float32(form.unit)
    return (stored.codes.astype(jnp.float32) * unit).astype(jnp.bfloat16)
