"""8-bit layers inside a `shard_map`, where weights are common to devices and data are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")

from optax_lowmem import gaussws, layers  # noqa: E402
from optax_lowmem.layers import fp8_flow  # noqa: E402
from tests.tiers import rows  # noqa: E402

X = jax.random.normal(jax.random.key(0), (64, 32))
W = jax.random.normal(jax.random.key(1), (32, 48))
BITS = jnp.full((1, 2), 6.0)


def flow(x, params):
    """A norm, two projections of it, their product and one back."""
    coded = fp8_flow.rms_norm(x, params["scale"])
    h = fp8_flow.gated_product(*(fp8_flow.linear(coded, params[name]) for name in ("gate", "up")))
    return fp8_flow.linear(h, params["down"])


def product(variant):
    dot = layers.switchback_dot_general(variant, "int8")
    return lambda x, w: dot(x, w, (((1,), (0,)), ((), ())))


LAYERS = {
    "linear": (fp8_flow.linear, W),
    "linear, maximum given": (
        lambda x, w: fp8_flow.linear(x, w, kernel_absmax=fp8_flow.weight_absmax(w)), W,
    ),
    "linear, codes given": (
        lambda x, w: fp8_flow.linear(x, w, kernel_codes=fp8_flow.quantize_weight(w)), W,
    ),
    "flow": (flow, {"scale": jnp.ones(32), "gate": W, "up": W[::-1], "down": W.T}),
    "layer norm": (lambda x, s: fp8_flow.layer_norm(x, s, s).value, jnp.ones(32)),
    "gaussws": (lambda x, w: x @ gaussws.sample(w, BITS, jax.random.key(0), compute="float32"), W),
    "cross entropy": (
        lambda x, w: layers.linear_cross_entropy(
            x, w, jnp.arange(x.shape[0]) % 48, reduction="sum", chunk_tokens=5
        ), W,
    ),
    "cross entropy in fp8": (
        lambda x, w: layers.linear_cross_entropy(
            x, w, jnp.arange(x.shape[0]) % 48, reduction="sum", chunk_tokens=5, products="fp8"
        ), W,
    ),
} | {name: (product(name), W) for name in ("switchback", "switchback_m", "llm_int8", "tensorwise")}  # fmt: skip  # noqa: E501

SIMILAR = ("linear, maximum given", "switchback_m", "llm_int8", "tensorwise")


@pytest.mark.parametrize("name", rows(LAYERS, [name for name in LAYERS if name not in SIMILAR]))
def test_gradients_of_common_weights_are_summed(name):
    """As those of the parts of a batch, one after the other; each has its own maxima."""
    layer, params = LAYERS[name]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def on_devices(params, x):
        def loss(params):
            return jax.lax.pmean((layer(x, params) ** 2).sum(), "data")

        return jax.value_and_grad(loss)(params)

    def in_turn(params):
        parts = (layer(part, params) for part in jnp.split(X, 4))
        return jnp.mean(jnp.stack([(y**2).sum() for y in parts]))

    found = jax.jit(on_devices)(params, X)
    wanted = jax.jit(jax.value_and_grad(in_turn))(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())
