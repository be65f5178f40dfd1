"""Shard weights and state over all devices (FSDP); `XLA_FLAGS` below simulates eight on a CPU."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem


def make_problem():
    """f32 weights of a network, inputs, and targets that another network makes."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w1": jax.random.normal(keys[0], (64, 256)) / 8, "w2": jnp.zeros((256, 64))}
    x = jax.random.normal(keys[1], (256, 64))
    return params, x, jnp.tanh(x @ jax.random.normal(keys[2], (64, 64)) / 8)


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"].astype(x.dtype))
    return jnp.mean((hidden @ params["w2"].astype(x.dtype) - y) ** 2)


def main(steps: int = 40) -> tuple[float, float]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    # each device has some rows of each array
    params_f32, x, y = jax.device_put(make_problem(), rows)
    tx = lowmem.flash_adamw(3e-3)
    params, state = lowmem.init(tx, params_f32)  # sharded like the weights

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *lowmem.step(tx, grads, state, params), loss

    losses = []
    for _ in range(steps):
        params, state, loss = train_step(params, state)
        losses.append(float(loss))
    assert params["w1"].sharding.is_equivalent_to(rows, 2)
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
