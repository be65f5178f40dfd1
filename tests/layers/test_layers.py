"""SwitchBackDense, SwitchBackLinear, LayerScale, and products injected into Flax's own layers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tolerances as tol
from tests.contract_cases import assert_same
from tests.tiers import in_turn

pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from optax_lowmem import layers  # noqa: E402
from optax_lowmem.layers import linen as of_linen  # noqa: E402

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 5, 8))
VARIANTS = ("switchback", "switchback_m", "switchback_q", "llm_int8", "tensorwise")
# int8 rounds a number by at most 1/254 of its row's maximum
CLOSE = 0.03
FLAT = (((1,), (0,)), ((), ()))


def close(found, want, share=CLOSE):
    """Not the same, but what int8 makes of it."""
    off = float(jnp.abs(found - want).max() / jnp.abs(want).max())
    return 0 < off < share


def assert_same_start(found, want):
    """The same initial weights, which two programs round in their own ways."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, want)
    chex.assert_trees_all_close(found, want, rtol=64 * tol.F32_EPS, atol=8 * tol.F32_EPS)


# ---- SwitchBackDense and SwitchBackLinear --------------------------------------------------------
ARGUMENTS = [
    {}, dict(use_bias=False), dict(dtype=jnp.bfloat16), dict(param_dtype=jnp.bfloat16),
    dict(kernel_init=nn.initializers.orthogonal(), bias_init=nn.initializers.ones),
    dict(precision="highest"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_dense_is_a_drop_in(arguments):
    mine, theirs = layers.SwitchBackDense(3, **arguments), nn.Dense(3, **arguments)
    (y, params), (want, of_theirs) = (one.init_with_output(KEY, X) for one in (mine, theirs))
    assert_same(params, of_theirs)
    assert y.dtype == want.dtype and y.shape == want.shape
    assert close(y.astype(jnp.float32), want.astype(jnp.float32))
    for name, value in arguments.items():
        assert getattr(mine, name) is value


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_linear_is_a_drop_in(arguments):
    mine = layers.SwitchBackLinear(8, 3, rngs=nnx.Rngs(0), **arguments)
    theirs = nnx.Linear(8, 3, rngs=nnx.Rngs(0), **arguments)
    assert isinstance(mine, nnx.Linear)
    assert_same(*(nnx.to_pure_dict(nnx.state(one)) for one in (mine, theirs)))
    y, want = mine(X), theirs(X)
    assert y.dtype == want.dtype and y.shape == want.shape
    assert close(y.astype(jnp.float32), want.astype(jnp.float32))


def test_other_arguments_pass_through():
    calls = []

    def promote(arrays, dtype):
        calls.append(dtype)
        return nnx.nn.dtypes.promote_dtype(arrays, dtype=dtype)

    layer = layers.SwitchBackLinear(
        8, 3, promote_dtype=promote, preferred_element_type=jnp.float32, dtype=jnp.bfloat16,
        kernel_metadata=dict(out_sharding=(None, "model"), eager_sharding=False),
        bias_metadata=dict(note="bias"), rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert nnx.get_partition_spec(nnx.state(layer))["kernel"].get_value() == P(None, "model")
    assert layer.bias.note == "bias"
    assert layer(X).dtype == jnp.float32 and calls == [jnp.bfloat16]
    assert layers.SwitchBackLinear(8, 3, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))(
        X
    ).tolist() == (nnx.Linear(8, 3, rngs=nnx.Rngs(0))(X).tolist())

    def dense_promote(*arrays, dtype):
        calls.append("dense")
        return nn.dtypes.promote_dtype(*arrays, dtype=dtype)

    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None))
    dense = layers.SwitchBackDense(3, kernel_init=init, promote_dtype=dense_promote)
    params = dense.init(KEY, X)["params"]
    assert params["kernel"].names == ("data", None) and calls[-1] == "dense"
    plain = layers.SwitchBackDense(3, dot_general=jax.lax.dot_general)
    np.testing.assert_array_equal(
        *(one.init_with_output(KEY, X)[0] for one in (plain, nn.Dense(3)))
    )
    by_class = layers.SwitchBackDense(3, dot_general_cls=lambda: jax.lax.dot_general)
    assert by_class.dot_general is None


@pytest.mark.parametrize(
    "variant, how", in_turn(VARIANTS, [("int8", "format"), ("fp8-e5m2", "unit")])
)
def test_layers_compute_the_product(variant, how):
    format, scaling = how
    options = dict(variant=variant, format=format, scaling=scaling)
    dense = layers.SwitchBackDense(3, **options)
    y, params = dense.init_with_output(KEY, X)
    weights = params["params"]
    product = layers.switchback_dot_general(**options)
    want = product(X, weights["kernel"], (((2,), (0,)), ((), ()))) + weights["bias"].reshape(
        1, 1, 3
    )
    np.testing.assert_array_equal(y, want)
    linear = layers.SwitchBackLinear(8, 3, **options, rngs=nnx.Rngs(0))
    linear.kernel[...], linear.bias[...] = weights["kernel"], weights["bias"]
    np.testing.assert_array_equal(linear(X), want)


def test_dense_of_other_settings():
    """Modules are dataclasses: equal ones are equal, and a clone may have another variant."""
    dense = layers.SwitchBackDense(3, variant="switchback_q")
    assert dense == layers.SwitchBackDense(3, variant="switchback_q") != layers.SwitchBackDense(3)
    assert dense.clone() == dense and dense.clone(features=4).features == 4
    other = dense.clone(variant="llm_int8", format="fp8")
    assert other.dot_general == layers.switchback_dot_general("llm_int8", "fp8")
    with pytest.raises(ValueError, match="variant must be one of standard, switchback"):
        layers.SwitchBackDense(3, variant="q")
    with pytest.raises(ValueError, match="format must be one of int8, fp8"):
        layers.SwitchBackLinear(8, 3, format="e4m3", rngs=nnx.Rngs(0))


# ---- Flax's layers with our product --------------------------------------------------------------
def test_dense_general():
    dot_general = layers.switchback_dot_general("switchback_q")
    for arguments in (
        dict(features=(3, 2), axis=(2, 1)),
        dict(features=3, axis=(-1,), batch_dims=(0,)),
    ):
        mine = nn.DenseGeneral(**arguments, dot_general=dot_general)
        y, params = jax.jit(mine.init_with_output)(KEY, X)
        want, of_theirs = jax.jit(nn.DenseGeneral(**arguments).init_with_output)(KEY, X)
        assert_same_start(params, of_theirs)
        assert y.shape == want.shape and close(y, want)
    mine, theirs = (
        nnx.LinearGeneral((5, 8), (2, 3), axis=(1, -1), **how, rngs=nnx.Rngs(0))
        for how in (dict(dot_general=dot_general), {})
    )
    assert close(mine(X), theirs(X))


def test_attention():
    dot_general = layers.switchback_dot_general()
    mine = nn.MultiHeadDotProductAttention(
        2, qkv_dot_general=dot_general, out_dot_general=dot_general
    )
    params = mine.init(KEY, X)
    want = nn.MultiHeadDotProductAttention(2).apply(params, X)
    assert close(mine.apply(params, X), want)
    mine, theirs = (
        nnx.MultiHeadAttention(2, 8, **how, decode=False, rngs=nnx.Rngs(0))
        for how in (dict(qkv_dot_general=dot_general, out_dot_general=dot_general), {})
    )
    assert close(mine(X), theirs(X))


# ---- LayerScale ----------------------------------------------------------------------------------
def test_layer_scale_is_0_at_first_and_trains():
    x, target = X[0], jnp.sin(X[0])
    module = of_linen.LayerScale()
    y, variables = module.init_with_output(KEY, x)
    assert not y.any() and variables["params"]["scale"].shape == (8,)

    def loss(variables):
        return ((x + module.apply(variables, jnp.tanh(x)) - target) ** 2).mean()

    stepped = jax.tree.map(lambda p, g: p - 0.5 * g, variables, jax.grad(loss)(variables))
    assert loss(stepped) < loss(variables) and stepped["params"]["scale"].all()

    layer = layers.LayerScale(8)
    assert not layer(x).any()
    gradient = nnx.grad(lambda layer: ((x + layer(jnp.tanh(x)) - target) ** 2).mean())(layer)
    np.testing.assert_allclose(
        gradient["scale"][...], jax.grad(loss)(variables)["params"]["scale"], rtol=1e-5
    )


def test_layer_scale_arguments():
    for made in (
        of_linen.LayerScale(0.5, param_dtype=jnp.bfloat16).init_with_output(KEY, X)[0],
        layers.LayerScale(8, init_value=0.5, param_dtype=jnp.bfloat16)(X),
    ):
        np.testing.assert_array_equal(made, 0.5 * X)
    half = X.astype(jnp.bfloat16)
    for dtype, want in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        module = of_linen.LayerScale(dtype=dtype)
        assert module.init_with_output(KEY, half)[0].dtype == want
        assert layers.LayerScale(8, dtype=dtype)(half).dtype == want
