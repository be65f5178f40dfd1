"""GPT-2 (Radford et al., 2019) as a function of its parameters, whose tree is `model_shapes`'."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from _gpt.config import ModelShape

from benchmarks import model_shapes
from optax_lowmem import layers

STD = 0.02
_EPS = 1e-5


def _unit(x: jax.Array) -> jax.Array:
    """RMS norm over the last axis, in f32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPS)


def _normalised(own: Any, x: jax.Array) -> jax.Array:
    """Layer norm with f32 arithmetic; the result has the input's dtype."""
    wide = x.astype(jnp.float32)
    unit = _unit(wide - wide.mean(-1, keepdims=True))
    return (unit * own["scale"] + own["bias"]).astype(x.dtype)


def _linear(own: Any, x: jax.Array) -> jax.Array:
    return x @ own["kernel"].astype(x.dtype) + own["bias"].astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class GPT2:
    """The model; norms and the loss are f32."""

    shape: ModelShape
    vocab: int
    context: int
    compute: str = "bfloat16"
    attention: str = "xla"  # or `cudnn`
    qk_norm: bool = False  # whether queries and keys are RMS-normalized per head, without scales

    def weights(self, key: jax.Array) -> Any:
        """Initial f32 weights: normal, smaller where a product is added to what passes by."""
        own = {"layers": self.shape.layers, "width": self.shape.width}
        shapes = model_shapes.gpt2(jnp.float32, **own, vocab=self.vocab, context=self.context)
        paths, tree = jax.tree_util.tree_flatten_with_path(shapes)

        def first(index: int, path: str, leaf: Any) -> jax.Array:
            if len(leaf.shape) == 1:
                return (jnp.ones if path.endswith("scale") else jnp.zeros)(leaf.shape)
            std = STD * ((2 * self.shape.layers) ** -0.5 if "c_proj" in path else 1)
            return std * jax.random.normal(jax.random.fold_in(key, index), leaf.shape)

        named = ((jax.tree_util.keystr(keys, simple=True, separator="/"), s) for keys, s in paths)
        return jax.tree.unflatten(tree, [first(i, *one) for i, one in enumerate(named)])

    def _mixed(self, own: Any, x: jax.Array) -> jax.Array:
        qkv = _linear(own["c_attn"], x).reshape(*x.shape[:2], 3, self.shape.heads, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        if self.qk_norm:
            q, k = _unit(q).astype(x.dtype), _unit(k).astype(x.dtype)
        found = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return _linear(own["c_proj"], found.reshape(x.shape))

    def __call__(self, params: Any, tokens: jax.Array) -> jax.Array:
        """The mean loss of `tokens` [batch, length + 1] in nats, in f32."""
        table, positions = params["wte"]["embedding"], params["wpe"]["embedding"]
        # read as f32, so that the gradients of a frequent token's places are added in f32
        x = table.astype(jnp.float32)[tokens[:, :-1]] + positions[: tokens.shape[1] - 1]
        x = x.astype(self.compute)
        for index in range(self.shape.layers):
            own = params["h"][str(index)]
            x = x + self._mixed(own["attn"], _normalised(own["ln_1"], x))
            inner = _linear(own["mlp"]["c_fc"], _normalised(own["ln_2"], x))
            x = x + _linear(own["mlp"]["c_proj"], jax.nn.gelu(inner, approximate=True))
        head = table.astype(self.compute)
        return layers.linear_cross_entropy(
            _normalised(params["ln_f"], x), head, tokens[:, 1:], vocab_axis=0
        )
