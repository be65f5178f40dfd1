"""A small Equinox model with `lowmem.step`: FSDP, Equinox's files."""

import common  # isort: skip

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem

MESH = jax.make_mesh((common.DEVICES,), ("data",), axis_types=(AxisType.Auto,))
TOKENS = common.tokens(8, 32, 256)


def sharding_of(weight):
    return NamedSharding(MESH, P("data") if weight.ndim > 1 else P())


def start(tx, dtype):
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.Sequential([
        eqx.nn.Embedding(256, 160, key=keys[0]),
        eqx.nn.MLP(160, 256, 320, depth=1, activation=jax.nn.gelu, key=keys[1]),
    ])  # fmt: skip
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params = jax.device_put(params, jax.tree.map(sharding_of, params))
    params, state = lowmem.init(tx, params, dtype, allow_rounding=True)
    state = jax.device_put(state, lowmem.sharding.state_shardings(tx, params))
    return eqx.combine(params, static), state


def step_of(tx):
    def loss_fn(model):
        logits = jax.vmap(jax.vmap(model))(TOKENS[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits.astype(jnp.float32), TOKENS[:, 1:]).mean()

    @eqx.filter_jit(donate="all")
    def train_step(model, state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, state = lowmem.step(tx, grads, state, params)
        return eqx.combine(params, static), state, loss

    return train_step


def train(impl):
    make = optax.adamw if impl == common.PLAIN else lowmem.flash_adamw
    tx = make(10 * common.RATE)  # a model without attention learns slowly
    model, state = start(tx, common.DTYPES[impl])
    train_step, losses = step_of(tx), []
    for _ in range(common.STEPS):
        model, state, loss = train_step(model, state)
        losses.append(float(loss))
    params = eqx.filter(model, eqx.is_inexact_array)
    return losses, (params, state), sum(w.size for w in jax.tree.leaves(params))


def resumes():
    """Through Equinox's files."""
    tx = lowmem.flash_adamw(common.RATE)
    train_step = step_of(tx)
    run = train_step(*start(tx, jnp.bfloat16))[:2]
    like = start(tx, jnp.bfloat16)
    shardings = jax.tree.map(lambda x: x.sharding, eqx.filter(like, eqx.is_array))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.eqx"
        eqx.tree_serialise_leaves(path, run)
        restored = eqx.tree_deserialise_leaves(path, like)  # on one device
    restored = eqx.filter_shard(restored, shardings)
    whole, resumed = train_step(*run), train_step(*restored)
    common.assert_same_bits(*(eqx.filter(one, eqx.is_array) for one in (whole, resumed)))


if __name__ == "__main__":
    common.compare("equinox", train)
    resumes()
