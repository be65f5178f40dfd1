"""Shard weights and state over all devices (FSDP); `XLA_FLAGS` below simulates eight on a CPU."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from _mlp import loss_fn, start
from jax.sharding import NamedSharding, PartitionSpec

import optax_lowmem as lowmem


def main(steps: int = 40) -> tuple[float, float]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params_f32, x, y = jax.device_put(start(), rows)  # each device has some rows of each array
    tx = lowmem.flash_adamw(3e-3)
    params, state = lowmem.init(tx, params_f32)  # sharded like the weights

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *lowmem.step(tx, grads, state, params), loss

    losses = []
    with jax.set_mesh(mesh):
        for _ in range(steps):
            params, state, loss = train_step(params, state)
            losses.append(float(loss))
    assert params["w1"].sharding.is_equivalent_to(rows, 2)
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
