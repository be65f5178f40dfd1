"""Average the weights of a run, and evaluate with the average."""

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
    tx = lowmem.track_master_ema(lowmem.flash_adamw(3e-3), decay=0.9)
    params, state = lowmem.init(tx, params_f32)

    @jax.jit
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *lowmem.step(tx, grads, state, params), loss

    for _ in range(steps):
        params, state, _ = train_step(params, state)
    return float(loss_fn(params_f32, x, y)), float(loss_fn(lowmem.ema_params(state), x, y))


if __name__ == "__main__":
    print("loss before training, and of the averaged weights:", *main())
