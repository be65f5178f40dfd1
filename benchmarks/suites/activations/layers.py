"""A Llama's layer in several precisions, of the same parameters (COAT, Tables 2 and 7)."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from optax_lowmem import layers
from optax_lowmem.layers import fp8_flow
from optax_lowmem.layers.fp8_flow import Recipe

Params = dict[str, Any]
Layer = Callable[[Params, jax.Array], jax.Array]


class Shape(NamedTuple):
    """Of a layer and its input; the MLP is 8/3 as wide, in whole multiples of 128."""

    width: int
    length: int
    batch: int

    @classmethod
    def parse(cls, case: str) -> "Shape":
        """Of `h<hidden>-s<sequence>-b<batch>`."""
        return cls(*(int(part[1:]) for part in case.split("-")))

    @property
    def hidden(self) -> int:
        unit = 128 if self.width >= 1024 else 16
        return -(-8 * self.width // (3 * unit)) * unit

    @property
    def heads(self) -> int:
        return max(1, self.width // 128)

    @property
    def unit(self) -> int:
        """Bytes of 1 U."""
        return 2 * self.width * self.length * self.batch


def backward(layer: Layer) -> Callable[..., Any]:
    """(parameters, x, g) -> output and gradients."""

    def step(params: Any, x: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(layer, params, x)
        return y, *pull(g)

    return step


def fp8_block(shape: Shape, attention: str, recipe: Recipe) -> Layer:
    sizes, more = (shape.width, shape.hidden, shape.heads), {"attention": attention}
    block = nnx.eval_shape(
        lambda: layers.Fp8LlamaBlock(*sizes, **more, recipe=recipe, rngs=nnx.Rngs(0))
    )
    graph = nnx.graphdef(block)
    return lambda params, x, maxima=None: nnx.merge(graph, params)(x, maxima)


def weights(shape: Shape) -> Params:
    """In bf16, norms in f32."""
    width, hidden = shape.width, shape.hidden
    sizes = {f"{name}_proj": (width, width) for name in "qkvo"}
    more = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def kernel(size: tuple[int, int]) -> dict[str, jax.Array]:
        return {"kernel": jax.random.normal(next(keys), size, jnp.bfloat16) * size[0] ** -0.5}

    norms = ("input_norm", "post_attention_norm")
    found: Params = {name: {"scale": jnp.ones(width, jnp.float32)} for name in norms}
    found["self_attn"] = {name: kernel(size) for name, size in sizes.items()}
    return found | {"mlp": {name: kernel(size) for name, size in more.items()}}


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in f32, the result in x's dtype."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (wide * inverse * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys [batch, length, heads, head], turned by their position."""
    with jax.named_scope("rotary"):
        frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
        angle = jnp.arange(x.shape[1])[:, None, None] * frequency
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def mixed(q: jax.Array, k: jax.Array, v: jax.Array, shape: Shape, attention: str) -> jax.Array:
    q, k, v = (y.reshape(*y.shape[:2], shape.heads, -1) for y in (q, k, v))
    with jax.named_scope("attention"):
        given = (rotated(q), rotated(k), v)
        found = jax.nn.dot_product_attention(*given, is_causal=True, implementation=attention)
    return found.reshape(*found.shape[:2], -1)


def plain_block(shape: Shape, attention: str, dot: Callable[..., jax.Array]) -> Layer:
    def times(x: jax.Array, layer: Params) -> jax.Array:
        with jax.named_scope("linear"):
            return dot(x, layer["kernel"], (((x.ndim - 1,), (0,)), ((), ())))

    def block(params: Params, x: jax.Array) -> jax.Array:
        attn, mlp = params["self_attn"], params["mlp"]
        n = normalised(x, params["input_norm"]["scale"])
        q, k, v = (times(n, attn[f"{name}_proj"]) for name in "qkv")
        x = x + times(mixed(q, k, v, shape, attention), attn["o_proj"])
        n = normalised(x, params["post_attention_norm"]["scale"])
        gate, up = times(n, mlp["gate_proj"]), times(n, mlp["up_proj"])
        with jax.named_scope("activation"):
            h = jax.nn.silu(gate) * up
        return x + times(h, mlp["down_proj"])

    return block


class FlaxFp8(nn.Module):
    """The layer with Flax's FP8 products: delayed scaling, activations in bf16."""

    shape: Shape
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, hidden = self.shape.width, self.shape.hidden
        dense = partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
            dot_general_cls=nn.Fp8DirectDotGeneralOp,
        )  # fmt: skip
        ones = nn.initializers.ones
        n = normalised(x, self.param("input_norm", ones, (width,)))
        q, k, v = (dense(width, name=f"{name}_proj")(n) for name in "qkv")
        x = x + dense(width, name="o_proj")(mixed(q, k, v, self.shape, self.attention))
        n = normalised(x, self.param("post_attention_norm", ones, (width,)))
        gate, up = dense(hidden, name="gate_proj")(n), dense(hidden, name="up_proj")(n)
        return x + dense(width, name="down_proj")(jax.nn.silu(gate) * up)


def flax_fp8(shape: Shape, attention: str) -> tuple[Layer, Callable[[], Params]]:
    """The layer, and what gives its parameters with the histories of its maxima."""
    model = FlaxFp8(shape, attention)

    def draw() -> Params:
        x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
        like = jax.eval_shape(model.init, jax.random.key(0), x)
        return jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), like)

    return model.apply, draw


RECIPES: dict[str, Recipe] = {
    "fp8-flow": Recipe(),
    "bf16-lean": Recipe(storage="bf16"),
    "fp8-flow-bf16-dw": Recipe(weight_gradient="bf16"),
    "fp8-flow-bf16-gradients": Recipe(input_gradient="bf16", weight_gradient="bf16"),
}
_DOTS: dict[str, Callable[..., jax.Array]] = {
    "bf16": lax.dot_general,
    "switchback-int8": layers.switchback_dot_general(),
    "switchback-fp8": layers.switchback_dot_general("switchback", "fp8"),
}
CACHED, FLAX = "fp8-flow-cached", "flax-fp8"
NAMES = (*_DOTS, FLAX, *RECIPES, CACHED)


def make(name: str, shape: Shape, attention: str) -> tuple[Layer, Callable[[], Params]]:
    if name == FLAX:
        return flax_fp8(shape, attention)
    draw = partial(weights, shape)
    if name == CACHED:  # with the maxima of kernels given, as over an accumulation (appendix G.5)
        block = fp8_block(shape, attention, Recipe())

        def with_maxima() -> Params:
            own = draw()
            return {"block": own, "maxima": fp8_flow.weight_maxima(own)}

        return lambda params, x: block(params["block"], x, params["maxima"]), with_maxima
    if name in RECIPES:
        return fp8_block(shape, attention, RECIPES[name]), draw
    return plain_block(shape, attention, _DOTS[name]), draw
