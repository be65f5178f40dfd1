"""Flax Linen on a mesh: a whole TrainState laid out by the names in its boxes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import meta
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem.sharding import state_shardings
from tests.compilation import SAME_BITS
from tests.integration_cases import (
    MESH,
    MLP,
    RATE,
    assert_close,
    lies,
    mesh_of,
    run,
    starting,
    train_step,
)


# ---- Linen: every array of a TrainState goes where its box says ----------------------------------
@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_names_that_arrays_of_another_shape_keep(box):
    """Of an axis of groups where any mesh axis up to 64 that divides the parameter divides it."""
    for width in (96, 2048, 2050, 3072, 3 * 2048, 4096, 5120, 131072):
        layer = nn.Dense(width, kernel_init=box(nn.initializers.ones, ("x", "y")), use_bias=False)
        params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 128)))["params"]
        state = jax.eval_shape(lowmem.flash_adamw(RATE).init, params)
        scale, mu = state.mu_scale["kernel"], state.mu["kernel"]
        assert type(scale) is type(params["kernel"])
        assert (mu.names, state.correction["kernel"].names) == (("x", "y"), ())
        assert scale.names == ("x", "y" if width % 2048 == 0 else None)
        parts = [k for k in (*range(1, 65), 96, 192) if width % k == 0]
        assert scale.names[1] is None or all(scale.value.shape[1] % k == 0 for k in parts)
    thirds = lowmem.flash_adamw(RATE, storage=lowmem.Storage(group_size=48))  # 3 parts cut groups
    layer = nn.Dense(3072, kernel_init=box(nn.initializers.ones, ("x", "y")), use_bias=False)
    odd = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 128)))["params"]
    scale = jax.eval_shape(thirds.init, odd).mu_scale["kernel"]
    assert (scale.value.shape, scale.names) == ((128, 64), ("x", None))
    mini = jax.eval_shape(lowmem.flash_adam_mini(RATE).init, odd)
    assert (mini.nu["kernel"].value.shape, mini.nu["kernel"].names) == ((1, 3072), (None, "y"))


WRAPPED = {
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "accumulate": lambda tx: lowmem.accumulate_gradients(tx, 2, "bfloat16"),
    "ema": lambda tx: lowmem.track_master_ema(tx, 0.9),
    "inject": lambda tx: optax.inject_hyperparams(lowmem.flash_adamw, hyperparam_dtype=jnp.float32)(
        RATE
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_boxes_in_wrappers(wrapper):
    """A step leaves the state's structure alone, names in it too, and each array fits its box."""
    tx = WRAPPED[wrapper](lowmem.flash_adamw(RATE))
    params = jax.eval_shape(starting(train_state.TrainState, MLP(), tx), jax.random.key(0)).params
    state = jax.eval_shape(tx.init, params)
    for step in (tx.update, functools.partial(lowmem.step, tx)):
        made = jax.eval_shape(step, params, state, params)
        new = made[1]
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert jax.tree.structure(made[0]) == jax.tree.structure(params)

    def fits(sharding, box):
        return [sharding.shard_shape(x.shape) for x in jax.tree.leaves(box)]  # else an error

    assert len(jax.tree.leaves(jax.tree.map(fits, nn.get_sharding(state, MESH()), state))) > 8


def test_boxes_of_a_converted_state():
    plain, links = optax.adamw(RATE), dict(mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt())
    for tx in (lowmem.flash_adamw(RATE), lowmem.compress_state(optax.adamw(RATE), **links)):
        params = starting(train_state.TrainState, MLP(), plain)(jax.random.key(0)).params
        weights, state = checkpoint.from_optax(tx, plain.init(params), params, jnp.float32)
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
        _, back = checkpoint.to_optax(tx, state, weights, plain)
        assert jax.tree.structure(back) == jax.tree.structure(plain.init(params))


# ---- MaxText: logical axes, rules, scanned layers, unboxed after init ----------------------------
RULES = (("layers", None), ("embed", "fsdp"), ("mlp", "tensor"), ("batch", "fsdp"))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.initializers.variance_scaling(0.1, "fan_in", "normal")
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        h = nn.LayerNorm(use_bias=False, scale_init=ones)(x)
        h = nn.with_logical_constraint(nn.gelu(nn.Dense(128, False, kernel_init=up)(h)),
                                       ("batch", "mlp"))  # fmt: skip
        return x + nn.Dense(64, False, kernel_init=down)(h), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={meta.PARTITION_NAME: "layers"},
        )
        return layers(name="layers")(x, None)[0]


@pytest.mark.parametrize(
    "name", ["flash_adamw", pytest.param("flash_lion", marks=pytest.mark.full)]
)
def test_logical_axes(name):
    tx = getattr(lowmem, name)(3e-3 if name == "flash_lion" else RATE)
    mesh = mesh_of(fsdp=4, tensor=2)
    init = starting(train_state.TrainState, Decoder(), tx)
    with nn.logical_axis_rules(RULES):
        logical = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
        shardings = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        state = nn.unbox(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))
        for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert lies(x, sharding)
        kernel = state.params["layers"]["Dense_0"]["kernel"]
        assert kernel.sharding.spec == P(None, "fsdp", "tensor")
        step = jax.jit(
            train_step,
            in_shardings=(shardings, None, None),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=SAME_BITS,
        )
        found = run(step, state)
    alone = nn.unbox(jax.jit(init)(jax.random.key(0)))
    wanted = run(jax.jit(train_step, compiler_options=SAME_BITS), alone)
    assert_close(found, wanted)


def test_boxes_on_a_set_mesh():
    """`state_shardings` shards as an opened box would; an array without a box is replicated."""
    params = jax.eval_shape(starting(train_state.TrainState, MLP(), optax.sgd(1.0)),
                            jax.random.key(0)).params  # fmt: skip
    with jax.set_mesh(MESH()):
        found = state_shardings(lowmem.flash_lion(RATE, storage=lowmem.Storage(None)), params)
    assert found.mu["Dense_0"]["kernel"].spec == P("data", "model")
    assert found.mu["Dense_1"]["bias"].spec == P(None)
