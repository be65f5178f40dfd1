"""Matrix products of one chunk of logits, in the input dtype or in FP8.

Z = H W are the logits of hidden states H [..., width] and a head W. With the gradient G of Z [...,
vocab], dH = G W^T and dW = H^T G. A head is [width, vocab] or [vocab, width].
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from optax_lowmem._src.arrays import varying
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.fp8_flow import kernels
from optax_lowmem._src.layers.quantized_matmul import (
    E4M3,
    E5M2,
    Quantized,
    absmax_of,
    multiply,
    quantize,
    quantize_transposed,
)

INPUT, FP8, FP8_GRADIENTS = "input", "fp8", "fp8-gradients"
PRODUCTS = (INPUT, FP8, FP8_GRADIENTS)
FP8_INPUTS = ("float32", "bfloat16", "float16")
# Format of the logits' gradient: E4M3 has no codes under 2^-18 of a row's largest, where most
# probabilities of a large vocabulary are.
GRADIENT = E5M2


def f32_or_more(*arrays: jax.Array) -> jnp.dtype:
    """Return the dtype of sums of products."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


class HeadCodes(NamedTuple):
    """E4M3 codes of a head with one scale, computed once for all chunks; None if not needed."""

    forward: Quantized | None  # [vocab, width], for logits
    backward: Quantized | None  # [width, vocab], for the gradient of hidden states


class InInputs:
    """Products of a chunk in the common dtype of its arguments; `codes` are not used."""

    def __init__(
        self,
        hidden: jax.Array,
        head: jax.Array,
        vocab_axis: int,
        precision: PrecisionLike,
        codes: HeadCodes | None,
    ):
        self.vocab_axis, self.precision, self.codes = vocab_axis, precision, codes
        self.dtype, self.wide = jnp.result_type(hidden, head), f32_or_more(hidden, head)
        self.hidden, self.head = hidden.astype(self.dtype), head.astype(self.dtype)
        self.dot = partial(jnp.einsum, precision=precision, preferred_element_type=self.wide)
        self.axes = "vw" if vocab_axis == 0 else "wv"

    def logits(self) -> jax.Array:
        """Return Z."""
        return self.dot(f"...w,{self.axes}->...v", self.hidden, self.head)

    def operand(self, gradient: jax.Array) -> jax.Array:
        """Return G as both of its products read it."""
        return gradient.astype(self.dtype)

    def for_hidden(self, gradient: jax.Array) -> jax.Array:
        """Return dH."""
        return self.dot(f"...v,{self.axes}->...w", gradient, self.head)

    def for_head(self, gradient: jax.Array, is_masked: jax.Array | None) -> jax.Array:
        """Return dW, with the axes of the head."""
        hidden = self.hidden
        if is_masked is not None:  # their gradients are 0, but 0 * inf is NaN
            hidden = jnp.where(is_masked[..., None], 0, hidden)
        pair = (hidden, gradient)
        left, right = pair if self.vocab_axis else pair[::-1]
        tokens = tuple(range(gradient.ndim - 1))
        dims = ((tokens, tokens), ((), ()))
        return lax.dot_general(left, right, dims, self.precision, self.wide)


def quantize_head(
    head: jax.Array, vocab_axis: int, names: tuple[str, ...], forward: bool, backward: bool
) -> HeadCodes:
    """Quantize a head, or this device's shard of its vocabulary, for the requested products.

    GPUs contract 8-bit operands along the last axis of both, so each product needs an orientation.
    `names` are the mesh axes that shard the vocabulary; the shards share the scale.
    """
    if not (forward or backward):
        return HeadCodes(None, None)
    absmax = absmax_of(head, None)
    if names:
        absmax = lax.pmax(absmax, names)
    head, absmax = varying.alike(head, absmax)
    straight, swapped = (forward, backward) if vocab_axis == 0 else (backward, forward)
    as_it_is = kernels.quantized(head, absmax, clip=True) if straight else None
    transposed = quantize_transposed(head, None, E4M3, absmax) if swapped else None
    return HeadCodes(*((as_it_is, transposed) if vocab_axis == 0 else (transposed, as_it_is)))


class InFp8(InInputs):
    r"""Products of a chunk in FP8: dH, dW, and Z if `codes.forward` is given.

    Each row of H and G has a scale, so that a token's result does not depend on others. dW is a sum
    over tokens, so G's scales multiply H's rows: dW = (s_G H)^T Q(G), and s_G H has one scale.
    """

    codes: HeadCodes

    def logits(self) -> jax.Array:
        if self.codes.forward is None:
            return super().logits()
        rows = quantize(self.hidden, self.hidden.ndim - 1, E4M3)
        rows, of_head = varying.alike(rows, self.codes.forward)
        return multiply(rows, of_head, 1, self.wide)

    def operand(self, gradient: jax.Array) -> PyTree:
        """Return codes of G, with a scale per token."""
        return quantize(gradient.astype(self.dtype), gradient.ndim - 1, GRADIENT)

    def for_hidden(self, gradient: PyTree) -> jax.Array:
        gradient, of_head = varying.alike(gradient, self.codes.backward)
        return multiply(gradient, of_head, 1, self.wide)

    def for_head(self, gradient: PyTree, is_masked: jax.Array | None) -> jax.Array:
        """Return dW as [vocab, width] for either `vocab_axis`; masked tokens may be NaN."""
        largest = gradient.scales * jnp.float32(GRADIENT.largest)
        scaled = self.hidden.astype(jnp.float32) * largest
        if is_masked is not None:
            scaled = jnp.where(is_masked[..., None], 0, scaled)
        unit = jnp.full((1,) * scaled.ndim, 1 / GRADIENT.largest, jnp.float32)
        codes = Quantized(gradient.codes, unit)
        codes, scaled, absmax = varying.alike(codes, scaled, absmax_of(scaled, None))
        return kernels.multiply_over_tokens(codes, scaled, absmax, E4M3, self.wide)[1]
