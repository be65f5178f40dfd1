"""A Llama in Flax NNX: its layers are stacked and run in a scan, so that compiling is as long for
32 layers as for 4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from _gpt.model import RMSNorm, dense, mean_loss, rotary_angles, rotate
from flax import nnx

from optax_lowmem import layers

from .config import FP8, STANDARD, Shape

Constraint = Callable[[jax.Array], jax.Array]
STACK = "layers"  # the subtree of parameters that has the layers on axis 0


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several queries share a key and value."""

    def __init__(self, shape: Shape, attention: str, rngs: nnx.Rngs):
        self.head, self.rope, self.kind = shape.width // shape.heads, shape.rope, attention
        width, kv, scale = shape.width, shape.kv_heads * self.head, shape.width**-0.5
        self.q_proj = dense(width, width, scale, rngs)
        self.k_proj = dense(width, kv, scale, rngs)
        self.v_proj = dense(width, kv, scale, rngs)
        self.o_proj = dense(width, width, scale * (2 * shape.layers) ** -0.5, rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            project(x).reshape(batch, length, -1, self.head)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        rotary = rotary_angles(length, self.head, self.rope)
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.kind)
        return self.o_proj(mixed.reshape(batch, length, -1))


class MLP(nnx.Module):
    """SwiGLU: a matrix product gates another."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        width, hidden, scale = shape.width, shape.hidden, shape.width**-0.5
        self.gate_proj = dense(width, hidden, scale, rngs)
        self.up_proj = dense(width, hidden, scale, rngs)
        self.down_proj = dense(hidden, width, hidden**-0.5 * (2 * shape.layers) ** -0.5, rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, shape: Shape, attention: str, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(shape.width)
        self.self_attn = Attention(shape, attention, rngs)
        self.post_attention_norm = RMSNorm(shape.width)
        self.mlp = MLP(shape, rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_attention_norm(x))


class Ends(nnx.Module):
    """What is before and behind the layers: the embedding, the last norm, the output head."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        embedding = nnx.initializers.normal(shape.width**-0.5)
        self.embed_tokens = nnx.Embed(shape.vocab, shape.width, embedding_init=embedding, rngs=rngs)
        self.norm = RMSNorm(shape.width)
        if not shape.tied:
            self.lm_head = dense(shape.width, shape.vocab, shape.width**-0.5, rngs)

    def logits(self, x):
        """In f32, [batch, length, vocab]."""
        tied = not hasattr(self, "lm_head")
        head = self.embed_tokens.embedding[...].T if tied else self.lm_head.kernel[...]
        return jnp.einsum("blw,wv->blv", self.norm(x), head, preferred_element_type=jnp.float32)


def is_norm(path: str) -> bool:
    """Whether a parameter is the scale of a norm."""
    return path.endswith("scale")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """`layers/mlp/up_proj/kernel` of a path of keys."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


@dataclass(frozen=True)
class Llama:
    """The model as functions of its parameters, in stages: what is first, a layer, what is last.

    The parameters are a dict: those of `Ends`, and at "layers" those of `Block`, stacked.

    Attributes:
      shape: its size.
      compute: the dtype of matrix products; norms, the softmax and the loss are f32.
      attention: `xla` or `cudnn`.
      remat: whether the backward pass computes each layer anew, from its input.
      constrain: applied to what goes from layer to layer, to say where it lies on a mesh.
      dot_general: of the matrices of layers; None: JAX's.
      activations: `fp8`: what the backward pass needs of a layer is kept in 8 bits.
    """

    shape: Shape
    compute: str = "bfloat16"
    attention: str = "xla"
    remat: bool = False
    constrain: Constraint = lambda x: x
    dot_general: Any = None
    activations: str = STANDARD

    def _block(self, key: jax.Array) -> Block:
        return Block(self.shape, self.attention, nnx.Rngs(key))

    def _fp8_block(self, key: jax.Array) -> layers.Fp8LlamaBlock:
        own, heads = self.shape, (self.shape.heads, self.shape.kv_heads)
        more = dict(rope=own.rope, attention=self.attention, rngs=nnx.Rngs(key))
        return layers.Fp8LlamaBlock(own.width, own.hidden, *heads, **more)

    def _ends(self, key: jax.Array) -> Ends:
        return Ends(self.shape, nnx.Rngs(key))

    def weights(self, key: jax.Array, dtype: Callable[[str], Any]) -> dict[str, Any]:
        """Initial weights, drawn in f32 and rounded to bf16, in the dtype that each path has.

        Layers are drawn one after another, so that no more than one layer is there in f32.
        """
        of_ends, of_layers = jax.random.split(key)

        def stored(module: nnx.Module, prefix: str = "") -> Any:
            def round_to(keys: tuple[Any, ...], w: jax.Array) -> jax.Array:
                w = jax.lax.reduce_precision(w, 8, 7)  # the same start whatever it is stored as
                return w.astype(dtype(prefix + leaf_path(keys)))

            weights = nnx.to_pure_dict(nnx.state(module, nnx.Param))
            return jax.tree_util.tree_map_with_path(round_to, weights)

        def layer(key: jax.Array) -> Any:
            return stored(self._block(key), f"{STACK}/")

        layers = jax.lax.map(layer, jax.random.split(of_layers, self.shape.layers))
        return stored(self._ends(of_ends)) | {STACK: layers}

    @functools.cached_property
    def _graphs(self) -> tuple[Any, Any]:
        key = jax.random.key(0)
        ends, block = (nnx.eval_shape(functools.partial(f, key)) for f in (self._ends, self._block))
        if self.activations == FP8:
            block = nnx.eval_shape(functools.partial(self._fp8_block, key))
        if self.dot_general is not None:
            block = layers.convert(block, to=self.dot_general)
        return nnx.graphdef(ends), nnx.graphdef(block)

    def _computing(self, params: Any) -> Any:
        """Parameters in the dtype of matrix products, but for norms."""

        def cast(keys: tuple[Any, ...], w: jax.Array) -> jax.Array:
            return w if is_norm(leaf_path(keys)) else w.astype(self.compute)

        return jax.tree_util.tree_map_with_path(cast, params)

    def first(self, rest: Any, tokens: jax.Array) -> jax.Array:
        """[batch, length, width] of `tokens` [batch, length + 1]."""
        # read as f32, so that the gradients of a frequent token's thousand places are added in f32
        table = rest["embed_tokens"]["embedding"].astype(jnp.float32)
        return self.constrain(table[tokens[:, :-1]].astype(self.compute))

    def layer(self, own: Any, rest: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """One layer, of parameters without the axis of layers."""
        del rest, tokens
        return self.constrain(nnx.merge(self._graphs[1], self._computing(own))(x))

    def last(self, rest: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """The mean loss in nats a token, in f32."""
        own = {name: tree for name, tree in rest.items() if name != STACK}
        ends = nnx.merge(self._graphs[0], self._computing(own))
        return mean_loss(ends.logits(x), tokens[:, 1:])

    def __call__(self, params: Any, tokens: jax.Array) -> jax.Array:
        """The loss of `tokens` [batch, length + 1]."""
        return self.beyond(self.first(params, tokens), params, tokens)

    def beyond(self, x: jax.Array, params: Any, tokens: jax.Array) -> jax.Array:
        """The loss, from what goes into the layers."""

        def body(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return self.layer(own, params, x, tokens), None

        if self.remat:
            body = jax.checkpoint(body, prevent_cse=False)
        x, _ = jax.lax.scan(body, x, params[STACK])
        return self.last(params, x, tokens)
