"""The distributions of R: GaussWS' rounded normal made of bits, and what it is compared with.

Noise comes in eights along the axis before the last, so that 32-bit words of eight 4-bit numbers
are neighbours in memory where weights are, and a square block of 32 is made of whole words.
"""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import numerics

EIGHT = 8
_LOWEST = 0x11111111  # the lowest bit of each of eight 4-bit numbers
_SIGNS = 0x88888888


@dataclasses.dataclass(frozen=True)
class Noise(abc.ABC):
    """Distribution of R, computed from random words.

    Attributes:
      name: its name in arguments.
      draws: number of 32-bit words per eight elements.
      least: the smallest nonzero magnitude of R (section 3.3: 2^-r).
    """

    name: str
    draws: int
    least: float

    @abc.abstractmethod
    def prepared(self, words: list[jax.Array]) -> Any:
        """Return the values that `element` takes, each for eight elements, from `draws` words."""

    @abc.abstractmethod
    def element(self, prepared: Any, index: int) -> jax.Array:
        """R, f32, of one of the eight elements."""

    def elements(self, prepared: Any) -> jax.Array:
        """R, f32, of all eight, along a new axis before the last."""
        return jnp.stack([self.element(prepared, k) for k in range(EIGHT)], axis=-2)


def pack(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    r"""Eight numbers of {-2, ..., 2} in sign and magnitude, 4 bits each (sections 3.3 and 3.4).

    With the four bits of an element in each word called x0, ..., x3 from the lowest,

        |R| = 1:  (x0 | x1) & (x2 | x3) & y0
        |R| = 2:  (x0 | x1) & (x2 & x3) & ~y0 & y1 & y2 & y3 & z0 & z1
        R < 0:    z3

    which by equation 7 have the probabilities (3/4)^2 / 2, 3/4 2^-8 and 1/2: equation 8, exactly.

    Args:
      x: random words of 32 bits.
      y: likewise.
      z: likewise.

    Returns:
      uint32 of their shape; of element k bits 4k and 4k + 1 are the magnitude, 4k + 3 the sign.
    """
    either = x | (x >> 1)
    both = x & (x >> 1)
    rare = (y >> 1) & (y >> 2) & (y >> 3) & z & (z >> 1)
    one = either & (either >> 2) & y
    two = either & (both >> 2) & rare & ~y
    ones = jnp.uint32(_LOWEST)
    return (one & ones) | ((two & ones) << 1) | (z & jnp.uint32(_SIGNS))


def number(word: jax.Array, index: int) -> jax.Array:
    """f32 of one of the eight numbers that `pack` puts in a word, uint32; 0 may have a sign."""
    magnitude = (word >> (4 * index)) & jnp.uint32(3)
    sign = (word << (28 - 4 * index)) & jnp.uint32(0x80000000)
    value = magnitude.astype(jnp.int32).astype(jnp.float32)
    return numerics.from_bits(numerics.to_bits(value) | sign)


@dataclasses.dataclass(frozen=True)
class BitwiseNormal(Noise):
    """Equation 8: round(N(0, 1) / 2), nearly, of 11 bits per element, without floats."""

    def prepared(self, words: list[jax.Array]) -> jax.Array:
        """The packed numbers."""
        return pack(*words)

    def element(self, prepared: jax.Array, index: int) -> jax.Array:
        """-2, -1, 0, 1 or 2."""
        return number(prepared, index)


@dataclasses.dataclass(frozen=True)
class Uniform(Noise):
    """U(-0.5, 0.5) in bf16, of 16 bits per element (DiffQ)."""

    def prepared(self, words: list[jax.Array]) -> list[jax.Array]:
        """The words."""
        return words

    def element(self, prepared: list[jax.Array], index: int) -> jax.Array:
        """The middles of 65536 equal parts of (-0.5, 0.5), rounded to bf16."""
        half = (prepared[index // 2] >> (16 * (index % 2))) & jnp.uint32(0xFFFF)
        middle = half.astype(jnp.int32).astype(jnp.float32) + jnp.float32(0.5 - 2.0**15)
        return numerics.round_to(middle * jnp.float32(2.0**-16), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class BoxMuller(Noise):
    """round(N(0, 1) / 2) itself, of two normals from two uniforms (Box and Muller)."""

    def prepared(self, words: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        """Radius and angle of each pair of elements."""
        pairs = []
        for u, v in zip(words[::2], words[1::2], strict=True):
            uniform = ((u >> 8).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-24
            turn = (v >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)
            radius = jnp.sqrt(jnp.float32(-2) * lax.log(uniform))
            pairs.append((radius, turn * jnp.float32(2 * math.pi)))
        return pairs

    def element(self, prepared: list[tuple[jax.Array, jax.Array]], index: int) -> jax.Array:
        """An integer from -3 to 3."""
        radius, angle = prepared[index // 2]
        normal = radius * (lax.sin(angle) if index % 2 else lax.cos(angle))
        return numerics.round_to_int(normal * jnp.float32(0.5)).astype(jnp.float32)


GAUSSWS = BitwiseNormal("gaussws", draws=3, least=1.0)
DIFFQ = Uniform("diffq", draws=4, least=2.0**-17)
BOX_MULLER = BoxMuller("box-muller", draws=8, least=1.0)
NOISES: dict[str, Noise] = {noise.name: noise for noise in (GAUSSWS, DIFFQ, BOX_MULLER)}
