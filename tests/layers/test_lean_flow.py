"""The flow in 16 bits: ordinary layers bit for bit, that keep inputs of norms and gates alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tolerances as tol

pytest.importorskip("flax")

from flax import nnx  # noqa: E402

from optax_lowmem import layers  # noqa: E402
from optax_lowmem.layers import fp8_flow  # noqa: E402
from optax_lowmem.layers.fp8_flow import Recipe  # noqa: E402
from tests.layers.test_fp8_block import (  # noqa: E402
    HEADS,
    HIDDEN,
    LEAN,
    OF_LINEN,
    WIDTH,
    Dense,
    Linear,
    distance,
    drawn,
    gradients,
    jitted,
    make,
    report_of_llama,
)
from tests.tiers import in_turn, rows  # noqa: E402

lean = functools.partial(make, LEAN, kv_heads=HEADS)


# ---- an ordinary layer ---------------------------------------------------------------------------
def norm(x, scale):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * inverse * scale.reshape(1, 1, -1)).astype(x.dtype)


def rotated(x):
    frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2, dtype=jnp.float32) / x.shape[-1])
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def ordinary(params, x, heads=HEADS):
    """A Llama's layer as one would write it in JAX."""
    attn, mlp = params["self_attn"], params["mlp"]
    n = norm(x, params["input_norm"]["scale"])
    q, k, v = (n @ attn[f"{name}_proj"]["kernel"] for name in "qkv")
    q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
    mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ attn["o_proj"]["kernel"]
    n = norm(x, params["post_attention_norm"]["scale"])
    gate, up = (n @ mlp[f"{name}_proj"]["kernel"] for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ mlp["down_proj"]["kernel"]


@pytest.mark.parametrize("dtype", rows([jnp.bfloat16, jnp.float32], [jnp.bfloat16]))
def test_an_ordinary_layer(dtype):
    """No bit of the forward pass is another; gradients are, by rounding."""
    block, params = lean(dtype)
    x = drawn(dtype)
    np.testing.assert_array_equal(jitted(block)(params, x), jitted(ordinary)(params, x))
    found, want = gradients(block, params, x), gradients(ordinary, params, x)
    assert distance(found, want) < tol.RECOMPUTED[jnp.dtype(dtype).name]


# ---- bytes ---------------------------------------------------------------------------------------
def test_units_of_a_llama_layer():
    """Done when 2: at most 17 U of JAX's 28; the inputs of two norms, q, k, v, o, gate and up."""
    plain = report_of_llama(LEAN, "cudnn", functools.partial(ordinary, heads=24))
    report = report_of_llama(LEAN, "cudnn")
    assert plain.total_bytes / plain.unit > 27.9
    norms = 2 * 4 * 3072  # their scales, behind a barrier
    assert report.total_bytes - norms == (2 + 4 + 2 * 8192 / 3072) * report.unit
    assert report.total_bytes <= 17 * report.unit
    large = {jnp.dtype(a.dtype).name for a in report.activations if a.bytes > norms}
    assert large == {"bfloat16"}


@pytest.mark.full
def test_second_derivatives():
    """Nothing is rounded to codes: unlike the flow in FP8, this one has them."""
    x, w = drawn(shape=(3, 8)), drawn(shape=(8, 4))

    def of(rms_norm, x):
        return jnp.sum(jnp.square(rms_norm(x) @ w))

    def lean(x):
        return fp8_flow.rms_norm(x, jnp.ones(8), recipe=LEAN).value

    def plain(x):
        return norm(x[None], jnp.ones(8))[0]

    found, want = (
        jitted(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(jax.grad(functools.partial(of, f))(x)))))(x)
        for f in (lean, plain)
    )
    assert distance(found, want) < tol.RECOMPUTED["float32"]


# ---- functions and modules -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "activation, gated", in_turn(["silu", "gelu", "gelu_exact", "relu"], [True, False])
)
def test_gates(activation, gated):
    """Of two arrays or one, and the linear layer behind: as without the flow."""
    gate, up, w = (drawn(jnp.bfloat16, i, (6, 16)) for i in range(3))
    w, up = w.T, up if gated else None
    of = fp8_flow.gated_product

    def mine(gate, w):
        return fp8_flow.linear(of(gate, up, activation=activation, recipe=LEAN), w, recipe=LEAN)

    def plain(gate, w):
        function = {
            "silu": jax.nn.silu,
            "gelu": functools.partial(jax.nn.gelu, approximate=True),
            "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
            "relu": jax.nn.relu,
        }[activation]
        return (function(gate) * up if gated else function(gate)) @ w

    found, want = gradients(mine, gate, w), gradients(plain, gate, w)
    np.testing.assert_array_equal(found[0], want[0])
    assert distance(found, want) < tol.RECOMPUTED["bfloat16"]


def plain_mlp(params, x):
    """The same with JAX's own derivative."""

    def dense(x, own):
        return x @ own["kernel"] + own["bias"].reshape(1, -1)

    centred = x - x.mean(-1, keepdims=True)
    scale, bias = (params["norm"][name].reshape(1, -1) for name in ("scale", "bias"))
    n = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale + bias
    gate, up = dense(n, params["gate"]), dense(n, params["up"])
    return x + dense(jax.nn.gelu(gate) * up, params["down"])


def test_linen_and_nnx_are_the_same_layers():
    x, model = drawn(shape=(3, 16)), Linear(nnx.Rngs(0), LEAN)
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    found = gradients(lambda params, x: nnx.merge(graph, params)(x), params, x)
    variables = {"params": {one: params[two] for one, two in OF_LINEN.items()}}
    np.testing.assert_array_equal(jitted(Dense(LEAN).apply)(variables, x), found[0])
    assert distance(found, gradients(plain_mlp, params, x)) < tol.RECOMPUTED["float32"]


def test_precision_of_products():
    """A layer's own, which products in FP8 have no use for."""
    layer = layers.Fp8Linear(8, 4, recipe=LEAN, precision="highest", rngs=nnx.Rngs(0))
    n = layers.Fp8RMSNorm(8, recipe=LEAN)
    for given in (drawn(shape=(2, 8)), n(drawn(shape=(2, 8)))):
        assert str(jax.make_jaxpr(layer)(given)).count("HIGHEST") >= 1


def test_flows_meet():
    """Codes are made of what has none, and the value is taken of what has."""
    x, w = drawn(shape=(4, 16)), drawn(shape=(16, 8))
    lean, coded = (fp8_flow.rms_norm(x, jnp.ones(16), recipe=r) for r in (LEAN, Recipe()))
    np.testing.assert_array_equal(fp8_flow.linear(lean, w), fp8_flow.linear(lean.value, w))
    np.testing.assert_array_equal(fp8_flow.linear(coded, w, recipe=LEAN), coded.value @ w)


def test_refusals():
    with pytest.raises(ValueError, match="storage must be one of fp8, bf16, got 'int4'"):
        Recipe(storage="int4")
    with pytest.raises(ValueError, match="group_size=32 with storage='bf16'"):
        Recipe(storage="bf16", group_size=32)
    with pytest.raises(ValueError, match="kernel_absmax with storage='bf16'"):
        fp8_flow.linear(
            drawn(shape=(2, 8)), drawn(shape=(8, 3)), kernel_absmax=jnp.ones((1, 1)), recipe=LEAN
        )
    block = layers.Fp8LlamaBlock(WIDTH, HIDDEN, HEADS, recipe=LEAN, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="leave it out"):
        block(drawn(), block.weight_maxima())
