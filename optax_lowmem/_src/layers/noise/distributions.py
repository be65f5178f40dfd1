"""The distributions of R: GaussWS' bitwise rounded normal, and two for comparison.

Noise is generated for eight elements at a time along the second-to-last axis. So neighbouring
32-bit words of eight 4-bit numbers belong to neighbouring weights, and each 32 x 32 block has whole
words.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.typing import PyTree

EIGHT = 8
_LOWEST = 0x11111111  # the lowest bit of each of eight 4-bit numbers
_SIGNS = 0x88888888


@dataclasses.dataclass(frozen=True)
class Noise(abc.ABC):
    """Distribution of R, computed from random words."""

    name: str  # the name in arguments
    draws: int  # number of 32-bit words per eight elements
    least: float  # the smallest nonzero magnitude of R (section 3.3: 2^-r)

    @abc.abstractmethod
    def prepared(self, words: list[jax.Array]) -> PyTree:
        """Return what `element` needs for eight elements, from `draws` random words."""

    @abc.abstractmethod
    def element(self, prepared: PyTree, index: int) -> jax.Array:
        """Return R, f32, of one of the eight elements."""

    def elements(self, prepared: PyTree) -> jax.Array:
        """Return R, f32, of all eight, along a new second-to-last axis."""
        return jnp.stack([self.element(prepared, k) for k in range(EIGHT)], axis=-2)


def pack(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    r"""Convert random bits to eight 4-bit numbers in {-2, ..., 2} per word (sections 3.3 and 3.4).

    x0, ..., x3 are an element's four bits of x from the lowest; y and z are split alike:

        |R| = 1:  (x0 | x1) & (x2 | x3) & y0
        |R| = 2:  (x0 | x1) & (x2 & x3) & ~y0 & y1 & y2 & y3 & z0 & z1
        R < 0:    z3

    By equation 7 these have the probabilities (3/4)^2 / 2, 3/4 2^-8 and 1/2: exactly equation 8.

    Returns:
      uint32 of their shape; bits 4k and 4k + 1 are the magnitude of element k, bit 4k + 3 its sign.
    """
    either = x | (x >> 1)
    both = x & (x >> 1)
    rare = (y >> 1) & (y >> 2) & (y >> 3) & z & (z >> 1)
    one = either & (either >> 2) & y
    two = either & (both >> 2) & rare & ~y
    ones = jnp.uint32(_LOWEST)
    return (one & ones) | ((two & ones) << 1) | (z & jnp.uint32(_SIGNS))


def number(word: jax.Array, index: int) -> jax.Array:
    """Return one of the eight numbers that `pack` puts in a uint32 word, as f32; 0 may be -0."""
    magnitude = (word >> (4 * index)) & jnp.uint32(3)
    sign = (word << (28 - 4 * index)) & jnp.uint32(0x80000000)
    value = magnitude.astype(jnp.int32).astype(jnp.float32)
    return numerics.from_bits(numerics.to_bits(value) | sign)


@dataclasses.dataclass(frozen=True)
class BitwiseNormal(Noise):
    """Approximate round(N(0, 1) / 2) (equation 8), from 11 bits per element, without floats."""

    def prepared(self, words: list[jax.Array]) -> jax.Array:
        """Return the packed numbers."""
        return pack(*words)

    def element(self, prepared: jax.Array, index: int) -> jax.Array:
        """Return -2, -1, 0, 1 or 2."""
        return number(prepared, index)


@dataclasses.dataclass(frozen=True)
class Uniform(Noise):
    """U(-0.5, 0.5) in bf16, from 16 bits per element (DiffQ)."""

    def prepared(self, words: list[jax.Array]) -> list[jax.Array]:
        """Return the words unchanged."""
        return words

    def element(self, prepared: list[jax.Array], index: int) -> jax.Array:
        """Return the midpoint of one of 65536 equal parts of (-0.5, 0.5), rounded to bf16."""
        half = (prepared[index // 2] >> (16 * (index % 2))) & jnp.uint32(0xFFFF)
        middle = half.astype(jnp.int32).astype(jnp.float32) + jnp.float32(0.5 - 2.0**15)
        return numerics.round_to(middle * jnp.float32(2.0**-16), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class BoxMuller(Noise):
    """Exact round(N(0, 1) / 2), with two normals from two uniforms (Box and Muller)."""

    def prepared(self, words: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        """Return the radius and angle of each pair of elements."""
        pairs = []
        for u, v in zip(words[::2], words[1::2], strict=True):
            uniform = ((u >> 8).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-24
            turn = (v >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)
            radius = jnp.sqrt(jnp.float32(-2) * lax.log(uniform))
            pairs.append((radius, turn * jnp.float32(2 * math.pi)))
        return pairs

    def element(self, prepared: list[tuple[jax.Array, jax.Array]], index: int) -> jax.Array:
        """Return an integer from -3 to 3."""
        radius, angle = prepared[index // 2]
        normal = radius * (lax.sin(angle) if index % 2 else lax.cos(angle))
        return numerics.round_to_int(normal * jnp.float32(0.5)).astype(jnp.float32)


GAUSSWS = BitwiseNormal("gaussws", draws=3, least=1.0)
DIFFQ = Uniform("diffq", draws=4, least=2.0**-17)
BOX_MULLER = BoxMuller("box-muller", draws=8, least=1.0)
NOISES: dict[str, Noise] = {noise.name: noise for noise in (GAUSSWS, DIFFQ, BOX_MULLER)}
