"""Momentum as companded int8 (FlashOptim Algorithm 2, equation 3)."""

import dataclasses

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.companded import CompandedCodec
from optax_lowmem._src.codecs.scales import E8M8Scale, Float16Scale, ScaleFormat
from optax_lowmem._src.core import numerics


@dataclasses.dataclass(frozen=True)
class SoftsignCodec(CompandedCodec):
    r"""phi(x) = 2 x / (1 + |x|), phi^-1(z) = z / (2 - |z|) on x = m / s."""

    scale: ScaleFormat = dataclasses.field(default_factory=E8M8Scale)

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """127 phi(y / s) = 254 y / (s + y), as 254 - 254 / (1 + y / s), to 2^-14.

        Nothing overflows, it is 254 for infinity, and with 1 / s once a group it is two
        multiply-adds and a reciprocal an element.
        """
        most = jnp.float32(2 * self.levels)
        return most - numerics.quotient(most, 1 + y * divisor)

    def expand(self, z: jax.Array) -> jax.Array:
        """z / (254 - |z|)."""
        return numerics.quotient(z, 2 * self.levels - jnp.abs(z))

    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """P = (z - lo) (253 - lo) / (254 - z), from expand(lo), expand(z), expand(lo + 1).

        With a = 253 - lo and w = 254 - z it is (a + 1 - w) a / w, so noise < P is
        (a + noise) w < a a + a.
        """
        a, w = (2 * self.levels - 1) - lo, 2 * self.levels - z
        return (a + noise) * w < a * a + a


def softsign() -> SoftsignCodec:
    """Companded int8 with a 16-bit scale of f32's range: the default for `mu`.

    1 + 2/G bytes a value. Error at most half a code: under 0.4 % of the group maximum.
    """
    return SoftsignCodec()


def softsign_paper() -> SoftsignCodec:
    """The paper's form: FP16 scales, codes from the unrounded maximum, floor(x + 0.5)."""
    return SoftsignCodec(scale=Float16Scale(), guarded=False)
