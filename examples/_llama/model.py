"""A Llama, and its relatives by Mistral, Qwen and Google, in Flax NNX: a scan runs stacked layers,
so that compiling is as long for 32 of them as for 4, or each layer has weights of its own, which
are not copied to and from stacks."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _gpt.model import RMSNorm, dense, frequencies, rotary_angles, rotate
from flax import nnx

from optax_lowmem import layers, memory

from .config import DOTS, FP8, FULL, LEAN, NONE, STANDARD, XLA, RopeScaling, Shape

Constraint = Callable[[jax.Array], jax.Array]
LAYERS = "layers"  # the parameters of layers: with the layers on axis 0, or a list of them


class Packed(NamedTuple):
    """A batch of several texts per row, which do not see each other."""

    tokens: jax.Array  # [batch, length + 1]
    segments: jax.Array  # [batch, length + 1], the number of each token's text
    weights: jax.Array  # [batch, length], of the loss of tokens 1, 2, ..., which is their sum


def _scaled(frequency: jax.Array, scaling: RopeScaling | None) -> jax.Array:
    if scaling is None:
        return frequency
    if not scaling.original:
        return frequency / scaling.factor
    turns = scaling.original * frequency / (2 * math.pi)
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def visible(
    length: int, window: int, sliding: bool | jax.Array, segments: jax.Array | None
) -> jax.Array | None:
    """Which keys a query sees of those before it, [batch or 1, 1, query, key]; None: all.

    `sliding` may be traced, in a scan over layers of both kinds.
    """
    mask = None
    if 0 < window < length and sliding is not False:
        positions = jnp.arange(length)
        near = positions[:, None] - positions < window
        mask = (near | jnp.logical_not(sliding))[None, None]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    return mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of an embedding; gradients of a frequent token's thousand places are added in f32."""
    return table[tokens].astype(dtype)


def _lookup_backward(
    dtype: Any, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    table, tokens = kept
    # zeros that depend on g: XLA may make others before the backward pass of the layers
    zero, g = jax.lax.optimization_barrier((jnp.float32(0), g))
    total = jnp.broadcast_to(zero, table.shape).at[tokens].add(g.astype(jnp.float32))
    return total.astype(table.dtype), None


lookup.defvjp(
    lambda table, tokens, dtype: (lookup(table, tokens, dtype), (table, tokens)), _lookup_backward
)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """c tanh(x / c)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, shape: Shape, kind: str
) -> jax.Array:
    """Causal attention of queries [batch, length, heads, head] to keys of `kv_heads`."""
    scale = shape.query_scale or shape.head_width**-0.5
    if shape.score_cap is None:
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, implementation=kind
        )
    batch, length, _, head = q.shape
    q = q.reshape(batch, length, shape.kv_heads, -1, head)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32)
    scores = capped(scores * scale, shape.score_cap)
    causal = jnp.tril(jnp.ones((length, length), bool))
    seen = causal if mask is None else (mask & causal)[:, :, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", shares, v).reshape(batch, length, -1, head)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several queries share a key and value."""

    def __init__(self, shape: Shape, attention: str, rngs: nnx.Rngs):
        self.shape, self.kind = shape, attention
        width, scale = shape.width, shape.width**-0.5
        heads, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q_proj = dense(width, heads, scale, rngs, shape.bias)
        self.k_proj = dense(width, kv, scale, rngs, shape.bias)
        self.v_proj = dense(width, kv, scale, rngs, shape.bias)
        self.o_proj = dense(heads, width, scale * (2 * shape.layers) ** -0.5, rngs)
        if shape.head_norms:
            self.q_norm, self.k_norm = norm(shape, shape.head_width), norm(shape, shape.head_width)

    def __call__(self, x, sliding=False, segments=None):
        batch, length, _ = x.shape
        q, k, v = (
            project(x).reshape(batch, length, -1, self.shape.head_width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.shape.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        rotary = self._rotary(length, sliding)
        q, k = rotate(q, rotary), rotate(k, rotary)
        mask = visible(length, self.shape.window, sliding, segments)
        mixed = attend(q, k, v, mask, self.shape, self.kind)
        return self.o_proj(mixed.reshape(batch, length, -1))

    def _rotary(self, length, sliding):
        own = self.shape
        frequency = _scaled(frequencies(own.head_width, own.rope), own.scaling)
        if own.local_rope is not None:
            local = _scaled(frequencies(own.head_width, own.local_rope), own.local_scaling)
            frequency = jnp.where(sliding, local, frequency)
        return rotary_angles(length, frequency)


def norm(shape: Shape, width: int) -> RMSNorm:
    """A norm of a decoder."""
    return RMSNorm(width, shape.epsilon, 1.0 if shape.gemma else 0.0)


class MLP(nnx.Module):
    """SwiGLU: a matrix product gates another. Gemma's gate is a GELU."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        width, hidden, scale = shape.width, shape.hidden, shape.width**-0.5
        self.gate = jax.nn.gelu if shape.gemma else jax.nn.silu
        self.gate_proj = dense(width, hidden, scale, rngs)
        self.up_proj = dense(width, hidden, scale, rngs)
        self.down_proj = dense(hidden, width, hidden**-0.5 * (2 * shape.layers) ** -0.5, rngs)

    def __call__(self, x):
        return self.down_proj(self.gate(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, shape: Shape, attention: str, rngs: nnx.Rngs):
        self.gemma = shape.gemma
        self.input_norm = norm(shape, shape.width)
        self.self_attn = Attention(shape, attention, rngs)
        self.post_attention_norm = norm(shape, shape.width)
        if self.gemma:
            self.pre_feedforward_norm = norm(shape, shape.width)
            self.post_feedforward_norm = norm(shape, shape.width)
        self.mlp = MLP(shape, rngs)

    def __call__(self, x, sliding=False, segments=None):
        mixed = self.self_attn(self.input_norm(x), sliding, segments)
        if self.gemma:
            x = x + self.post_attention_norm(mixed)
            return x + self.post_feedforward_norm(self.mlp(self.pre_feedforward_norm(x)))
        x = x + mixed
        return x + self.mlp(self.post_attention_norm(x))


class Ends(nnx.Module):
    """Parts before and behind the layers: the embedding, the last norm, the output head."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        embedding = nnx.initializers.normal(shape.width**-0.5)
        self.embed_tokens = nnx.Embed(shape.vocab, shape.width, embedding_init=embedding, rngs=rngs)
        self.norm = norm(shape, shape.width)
        if not shape.tied:
            self.lm_head = dense(shape.width, shape.vocab, shape.width**-0.5, rngs)

    def head(self):
        """The output head, and its axis of the vocabulary."""
        if hasattr(self, "lm_head"):
            return self.lm_head.kernel[...], 1
        return self.embed_tokens.embedding[...], 0


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of the matrices with these names: x W + alpha / rank (x A) B."""

    names: tuple[str, ...]
    rank: int
    alpha: float


class Frozen(nnx.Module):
    """A matrix, which may be in 4 bits, as a file has it: [outputs, inputs]."""

    def __init__(self, base: nnx.Linear):
        self.kernel, self.bias = base.kernel, base.bias

    def __call__(self, x):
        kernel, product = self.kernel.get_value(), layers.nf4.matmul
        y = product(x, kernel, transposed=True) if is_in_4_bits(kernel) else x @ kernel
        return y if self.bias is None else y + self.bias[...]


class Adapted(Frozen):
    """A matrix with an adapter, whose B starts at zero."""

    def __init__(self, base: nnx.Linear, lora: Lora, rngs: nnx.Rngs):
        super().__init__(base)
        width, outputs = base.kernel.shape
        self.scale, bound = lora.alpha / lora.rank, width**-0.5
        drawn = jax.random.uniform(rngs.params(), (width, lora.rank), minval=-bound, maxval=bound)
        self.lora_a = nnx.Param(drawn)
        self.lora_b = nnx.Param(jnp.zeros((lora.rank, outputs)))

    def __call__(self, x):
        return super().__call__(x) + (x @ self.lora_a[...]) @ self.lora_b[...] * self.scale


def adapt(block: Block, lora: Lora, in_4_bits: bool, rngs: nnx.Rngs) -> None:
    """Give the matrices of a layer that `lora` names an adapter; others may be in 4 bits too."""
    for parent in (block.self_attn, block.mlp):
        for name, base in vars(parent).copy().items():
            if name in lora.names:
                setattr(parent, name, Adapted(base, lora, rngs))
            elif in_4_bits and isinstance(base, nnx.Linear):
                setattr(parent, name, Frozen(base))


def is_norm(path: str) -> bool:
    """Return whether a parameter is the scale of a norm."""
    return path.endswith("scale")


def is_matrix(path: str) -> bool:
    """Return whether a parameter is a matrix of the layers, which `--base nf4` has in 4 bits."""
    return path.startswith(f"{LAYERS}/") and path.endswith("kernel")


def is_in_4_bits(leaf: Any) -> bool:
    """Return whether a leaf of parameters is a matrix in 4 bits."""
    return isinstance(leaf, layers.nf4.NF4Array)


def leaf_path(keys: tuple[Any, ...]) -> str:
    """`layers/mlp/up_proj/kernel` of a path of keys."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _keeps(primitive: Any, *args: Any, **params: Any) -> bool:
    """Return whether a result is kept for the backward pass: weight products, cuDNN's attention."""
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    attention = primitive.name.startswith("dot_product_attention_fwd")
    return attention or products(primitive, *args, **params)


# tokens whose logits exist at once; few cost little where no gradient of the head is summed
_CHUNK_BESIDE_4_BITS = 512
# name of `activations` -> how the library's layer keeps them
_RECIPES = {LEAN: layers.fp8_flow.Recipe(storage="bf16"), FP8: layers.fp8_flow.Recipe()}
# name of `remat` -> what of a layer the backward pass does not compute anew
_POLICIES = {DOTS: _keeps, FULL: None}


def part(tree: Any, keep: Callable[[str], bool], path: str = "") -> Any:
    """Return the parameters whose paths `keep` selects, as a tree without the others."""
    if isinstance(tree, list):
        return [part(own, keep, f"{path}{i}/") for i, own in enumerate(tree)]
    found = {}
    for name, own in tree.items():
        if not isinstance(own, dict | list):
            found |= {name: own} if keep(path + name) else {}
        elif below := part(own, keep, f"{path}{name}/"):
            found[name] = below
    return found


def joined(one: Any, other: Any) -> Any:
    """Return the tree whose parts are `one` and `other`."""
    if isinstance(one, list):
        return [joined(*both) for both in zip(one, other, strict=True)]
    both = {name: joined(own, other[name]) for name, own in one.items() if name in other}
    return one | other | both


@dataclasses.dataclass(frozen=True)
class Llama:
    """The model as functions of its parameters, in stages: what is first, a layer, what is last.

    The parameters are a dict: those of `Ends`, and at "layers" those of `Block`: one tree with the
    layers on axis 0, which a scan goes along, or if they are not `stacked`, a list of trees.
    """

    shape: Shape
    compute: str = "bfloat16"  # dtype of matrix products; norms, the softmax and the loss are f32
    attention: str = XLA  # or CUDNN
    # what the backward pass computes anew: NONE; DOTS: each layer but for its products and its
    # attention; FULL: each layer from its input
    remat: str = NONE
    constrain: Constraint = lambda x: x  # the sharding, on a mesh, of inputs of layers
    dot_general: Any = None  # of the matrices of layers; None: JAX's
    # LEAN: the backward pass is given the inputs of norms and activation functions alone, and
    # products' results; FP8: codes of them in 8 bits
    activations: str = STANDARD
    lora: Lora | None = None  # adapters of the layers' matrices
    in_4_bits: bool = False  # the frozen matrices of the layers
    stacked: bool = True
    unroll: int = 1  # layers in a step of the scan; its arrays are not copied to and from stacks
    loss: Callable[..., jax.Array] = layers.linear_cross_entropy  # on a mesh, given its specs

    def _block(self, key: jax.Array) -> Block:
        rngs = nnx.Rngs(key)
        block = Block(self.shape, self.attention, rngs)
        if self.lora is not None:
            adapt(block, self.lora, self.in_4_bits, rngs)
        return block

    def _low_memory_block(self, key: jax.Array) -> layers.Fp8LlamaBlock:
        own = self.shape
        return layers.Fp8LlamaBlock(
            own.width, own.hidden, own.heads, own.kv_heads, rope=own.rope, epsilon=own.epsilon,
            attention=self.attention, recipe=_RECIPES[self.activations], rngs=nnx.Rngs(key),
        )  # fmt: skip

    def weights(
        self, key: jax.Array, dtype: Callable[[str], Any] = lambda path: jnp.float32
    ) -> dict[str, Any]:
        """Initial weights, drawn in f32 and rounded to bf16, in the dtype that each path has.

        Layers are drawn one after another, so that no more than one layer is there in f32.
        """
        of_ends, keys, ends, layer = self._draws(key, dtype)
        drawn = jax.lax.map(layer, keys)
        if not self.stacked:
            drawn = [jax.tree.map(lambda w, i=i: w[i], drawn) for i in range(self.shape.layers)]
        return ends(of_ends) | {LAYERS: drawn}

    def weights_in_turn(
        self, key: jax.Array, dtype: Callable[[str], Any], sharding: Any
    ) -> dict[str, Any]:
        """The same, with an iterator that draws a layer when it is asked for, on one device.

        The embedding and the head are drawn one after another.
        """
        of_ends, keys, ends, layer = self._draws(key, dtype)
        compiled = functools.partial(jax.jit, out_shardings=sharding)
        shapes, treedef = jax.tree.flatten(jax.eval_shape(ends, of_ends))
        drawn = [
            compiled(lambda key, i=i: jax.tree.leaves(ends(key))[i])(of_ends).block_until_ready()
            for i in range(len(shapes))
        ]
        draw = compiled(layer)
        return treedef.unflatten(drawn) | {LAYERS: (draw(own) for own in keys)}

    def _draws(self, key: jax.Array, dtype: Callable[[str], Any]) -> tuple[Any, ...]:
        """Return keys of the ends and of each layer, and the functions of a key that draw them."""
        of_ends, of_layers = jax.random.split(key)

        def stored(module: nnx.Module, prefix: str = "") -> Any:
            def round_to(keys: tuple[Any, ...], w: jax.Array) -> jax.Array:
                w = jax.lax.reduce_precision(w, 8, 7)  # the same start whatever it is stored as
                path = prefix + leaf_path(keys)
                if self.in_4_bits and is_matrix(path):
                    return layers.nf4.quantize(w.T)
                return w.astype(dtype(path))

            weights = nnx.to_pure_dict(nnx.state(module, nnx.Param))
            return jax.tree_util.tree_map_with_path(round_to, weights)

        def layer(key: jax.Array) -> Any:
            return stored(self._block(key), f"{LAYERS}/")

        def ends(key: jax.Array) -> Any:
            return stored(Ends(self.shape, nnx.Rngs(key)))

        return of_ends, jax.random.split(of_layers, self.shape.layers), ends, layer

    def adapters(self, key: jax.Array) -> dict[str, Any]:
        """Initial adapters, in f32; `joined` with the weights, they are the model's parameters."""

        def is_adapter(path: str) -> bool:
            return path.endswith(("lora_a", "lora_b"))

        return jax.jit(lambda: part(self.weights(key), is_adapter))()  # jit draws nothing else

    @functools.cached_property
    def _graphs(self) -> tuple[Any, Any]:
        key = jax.random.key(0)
        ends = nnx.eval_shape(lambda: Ends(self.shape, nnx.Rngs(key)))
        make = self._block if self.activations == STANDARD else self._low_memory_block
        block = nnx.eval_shape(lambda: make(key))
        if self.dot_general is not None:
            block = layers.convert(block, to=self.dot_general)
        return nnx.graphdef(ends), nnx.graphdef(block)

    def _computing(self, params: Any) -> Any:
        """Parameters in the dtype of matrix products, but for norms."""

        def cast(keys: tuple[Any, ...], w: jax.Array) -> jax.Array:
            kept = is_in_4_bits(w) or is_norm(leaf_path(keys))
            return w if kept else w.astype(self.compute)

        return jax.tree_util.tree_map_with_path(cast, params, is_leaf=is_in_4_bits)

    def first(self, rest: Any, batch: jax.Array | Packed) -> jax.Array:
        """[batch, length, width] of tokens [batch, length + 1]."""
        tokens = batch.tokens if isinstance(batch, Packed) else batch
        return self.embedded(rest, tokens[:, :-1])

    def embedded(self, rest: Any, tokens: jax.Array) -> jax.Array:
        """What the first layer is given, [batch, length, width]."""
        x = lookup(rest["embed_tokens"]["embedding"], tokens, self.compute)
        if self.shape.gemma:
            x = x * jnp.asarray(self.shape.width**0.5, x.dtype)
        return self.constrain(x)

    def quantized_weights(self, params: Any) -> Any:
        """Quantize the weights of layers, for `__call__` while they stay the same."""
        of_layers = self._computing(params[LAYERS])
        if self.stacked:
            return layers.fp8_flow.quantized_weights(of_layers)
        return [layers.fp8_flow.quantized_weights(own) for own in of_layers]

    def layer(
        self,
        own: Any,
        rest: Any,
        x: jax.Array,
        batch: jax.Array | Packed | None,
        codes: Any = None,
        sliding: bool | jax.Array | None = None,
    ) -> jax.Array:
        """One layer, of parameters without the axis of layers; `codes` are of its weights.

        `sliding`: whether its attention has a window; None: as in all layers. `rest` is not read.
        """
        del rest
        given: dict[str, Any] = {} if codes is None else {"codes": codes}
        if self.activations == STANDARD:
            given |= {"sliding": self.slides[0] if sliding is None else sliding}
            if isinstance(batch, Packed):
                given |= {"segments": batch.segments[:, :-1]}
        return self.constrain(nnx.merge(self._graphs[1], self._computing(own))(x, **given))

    @property
    def slides(self) -> tuple[bool, ...]:
        """Whether each layer's attention has a window."""
        return self.shape.sliding or (False,) * self.shape.layers

    def _merged_ends(self, rest: Any) -> Ends:
        own = {name: tree for name, tree in rest.items() if name != LAYERS}
        return nnx.merge(self._graphs[0], self._computing(own))

    def last(self, rest: Any, x: jax.Array, batch: jax.Array | Packed) -> jax.Array:
        """The mean loss in nats per token, or its weighted sum, in f32."""
        ends, tokens, given = self._merged_ends(rest), batch, {}
        head, vocab_axis = ends.head()
        if isinstance(batch, Packed):
            tokens, given = batch.tokens, {"weights": batch.weights, "reduction": "sum"}
        if self.shape.logit_cap is not None:
            given["soft_cap"] = self.shape.logit_cap
        return self.loss(ends.norm(x), head, tokens[:, 1:], vocab_axis=vocab_axis, **given)

    def __call__(self, params: Any, batch: jax.Array | Packed, codes: Any = None) -> jax.Array:
        """The loss of tokens [batch, length + 1]; `codes`: of `quantized_weights`."""
        return self.beyond(self.first(params, batch), params, batch, codes)

    def beyond(
        self, x: jax.Array, params: Any, batch: jax.Array | Packed, codes: Any = None
    ) -> jax.Array:
        """The loss, from what goes into the layers."""
        return self.last(params, self.through_layers(x, params, batch, codes), batch)

    def through_layers(
        self, x: jax.Array, params: Any, batch: jax.Array | Packed | None, codes: Any = None
    ) -> jax.Array:
        """What comes out of the layers."""

        def body(sliding: bool, x: jax.Array, given: tuple[Any, ...]) -> tuple[jax.Array, None]:
            own, of_own, *flag = given
            return self.layer(own, params, x, batch, of_own, *flag or [sliding]), None

        slides = self.slides
        if self.stacked:
            flags = [jnp.array(slides)] if len(set(slides)) > 1 else []
            step = self.rematerialised(functools.partial(body, slides[0]))
            return jax.lax.scan(step, x, (params[LAYERS], codes, *flags), unroll=self.unroll)[0]
        for own, of_own, sliding in zip(
            params[LAYERS], codes or [None] * self.shape.layers, slides, strict=True
        ):
            x, _ = self.rematerialised(functools.partial(body, sliding))(x, (own, of_own))
        return x

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Logits in f32, [batch, length, vocab], of the token after each one of `tokens`."""
        x = self.through_layers(self.embedded(params, tokens), params, None)
        return self.logits_of(params, x)

    def logits_of(self, params: Any, x: jax.Array) -> jax.Array:
        """Logits in f32, of what comes out of the layers."""
        ends = self._merged_ends(params)
        head, vocab_axis = ends.head()
        axes = ((x.ndim - 1,), (1 - vocab_axis,)), ((), ())
        found = jax.lax.dot_general(ends.norm(x), head, axes, preferred_element_type=jnp.float32)
        return capped(found, self.shape.logit_cap)

    def generate(
        self, params: Any, prompt: jax.Array, number: int, key: jax.Array, temperature: float = 0.0
    ) -> jax.Array:
        """Continue a prompt [batch, length] by `number` tokens; at temperature 0, the likeliest.

        Every token runs the model on the whole text: for samples, not for serving.
        """
        batch, length = prompt.shape
        text = jnp.zeros((batch, length + number), prompt.dtype).at[:, :length].set(prompt)

        def append(at: jax.Array, text: jax.Array) -> jax.Array:
            x = self.through_layers(self.embedded(params, text), params, None)
            logits = self.logits_of(params, jax.lax.dynamic_index_in_dim(x, at - 1, 1, False))
            if temperature:
                drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
            else:
                drawn = jnp.argmax(logits, -1)
            return text.at[:, at].set(drawn.astype(text.dtype))

        return jax.lax.fori_loop(length, length + number, append, text)

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


def in_4_bits(model: Llama) -> Llama:
    """Return a model with adapters whose other matrices are in 4 bits, and few logits at once.

    Raises:
      ValueError: if NF4 does not take a matrix of this shape.
    """
    loss = functools.partial(model.loss, chunk_tokens=_CHUNK_BESIDE_4_BITS)
    model = dataclasses.replace(model, in_4_bits=True, loss=loss)
    jax.eval_shape(model.weights, jax.random.key(0))
    return model
