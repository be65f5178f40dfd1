"""Train with Muon: its matrices take 4.06 bytes per parameter, weight included."""

import jax
import jax.numpy as jnp

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


def main(steps: int = 60) -> tuple[float, float]:
    params_f32, x, y = make_problem()
    # consistent_rms=0.2: with AdamW's learning rate
    tx = lowmem.flash_muon(3e-3, consistent_rms=0.2, weight_decay=0.01)
    params, state = lowmem.init(tx, params_f32)

    @jax.jit
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *lowmem.step(tx, grads, state, params), loss

    losses = []
    for _ in range(steps):
        params, state, loss = train_step(params, state)
        losses.append(float(loss))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
