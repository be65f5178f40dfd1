"""Layers whose weights are sampled, and that they train as the transformation does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402
from optax_lowmem import gaussws, layers  # noqa: E402
from tests.oracle import gaussws as oracle  # noqa: E402
from tests.tiers import rows  # noqa: E402

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
RATE, STEPS = 1e-2, 20


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 96, rngs=rngs), nnx.Linear(96, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


def wanted_output(kernel, bias, key, compute, bits=6.0):
    sampled = gaussws.sample(kernel, bits, key, compute=compute)
    dtype = jnp.dtype(compute)
    return X.astype(dtype) @ sampled.astype(dtype) + bias.astype(dtype)[None]


# ---- one layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", rows([None, jnp.bfloat16], [jnp.bfloat16]))
def test_linen(dtype):
    layer = layers.GaussWSDense(40, dtype=dtype, bits_init=5.0)
    plain = nn.Dense(40, dtype=dtype)
    variables = layer.init(jax.random.key(0), X)
    own = variables["params"]
    same = plain.init(jax.random.key(0), X)["params"]
    np.testing.assert_array_equal(own["kernel"], same["kernel"])
    assert own["bits"].shape == (2, 2) and (own["bits"] == 1).all()
    clean = plain.apply({"params": same}, X)
    np.testing.assert_array_equal(layer.apply(variables, X), clean)
    rngs = {"gaussws": jax.random.key(1)}
    apply = jax.jit(layer.apply)
    noisy = apply(variables, X, rngs=rngs)
    key = layer.apply(variables, method=lambda m: m.make_rng("gaussws"), rngs=rngs)
    name = "bfloat16" if dtype else "float32"
    wanted = wanted_output(own["kernel"], own["bias"], key, name, 5.0)
    np.testing.assert_array_equal(noisy, wanted)
    assert (noisy != clean).mean() > 0.5
    np.testing.assert_array_equal(noisy, apply(variables, X, rngs=rngs))
    other = apply(variables, X, rngs={"gaussws": jax.random.key(2)})
    assert (other != noisy).mean() > 0.5


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnx(dtype):
    layer = layers.GaussWSLinear(64, 40, dtype=dtype, rngs=nnx.Rngs(0), seed=3, path="a/kernel")
    plain = nnx.Linear(64, 40, dtype=dtype, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])
    name = "bfloat16" if dtype else "float32"
    for step in range(2):
        key = gaussws.noise_key(3, step, "a/kernel")
        wanted = wanted_output(layer.kernel[...], layer.bias[...], key, name)
        np.testing.assert_array_equal(layer(X), wanted)
        np.testing.assert_array_equal(layer.sampled(), gaussws.sample(
            layer.kernel[...], 6.0, key, compute="float32"))  # fmt: skip
        layers.renew_noise(layer)
    layer.eval()
    np.testing.assert_array_equal(layer(X), plain(X))
    layer.train()
    assert (layer(X) != plain(X)).any()
    one, other = (layers.GaussWSLinear(64, 40, rngs=rngs) for rngs in [nnx.Rngs(0)] * 2)
    one.kernel = other.kernel
    assert (one(X) != other(X)).any()


def test_gradients():
    """Of the kernel that of the sampled one, of b_i that of equations 3 and 9."""
    layer = layers.GaussWSLinear(64, 40, use_bias=False, rngs=nnx.Rngs(0), bits_target=1.0)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(16, 40)), jnp.float32)
    grads = nnx.grad(lambda layer: jnp.sum(layer(X) * g))(layer)
    of_sampled = X.T @ g
    np.testing.assert_allclose(grads.kernel[...], of_sampled, rtol=1e-5, atol=1e-5)
    w = np.float64(layer.kernel[...])
    r = np.float64(gaussws.draw(gaussws.noise_key(layer.noise_seed[...], 0, ""), w.shape))
    wanted = oracle.gradients(w, np.full((2, 2), 6.0), r, np.float64(of_sampled))[1] * 5
    np.testing.assert_allclose(grads.bits[...], wanted, rtol=1e-4, atol=1e-5)


def test_values_of_few_bits():
    layer = layers.GaussWSLinear(64, 40, rngs=nnx.Rngs(0), compute="mxfp4")
    values = np.unique(np.abs(np.float32(layer.sampled())[:32, :32]))
    assert len(values) <= 8


# ---- models --------------------------------------------------------------------------------------


def test_converted_nnx():
    plain = NnxMLP(nnx.Rngs(0))
    to = functools.partial(layers.GaussWSLinear, seed=7, bits_init=5.0)
    model = layers.convert(plain, "od", to)
    assert type(plain.down) is nnx.Linear and type(model.up) is nnx.Linear
    down = model.down
    assert type(down) is layers.GaussWSLinear
    assert (down.path, down.bits_init, down.bits.shape) == ("down/kernel", 5.0, (3, 2))
    key = gaussws.noise_key(7, 0, "down/kernel")
    wanted = gaussws.sample(plain.down.kernel[...], 5.0, key, compute="float32")
    np.testing.assert_array_equal(down.sampled(), wanted)
    model.eval()
    np.testing.assert_array_equal(model(X), plain(X))


def test_converted_stack():
    """Layers of a scan have noise of their own."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return NnxMLP(nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    model = layers.convert(stack, "down", layers.GaussWSLinear)
    assert model.down.bits.shape == (3, 3, 2)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    layers.renew_noise(model)
    assert np.asarray(run(X, model)).shape == X.shape
    sampled = nnx.vmap(lambda layer: layer.sampled() - layer.kernel[...])(model.down)
    noise = np.sign(np.float32(sampled))
    assert (noise[0] != noise[1]).mean() > 0.3 and (noise[1] != noise[2]).mean() > 0.3


def test_linen_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return layers.GaussWSDense(64, name="down")(x), None

    scanned = nn.scan(Layer, variable_axes={"params": 0},
                      split_rngs={"params": True, "gaussws": True}, length=3)()  # fmt: skip
    variables = scanned.init(jax.random.key(0), X, None)
    assert variables["params"]["down"]["bits"].shape == (3, 2, 2)
    clean, _ = scanned.apply(variables, X, None)
    noisy, _ = scanned.apply(variables, X, None, rngs={"gaussws": jax.random.key(1)})
    assert (clean != noisy).any()


def test_without_such_a_layer():
    with pytest.raises(ValueError, match="no GaussWSLinear"):
        layers.renew_noise(NnxMLP(nnx.Rngs(0)))


# ---- the transformation is the layer -------------------------------------------------------------


def batches():
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        yield tuple(jnp.asarray(rng.normal(size=X.shape), jnp.float32) for _ in range(2))


def of_layers(params):
    """Return an optimizer for layers: AdamW for the weights, `of_bits()` for b_i."""
    label = lambda path, _: "bits" if path[-1].key == "bits" else "weights"  # noqa: E731
    labels = jax.tree_util.tree_map_with_path(label, params)
    return optax.partition({"weights": optax.adamw(RATE), "bits": of_bits()}, labels)


def of_bits():
    return optax.adamw(RATE, weight_decay=0.5)


def follow(loss, noisy_loss, params, key_of=None):
    """Trains both ways; `loss` takes (parameters, step, x, y) with sampling layers."""
    bits = jax.tree.map(jnp.array, params["down"].pop("bits"))
    tx = lowmem.gaussws_noise(optax.adamw(RATE), "down", bits_optimizer=of_bits())
    seen, state = lowmem.init(tx, params, jnp.float32)
    own = params | {"down": params["down"] | {"bits": bits}}
    layered = of_layers(own)
    own_state = layered.init(own)

    @jax.jit
    def layer_step(params, state, step, x, y):
        value, grads = jax.value_and_grad(loss)(params, step, x, y)
        updates, state = layered.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def noisy_step(params, state, x, y):
        value, grads = jax.value_and_grad(noisy_loss)(params, x, y)
        params, state = lowmem.step(tx, grads, state, params)
        return params, state, value

    values = []
    for step, (x, y) in enumerate(batches()):
        own, own_state, one = layer_step(own, own_state, step, x, y)
        seen, state, other = noisy_step(seen, state, x, y)
        values.append((float(one), float(other)))
    np.testing.assert_allclose(*zip(*values, strict=True), rtol=1e-5)
    clean = lowmem.master_params(seen, state)
    np.testing.assert_allclose(own["down"].pop("bits"), state.bits["down"]["kernel"], atol=1e-4)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(clean), strict=True):
        np.testing.assert_allclose(a, b, atol=RATE * 1e-2)
    assert abs(values[0][0] - values[-1][0]) > 0.1  # it trains
    return state


def test_transformation_and_nnx_layer():
    plain = NnxMLP(nnx.Rngs(0))
    model = layers.convert(plain, "down", functools.partial(layers.GaussWSLinear, seed=0))
    graph, trained, rest = nnx.split(model, nnx.Param, ...)
    seed = nnx.to_pure_dict(rest)["down"]["noise_seed"]
    plain_graph = nnx.graphdef(plain)

    def loss(params, step, x, y):
        noise = {"noise_seed": seed, "noise_step": jnp.asarray(step).astype(jnp.uint32)}
        return jnp.mean((nnx.merge(graph, params, {"down": noise})(x) - y) ** 2)

    def noisy_loss(params, x, y):
        return jnp.mean((nnx.merge(plain_graph, params)(x) - y) ** 2)

    follow(loss, noisy_loss, nnx.to_pure_dict(trained))
