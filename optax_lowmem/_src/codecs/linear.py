"""Plain linear 8-bit quantization: the ablation of FlashOptim's Figures 4 and 5."""

import dataclasses

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.companded import CompandedCodec
from optax_lowmem._src.codecs.scales import Float16Scale


@dataclasses.dataclass(frozen=True)
class LinearCodec(CompandedCodec):
    """x / s times 127 (signed) or 255, no companding."""

    def position(self, y: jax.Array, divisor: jax.Array) -> jax.Array:
        """levels y / s; levels / s alone would overflow under s = 1e-36."""
        return y * divisor * self.levels

    def unit(self, scale: jax.Array) -> jax.Array:
        """s / levels."""
        return scale * jnp.float32(1 / self.levels)

    def expand(self, z: jax.Array) -> jax.Array:
        """z."""
        return z

    def rises(self, noise: jax.Array, z: jax.Array, lo: jax.Array) -> jax.Array:
        """P = z - lo."""
        return noise < z - lo


def linear(signed: bool = True) -> LinearCodec:
    """int8 (signed) or uint8 with an f32 scale; 1 + 4/G bytes a value, error at most s / 2L."""
    return LinearCodec(signed=signed)


def linear_paper(signed: bool = True) -> LinearCodec:
    """As the paper ablates it: FP16 scales, code 0 for small v."""
    return LinearCodec(scale=Float16Scale(), guarded=False, signed=signed)
