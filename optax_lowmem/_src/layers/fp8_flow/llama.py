"""A Llama block in the FP8 precision flow, in Flax NNX."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.fp8_flow.gate import gated_product
from optax_lowmem._src.layers.fp8_flow.linear import QuantizedKernel, quantize_weight, weight_absmax
from optax_lowmem._src.layers.fp8_flow.nnx import Fp8Linear, Fp8RMSNorm
from optax_lowmem._src.layers.fp8_flow.storage import DEFAULT, Coded, Recipe

# ---- parts of a transformer block, with 16-bit arrays between them (appendix G.1) ----------------

Norm = Callable[[jax.Array], Coded]
Layer = Callable[[PyTree], jax.Array]


def project(layer: Layer, x: Coded) -> jax.Array:
    """Apply a linear layer to a quantized activation, or to its value if it takes no codes."""
    return layer(x if getattr(layer, "takes_codes", False) else x.value)


def before_attention(x: jax.Array, norm: Norm, layers: Sequence[Layer]) -> tuple[jax.Array, ...]:
    """Compute queries, keys and values: a linear layer of the normalised input for each.

    Args:
      x: [..., n], also the residual.
      norm: `rms_norm` with its scale, or a module.
      layers: `Projection` or `Fp8Linear`; any other linear layer gets the unquantized value.

    Memory: codes of x with a scale per group, and codes of the normalised x, which the layers
    share.

    Example:
      >>> import functools, jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> norm = functools.partial(fp8_flow.rms_norm, scale=jnp.ones(8))
      >>> layers = [fp8_flow.Projection(jnp.ones((8, n))) for n in (8, 4, 4)]
      >>> [y.shape for y in fp8_flow.before_attention(jnp.ones((2, 8)), norm, layers)]
      [(2, 8), (2, 4), (2, 4)]
    """
    coded = norm(x)
    return tuple(project(layer, coded) for layer in layers)


def after_attention(mixed: jax.Array, residual: jax.Array, layer: Layer) -> jax.Array:
    """Add the output projection of attention to the residual.

    Args:
      mixed: the output of attention, [..., k].
      residual: [..., n].
      layer: with keep="input" if attention saves `mixed` itself (appendix D).
    """
    return residual + layer(mixed).astype(residual.dtype)


@jax.custom_vjp
def _stored(x: jax.Array) -> jax.Array:
    """Return x behind a barrier; XLA would otherwise recompute the sum x where x is added."""
    return lax.optimization_barrier(x)


_stored.defvjp(lambda x: (_stored(x), None), lambda saved, g: (g,))


def mlp_residual(
    x: jax.Array,
    norm: Norm,
    gate: Layer,
    up: Layer | None,
    down: Layer,
    *,
    activation: str = "silu",
    recipe: Recipe = DEFAULT,
) -> jax.Array:
    """Compute x + down(f(gate(norm(x))) * up(norm(x))).

    Args:
      x: [..., n].
      norm: as in `before_attention`.
      gate: linear layer n -> m, as in `before_attention`.
      up: linear layer n -> m; None: down(f(gate(norm(x)))).
      down: linear layer m -> n.
      activation: f, as in `gated_product`.
      recipe: of `gated_product`.

    Memory: codes of x, gate(x) and up(x) with a scale per group; codes of the inputs of the linear
    layers.
    """
    x = _stored(x) if recipe.quantizes else x
    coded = norm(x)
    of_up = None if up is None else project(up, coded)
    of_gate = project(gate, coded)
    h = gated_product(of_gate, of_up, activation=activation, recipe=recipe)
    return x + project(down, h).astype(x.dtype)


# ---- a Llama block of NNX ------------------------------------------------------------------------

T = TypeVar("T")
ATTENTIONS = ("xla", "cudnn")
OfWeights = dict[str, dict[str, PyTree]] | None  # the maximum or the codes of each kernel


class Fp8Attention(nnx.Module):
    """Projections of causal grouped-query self-attention with rotary embeddings.

    Args:
      width: of the residual stream.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      make: `Fp8Linear` with its other arguments.
      rope: base of the rotary frequencies.
      attention: `xla`, which saves queries, keys and values and recomputes the rest, or `cudnn`,
        which saves its output as well.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        make: Callable[..., nnx.Module],
        rope: float,
        attention: str,
    ):
        self.head, self.rope, self.kind = width // heads, rope, attention
        kv = kv_heads * self.head
        self.q_proj = make(width, width)
        self.k_proj = make(width, kv)
        self.v_proj = make(width, kv)
        self.o_proj = make(width, width, keep="codes" if attention == "xla" else "input")

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attend, given the projections of the input; return [batch, length, width]."""
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head) for x in (q, k, v))
        with jax.named_scope("rotary"):
            q, k = rotate(q, self.rope), rotate(k, self.rope)
        mixer = partial(jax.nn.dot_product_attention, is_causal=True, implementation=self.kind)
        mixed = (jax.checkpoint(mixer) if self.kind == "xla" else mixer)(q, k, v)
        return mixed.reshape(*mixed.shape[:2], -1)


class Fp8Mlp(nnx.Module):
    """Projections of SwiGLU; `make` as in `Fp8Attention`."""

    def __init__(self, width: int, hidden: int, make: Callable[..., nnx.Module]):
        self.gate_proj = make(width, hidden)
        self.up_proj = make(width, hidden)
        self.down_proj = make(hidden, width)


class Fp8LlamaBlock(nnx.Module):
    r"""A Llama block that saves activations as 8-bit codes for the backward pass (COAT, section 5).

    It computes x + o(attention(q, k, v of norm(x))), then x + down(silu(gate) * up of norm(x)).
    Saved are codes of the norms' inputs, of gate and up (a scale for 16 neighbours), and of the
    linear layers' inputs (a scale per tensor); and queries, keys and values in 16 bits for
    attention. With U = 2 \cdot batch \cdot length \cdot width bytes and an MLP of 8/3 the width,
    that is 9.5 U and 0.46 U of scales (10 U with cudnn, which saves its output), where the paper
    counts 22.66 U for bf16 and 13.33 U for its own flow.

    Args:
      width: of the residual stream.
      hidden: width of the MLP.
      heads: number of query heads.
      kv_heads: number of key and value heads; None: `heads`.
      rope: base of the rotary frequencies.
      epsilon: of the norms.
      attention: `xla` or `cudnn`, the implementation of `jax.nn.dot_product_attention`.
      recipe: storage of activations and formats of the products.
      kernel_init: initializer of the kernels of the linear layers.
      param_dtype: of these kernels; the norms' scales are f32.
      rngs: for the initial weights.

    Parameters: `input_norm/scale`, `self_attn/{q,k,v,o}_proj/kernel`, `post_attention_norm/scale`,
    `mlp/{gate,up,down}_proj/kernel`, as in `transformers`. For other products, apply
    `layers.convert` to the block, for example with `switchback_dot_general("switchback_m", "fp8")`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> block = layers.Fp8LlamaBlock(32, 88, 4, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 8, 32), jnp.bfloat16)).dtype
      dtype(bfloat16)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        rope: float = 10_000.0,
        epsilon: float = 1e-6,
        attention: str = "xla",
        recipe: Recipe = DEFAULT,
        kernel_init: nnx.Initializer | None = None,
        param_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"{heads} heads of a width of {width} with {kv_heads} heads of keys: pass heads "
                "that divide the width, and kv_heads that divide the heads"
            )
        check_choice("attention", attention, ATTENTIONS)
        make = partial(
            Fp8Linear, use_bias=False, recipe=recipe, rngs=rngs,
            kernel_init=kernel_init or nnx.initializers.lecun_normal(),
            param_dtype=param_dtype or jnp.float32,
        )  # fmt: skip
        self.recipe = recipe
        self.input_norm = Fp8RMSNorm(width, epsilon=epsilon, recipe=recipe)
        self.self_attn = Fp8Attention(width, heads, kv_heads, make, rope, attention)
        self.post_attention_norm = Fp8RMSNorm(width, epsilon=epsilon, recipe=recipe)
        self.mlp = Fp8Mlp(width, hidden, make)

    def __call__(
        self, x: jax.Array, maxima: OfWeights = None, codes: OfWeights = None
    ) -> jax.Array:
        """Apply the block to x; the result has x's shape and dtype.

        Args:
          x: [batch, length, width].
          maxima: `weight_maxima()`, computed once for the micro-batches of a step.
          codes: `quantized_weights()`, computed once likewise; pass it instead of `maxima`.
        """
        attention, mlp = self.self_attn, self.mlp
        of = partial(_given, maxima, codes)
        with jax.named_scope("before_attention"):
            layers = [of("self_attn", name, getattr(attention, name)) for name in _QKV]
            q, k, v = before_attention(x, self.input_norm, layers)
        with jax.named_scope("attention"):
            mixed = attention.mix(q, k, v)
        with jax.named_scope("after_attention"):
            x = after_attention(mixed, x, of("self_attn", "o_proj", attention.o_proj))
        with jax.named_scope("mlp"):
            layers = [of("mlp", name, getattr(mlp, name)) for name in _MLP]
            return mlp_residual(x, self.post_attention_norm, *layers, recipe=self.recipe)

    def weight_maxima(self) -> dict[str, dict[str, jax.Array]]:
        """Return the largest magnitude of each kernel, for `__call__` until the weights change."""
        return weight_maxima(nnx.to_pure_dict(nnx.state(self, nnx.Param)))

    def quantized_weights(self) -> dict[str, dict[str, QuantizedKernel]]:
        """Quantize each kernel, for `__call__` until the weights change."""
        return quantized_weights(nnx.to_pure_dict(nnx.state(self, nnx.Param)))


_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class _Given:
    """A linear layer with the maximum or the codes of its kernel."""

    takes_codes = True

    def __init__(self, layer: Layer, **of_kernel: object):
        self.layer, self.of_kernel = layer, of_kernel

    def __call__(self, x: jax.Array | Coded) -> jax.Array:
        return self.layer(x, **self.of_kernel)


def _given(maxima: OfWeights, codes: OfWeights, part: str, name: str, layer: Layer) -> PyTree:
    given = {"absmax": maxima, "codes": codes}
    results = {key: values[part][name] for key, values in given.items() if values is not None}
    return _Given(layer, **results) if results and getattr(layer, "takes_codes", False) else layer


def weight_maxima(params: optax.Params) -> dict[str, dict[str, jax.Array]]:
    """Return the largest magnitude of each kernel of a block, also if stacked [layers, k, m]."""
    return _of_kernels(weight_absmax, params)


def quantized_weights(params: optax.Params) -> dict[str, dict[str, QuantizedKernel]]:
    """Quantize each kernel of a block's parameters, also if stacked [layers, k, m].

    Args:
      params: of `Fp8LlamaBlock`, in the dtype of its inputs, so that results are equal bit for bit.

    Memory: 2 bytes per parameter of the kernels.
    """
    return _of_kernels(quantize_weight, params)


def _of_kernels(
    function: Callable[[jax.Array], T], params: optax.Params
) -> dict[str, dict[str, T]]:
    names = {"self_attn": (*_QKV, "o_proj"), "mlp": _MLP}
    return {
        part: {name: function(params[part][name]["kernel"]) for name in layers}
        for part, layers in names.items()
    }


# ---- rotary embeddings, whose gradient, the inverse rotation, needs no residuals -----------------


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotate queries or keys [batch, length, heads, head] by their position, in f32."""
    return _rotated(x, base, 1.0)


def _rotated(x: jax.Array, base: float, direction: float) -> jax.Array:
    length, head = x.shape[1], x.shape[-1]
    frequency = base ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = (f(angle)[None, :, None, None] for f in (jnp.cos, jnp.sin))
    # [-b, a] without a concatenation, which XLA does not fuse with the maximum of the result
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, head // 2)
    sign = jnp.asarray([-direction, direction], jnp.float32).reshape(1, 1, 1, 2, 1)
    across = halves[..., ::-1, :] * sign
    return (halves * cos + across * sin).reshape(x.shape).astype(x.dtype)


rotate.defvjp(
    lambda x, base: (rotate(x, base), None), lambda base, saved, g: (_rotated(g, base, -1.0),)
)
