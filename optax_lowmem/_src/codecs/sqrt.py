"""Second moment as uint8 of its square root (FlashOptim Algorithm 3, equation 4)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.companded import CompandedCodec
from optax_lowmem._src.codecs.scales import Float16Scale


@dataclasses.dataclass(frozen=True)
class SqrtCodec(CompandedCodec):
    r"""phi(v) = sqrt(v), scaled by its group maximum; non-negative values only."""

    signed: bool = False

    least: ClassVar[float] = 2.0**-63

    def magnitude(self, x: jax.Array) -> jax.Array:
        """sqrt(v)."""
        return jnp.sqrt(x)

    def restore(self, y: jax.Array) -> jax.Array:
        """y^2."""
        return y * y

    def divisor(self, scale: jax.Array) -> jax.Array:
        """255 / s, 0 for a group of zeros; s is over 2^-63, so it cannot overflow."""
        return self.levels * super().divisor(scale)

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """255 sqrt(v) / s."""
        return y * divisor

    def unit(self, scale: jax.Array) -> jax.Array:
        """s / 255."""
        return scale * jnp.float32(1 / self.levels)

    def expand(self, z: jax.Array) -> jax.Array:
        """z."""
        return z

    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """P = (z^2 - lo^2) / (2 lo + 1): unbiased in v, not in sqrt(v)."""
        return lo * (lo + 2 * noise) + noise < z * z


def sqrt() -> SqrtCodec:
    """uint8 of sqrt(v) with an f32 scale, never 0 where v > 0: the default for `nu`.

    1 + 4/G bytes a value. Error at most half a code of sqrt(v): s / 510; a value under half a code
    becomes one code, which bounds m / sqrt(v) (the paper's form divides by zero there).
    """
    return SqrtCodec()


def sqrt_paper() -> SqrtCodec:
    """The paper's form: FP16 scales, codes from the unrounded maximum, code 0 for small v."""
    return SqrtCodec(scale=Float16Scale(), guarded=False)
