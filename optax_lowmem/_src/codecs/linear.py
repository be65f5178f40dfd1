"""Plain linear quantization, in 8 bits (the ablation of FlashOptim's Figures 4 and 5) or 4."""

import dataclasses

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs.companded import CompandedCodec
from optax_lowmem._src.codecs.scales import Float16Scale


@dataclasses.dataclass(frozen=True)
class LinearCodec(CompandedCodec):
    """x / s times the largest code, no companding.

    Attributes:
      bits: of a code.
    """

    bits: int = 8

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


def linear4(signed: bool = True) -> LinearCodec:
    r"""Codes of 4 bits, two in a byte, with an f32 scale; 0.5 + 4/G bytes a value.

    .. math:: q = \mathrm{round}(L x / s), \quad L = 7 \text{ (signed) or } 15, \quad
        s = \max_{\text{group}} |x|

    The error is at most s / 2L (nearest: s / 14, s / 30) or s / L (stochastic). Unsigned, a value
    above 0 has a code of at least 1, and so may be off by s / L. The group size must be even.

    Args:
      signed: codes -7 to 7; else 0 to 15, for values that are not negative.

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
