"""Checkpoints of Flax's objects: one line each way, and the bits of a run that never stopped."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
import optax_lowmem.flax as ours
from optax_lowmem import checkpoint
from optax_lowmem._src.arrays.array_metadata import pure
from tests import contract_cases as cases
from tests.checkpoint_cases import assert_same_bits
from tests.meshes import mesh_of

SMALL = lowmem.Storage(policy=cases.POLICY)
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def adamw(**options):
    return lowmem.flash_adamw(1e-2, storage=SMALL, **options)


def lion():
    return lowmem.flash_lion(1e-2, storage=SMALL)


TXS = {
    "accumulate, ema": lambda: lowmem.accumulate_gradients(
        lowmem.track_master_ema(adamw(), 0.9), 2
    ),
    "MultiSteps": lambda: optax.MultiSteps(lion(), 2),
    "masked": lambda: optax.masked(lion(), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}


class Net(nnx.Module):
    """Parameters, statistics, a LoRA and random streams."""

    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.LoRALinear(64, 64, lora_rank=2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))


def nnx_objects(tx, cls=ours.Optimizer, wrt=nnx.Param, seed=0, **options):
    model = Net(nnx.Rngs(seed))
    optimizer = cls(model, tx, wrt=wrt, **options)
    return (optimizer,) if cls is nnx.ModelAndOptimizer else (model, optimizer)


@nnx.jit
def nnx_step(*objects):
    model = objects[0].model if len(objects) == 1 else objects[0]
    loss = lambda model: jnp.mean((model(X) - X) ** 2)  # noqa: E731
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, objects[-1].wrt))(model)
    objects[-1].update(*objects[:-1], grads)


def arrays(objects):
    """Every array of objects, of random keys their data."""
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    states = [nnx.to_pure_dict(nnx.state(thing)) for thing in objects]
    return jax.tree.map(lambda x: jax.random.key_data(x) if key(x) else x, states)


CASES = {
    "flash_adamw": {},
    "accumulate, ema": {"dtype": jnp.bfloat16},
    "MultiSteps": {"cls": nnx.Optimizer},
    "masked": {"cls": nnx.ModelAndOptimizer},
    "LoRA": {"wrt": nnx.LoRAParam},
}


@pytest.mark.parametrize("name", CASES)
def test_nnx_objects_go_on(name, tmp_path):
    start = lambda seed: nnx_objects(TXS.get(name, adamw)(), seed=seed, **CASES[name])  # noqa: E731
    objects = start(0)
    for _ in range(3):
        nnx_step(*objects)
    checkpoint.save(tmp_path, *objects)
    resumed = start(1)
    assert checkpoint.restore(tmp_path, *resumed) is None
    assert checkpoint.latest_step(tmp_path) == int(resumed[-1].step[...]) == 3
    assert_same_bits(arrays(resumed), arrays(objects))
    nnx_step(*objects), nnx_step(*resumed)
    assert_same_bits(arrays(resumed), arrays(objects))


class WithKey(ours.TrainState):
    key: jax.Array


def linen(cls=ours.TrainState, seed=0, fp8=False, **fields):
    model = nn.Dense(32)
    params = model.init(jax.random.key(seed), X)["params"]
    if fp8:
        params = {"params": params, "_overwrite_with_gradient": {"amax": jnp.full(3, 1.0 + seed)}}
    return cls.create(apply_fn=model.apply, params=params, tx=adamw(), **fields)


STATES = {
    "ours": lambda seed: linen(seed=seed, dtype=jnp.bfloat16),
    "Flax's": lambda seed: linen(train_state.TrainState, seed),
    "fp8": lambda seed: linen(seed=seed, fp8=True),
    "key": lambda seed: linen(WithKey, seed, key=jax.random.key(seed)),
}


@pytest.mark.parametrize("name", STATES)
def test_train_states_go_on(name, tmp_path):
    step = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    state = step(STATES[name](0))
    checkpoint.save(tmp_path, state)
    for target in STATES[name](1), jax.eval_shape(STATES[name], 1):
        resumed = checkpoint.restore(tmp_path, target)
        assert resumed.step == state.step == 1 and resumed.tx is target.tx
        keys = [getattr(s, "key", jax.random.key(0)) for s in (state, resumed)]
        assert_same_bits(*map(jax.random.key_data, keys))
        assert_same_bits(resumed.opt_state, state.opt_state)
        assert_same_bits(step(resumed).params, step(state).params)


def test_nnx_objects_move_to_another_mesh(tmp_path):
    def start(seed, **axes):
        with jax.set_mesh(mesh_of(**axes)):
            model = nnx.Linear(64, 64, kernel_metadata={"out_sharding": (None, "x")},
                               bias_metadata={"out_sharding": ()}, rngs=nnx.Rngs(seed))  # fmt: skip
            return model, ours.Optimizer(model, adamw(), wrt=nnx.Param)

    objects, resumed = start(0, x=2), start(1, x=4)
    expected = arrays(objects)
    checkpoint.save(tmp_path, *objects, step=5)
    checkpoint.restore(tmp_path, *resumed, step=5)
    assert_same_bits(arrays(resumed), expected)
    for leaf in jax.tree.leaves(arrays(resumed)):
        assert leaf.sharding.mesh.shape == {"x": 4}
    assert resumed[1].opt_state.mu["kernel"].sharding.spec == P(None, "x")


def test_what_is_refused(tmp_path):
    model, optimizer = nnx_objects(adamw())
    for things in [(model,), (model, adamw()), (optimizer, model), ({"w": X}, {"w": X})]:
        with pytest.raises(TypeError, match="NNX model with its nnx.Optimizer"):
            checkpoint.save(tmp_path, *things)
    params, state = nnx.state(model, nnx.Param), optimizer.opt_state
    cure = r"checkpoint.save\(path, model, optimizer\)"
    for things in (params, state), (model, optimizer), (pure(params), nnx.state(optimizer)):
        with pytest.raises((TypeError, ValueError), match=cure):
            checkpoint.save(tmp_path, adamw(), *things, step=1)
    checkpoint.save(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match=r"checkpoint.restore\(path, model, optimizer\)"):
        checkpoint.restore(tmp_path, adamw(), params)
    other = Net(nnx.Rngs(jax.random.key(0, impl="rbg")))
    with pytest.raises(ValueError, match="rbg.*fry"):
        checkpoint.restore(tmp_path, other, ours.Optimizer(other, adamw(), wrt=nnx.Param))
