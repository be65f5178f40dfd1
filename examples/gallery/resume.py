"""Save a run, and go on from it in another process with the same bits."""

import tempfile

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from optax_lowmem import checkpoint


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
    params_f32, x, y = make_problem()
    tx = lowmem.flash_adamw(3e-3)

    @jax.jit
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *lowmem.step(tx, grads, state, params), loss

    params, state = lowmem.init(tx, params_f32)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(steps):
            if i == steps // 2:
                checkpoint.save(folder, tx, params, state, step=i)
                params, state = checkpoint.restore(folder, tx, params)  # as after a restart
            params, state, loss = train_step(params, state)
            losses.append(float(loss))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
