"""A Llama in Flax NNX: a scan runs stacked layers, so that compiling is as long for 32 of them as
for 4, or each layer has weights of its own, which are not copied to and from stacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _gpt.model import RMSNorm, dense, rotary_angles, rotate
from flax import nnx

from optax_lowmem import layers, memory

from .config import DOTS, FP8, FULL, LEAN, NONE, STANDARD, XLA, Shape

Constraint = Callable[[jax.Array], jax.Array]
LAYERS = "layers"  # the parameters of layers: with the layers on axis 0, or a list of them


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
    """Parts before and behind the layers: the embedding, the last norm, the output head."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        embedding = nnx.initializers.normal(shape.width**-0.5)
        self.embed_tokens = nnx.Embed(shape.vocab, shape.width, embedding_init=embedding, rngs=rngs)
        self.norm = RMSNorm(shape.width)
        if not shape.tied:
            self.lm_head = dense(shape.width, shape.vocab, shape.width**-0.5, rngs)

    def mean_loss(self, x, targets, loss):
        """In nats a token, in f32; `loss` as `layers.linear_cross_entropy`."""
        tied = not hasattr(self, "lm_head")
        head = self.embed_tokens.embedding[...] if tied else self.lm_head.kernel[...]
        return loss(self.norm(x), head, targets, vocab_axis=0 if tied else 1)


def is_norm(path: str) -> bool:
    """Return whether a parameter is the scale of a norm."""
    return path.endswith("scale")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """`layers/mlp/up_proj/kernel` of a path of keys."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _keeps(primitive: Any, *args: Any, **params: Any) -> bool:
    """Return whether a result is kept for the backward pass: weight products, cuDNN's attention."""
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    attention = primitive.name.startswith("dot_product_attention_fwd")
    return attention or products(primitive, *args, **params)


# name of `activations` -> how the library's layer keeps them
_RECIPES = {
    LEAN: layers.fp8_flow.Recipe(storage="bf16"),
    FP8: layers.fp8_flow.Recipe(),
}
# name of `remat` -> what of a layer the backward pass does not compute anew
_POLICIES = {DOTS: _keeps, FULL: None}


@dataclasses.dataclass(frozen=True)
class Llama:
    """The model as functions of its parameters, in stages: what is first, a layer, what is last.

    The parameters are a dict: those of `Ends`, and at "layers" those of `Block`.

    Attributes:
      shape: its size.
      compute: the dtype of matrix products; norms, the softmax and the loss are f32.
      attention: `xla` or `cudnn`.
      remat: `none`; `dots`: the backward pass computes each layer anew but for its products and
        its attention; `full`: from its input.
      constrain: applied to what goes from layer to layer, to say where it lies on a mesh.
      dot_general: of the matrices of layers; None: JAX's.
      activations: `lean`: the backward pass is given the inputs of norms and activation functions
        alone, and products' results; `fp8`: codes of them in 8 bits.
      stacked: whether the parameters of all layers are one tree, with the layers on axis 0, which a
        scan goes along; else they are a list of trees.
      unroll: layers in a step of the scan; the arrays of a step are not copied to and from stacks.
      loss: `layers.linear_cross_entropy`, which a mesh makes know where its arguments lie.
    """

    shape: Shape
    compute: str = "bfloat16"
    attention: str = XLA
    remat: str = NONE
    constrain: Constraint = lambda x: x
    dot_general: Any = None
    activations: str = STANDARD
    stacked: bool = True
    unroll: int = 1
    loss: Callable[..., jax.Array] = layers.linear_cross_entropy

    def _block(self, key: jax.Array) -> Block:
        return Block(self.shape, self.attention, nnx.Rngs(key))

    def _low_memory_block(self, key: jax.Array) -> layers.Fp8LlamaBlock:
        own, heads = self.shape, (self.shape.heads, self.shape.kv_heads)
        more = dict(rope=own.rope, attention=self.attention, rngs=nnx.Rngs(key))
        more["recipe"] = _RECIPES[self.activations]
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
            return stored(self._block(key), f"{LAYERS}/")

        number = self.shape.layers
        drawn = jax.lax.map(layer, jax.random.split(of_layers, number))
        if not self.stacked:
            drawn = [jax.tree.map(lambda w, i=i: w[i], drawn) for i in range(number)]
        return stored(self._ends(of_ends)) | {LAYERS: drawn}

    @functools.cached_property
    def _graphs(self) -> tuple[Any, Any]:
        key = jax.random.key(0)
        ends, block = (nnx.eval_shape(functools.partial(f, key)) for f in (self._ends, self._block))
        if self.activations != STANDARD:
            block = nnx.eval_shape(functools.partial(self._low_memory_block, key))
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

    def quantized_weights(self, params: Any) -> Any:
        """Quantize the weights of layers, for `__call__` while they stay the same."""
        of_layers = self._computing(params[LAYERS])
        if self.stacked:
            return layers.fp8_flow.quantized_weights(of_layers)
        return [layers.fp8_flow.quantized_weights(own) for own in of_layers]

    def layer(
        self, own: Any, rest: Any, x: jax.Array, tokens: jax.Array, codes: Any = None
    ) -> jax.Array:
        """One layer, of parameters without the axis of layers; `codes` of its weights."""
        del rest, tokens
        given = {} if codes is None else {"codes": codes}
        return self.constrain(nnx.merge(self._graphs[1], self._computing(own))(x, **given))

    def last(self, rest: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """The mean loss in nats a token, in f32."""
        own = {name: tree for name, tree in rest.items() if name != LAYERS}
        ends = nnx.merge(self._graphs[0], self._computing(own))
        return ends.mean_loss(x, tokens[:, 1:], self.loss)

    def __call__(self, params: Any, tokens: jax.Array, codes: Any = None) -> jax.Array:
        """The loss of `tokens` [batch, length + 1]; `codes`: of `quantized_weights`."""
        return self.beyond(self.first(params, tokens), params, tokens, codes)

    def beyond(self, x: jax.Array, params: Any, tokens: jax.Array, codes: Any = None) -> jax.Array:
        """The loss, from what goes into the layers."""

        def body(x: jax.Array, given: tuple[Any, Any]) -> tuple[jax.Array, None]:
            own, of_own = given
            return self.layer(own, params, x, tokens, of_own), None

        body = self.rematerialised(body)
        if self.stacked:
            x, _ = jax.lax.scan(body, x, (params[LAYERS], codes), unroll=self.unroll)
        else:
            for given in zip(params[LAYERS], codes or [None] * self.shape.layers, strict=True):
                x, _ = body(x, given)
        return self.last(params, x, tokens)

    def rematerialised(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's function, whose gradient computes anew what `remat` says."""
        if self.remat == NONE:
            return body
        # unrolled, XLA would find that both computations are the same, and keep the first one's
        merges = self.unroll > 1 or not self.stacked
        return jax.checkpoint(body, prevent_cse=merges, policy=_POLICIES[self.remat])

    def kept_bytes(self, batch: int, sequence: int) -> int:
        """Compute the bytes that the layers keep for the backward pass, from the shapes of one."""
        apart = dataclasses.replace(self, stacked=False)
        weights = functools.partial(apart.weights, dtype=lambda path: self.compute)
        layer = jax.eval_shape(weights, jax.random.key(0))[LAYERS][0]
        x = jax.ShapeDtypeStruct((batch, sequence, self.shape.width), jnp.dtype(self.compute))
        body = self.rematerialised(lambda x, own: self.layer(own, None, x, None))
        report = memory.activation_report(body, x, layer, weights=1)
        return self.shape.layers * report.total_bytes
