"""A GPT in Flax NNX that computes in whatever dtype its weights have."""

import jax
import jax.numpy as jnp
from flax import nnx

from .config import ModelShape


def dense(
    inputs: int, outputs: int, scale: float, rngs: nnx.Rngs, bias: bool = False
) -> nnx.Linear:
    """A matrix, normally distributed."""
    init = nnx.initializers.normal(scale)
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, rngs=rngs)


def _normalise(x, epsilon=1e-6):
    """x / RMS(x) over the last axis, in f32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """RMS normalisation with f32 arithmetic; the result has the input's dtype.

    `offset` is added to the stored scale: 1 in Gemma.
    """

    def __init__(self, width: int, epsilon: float = 1e-6, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full((width,), 1.0 - offset, jnp.float32))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x):
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (_normalise(x, self.epsilon) * scale).astype(x.dtype)


def frequencies(head: int, base: float = 10_000.0):
    """Rotary frequencies, in radians per position, [head / 2]."""
    return base ** (-jnp.arange(0, head, 2) / head)


def rotary_angles(length: int, frequency):
    """Cosines and sines of the rotary position embedding, each [length, 1, head / 2]."""
    angle = jnp.arange(length)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x, rotary):
    """Turns queries or keys [batch, length, heads, head] by their position, in f32."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, shape: ModelShape, rngs: nnx.Rngs):
        width, scale = shape.width, shape.width**-0.5
        self.heads = shape.heads
        names = {"qkv": 3} if shape.fused else {"query": 1, "key": 1, "value": 1}
        for name, matrices in names.items():
            setattr(self, name, dense(width, matrices * width, scale, rngs))
        self.out = dense(width, width, scale * (2 * shape.layers) ** -0.5, rngs)

    def __call__(self, x, rotary):
        batch, length, width = x.shape
        if hasattr(self, "qkv"):
            qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
            q, k, v = (qkv[:, :, i] for i in range(3))
        else:
            of_heads = (batch, length, self.heads, width // self.heads)
            q, k, v = (f(x).reshape(of_heads) for f in (self.query, self.key, self.value))
        # Normalised queries and keys keep the attention logits bounded at high learning rates.
        q, k = (rotate(_normalise(y).astype(x.dtype), rotary) for y in (q, k))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: ModelShape, rngs: nnx.Rngs):
        width, scale = shape.width, shape.width**-0.5
        self.norm_attention = RMSNorm(width)
        self.attention = Attention(shape, rngs)
        self.norm_mlp = RMSNorm(width)
        self.up = dense(width, 4 * width, scale, rngs)
        self.down = dense(4 * width, width, 0.5 * scale * (2 * shape.layers) ** -0.5, rngs)

    def __call__(self, x, rotary):
        x = x + self.attention(self.norm_attention(x), rotary)
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.norm_mlp(x)))))


class GPT(nnx.Module):
    """Decoder-only transformer.

    Args:
      shape: layers, heads and width, and what has matrices of its own.
      vocab: number of tokens.
      rngs: the generator of the initial weights, which are f32.
    """

    def __init__(self, shape: ModelShape, vocab: int, rngs: nnx.Rngs):
        self.head_size = shape.width // shape.heads
        init = nnx.initializers.normal(shape.width**-0.5)
        self.embed = nnx.Param(init(rngs.params(), (vocab, shape.width), jnp.float32))
        if not shape.tied:
            self.lm_head = nnx.Param(init(rngs.params(), (vocab, shape.width), jnp.float32))
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.norm_out = RMSNorm(shape.width)

    def __call__(self, tokens):
        """Logits in f32, [batch, length, vocab], of the token after each one of `tokens`."""
        embed = self.embed[...]
        # sqrt(width) gives rows of unit scale to the layers, from a matrix scaled for the logits.
        x = embed[tokens] * jnp.asarray(embed.shape[1] ** 0.5, embed.dtype)
        rotary = rotary_angles(tokens.shape[1], frequencies(self.head_size))
        for block in self.blocks:
            x = block(x, rotary)
        head = self.lm_head[...] if hasattr(self, "lm_head") else embed
        return jnp.einsum("blw,vw->blv", self.norm_out(x), head, preferred_element_type=jnp.float32)


def next_token_loss(graphdef, params, tokens):
    """Mean negative log-likelihood in nats per token, in f32, over `tokens` [batch, length + 1]."""
    return mean_loss(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])


def mean_loss(logits, targets):
    """Mean negative log-likelihood of `targets` [...] under f32 `logits` [..., vocab]."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
