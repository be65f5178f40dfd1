"""Update each layer inside the backward pass: the gradients of one layer exist at a time."""

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from optax_lowmem import release


def loss_fn(params, batch):
    x, y = batch

    def layer(hidden, weights):
        return hidden + jax.nn.tanh(hidden @ weights.astype(x.dtype)), None

    hidden, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((hidden @ params["head"].astype(x.dtype) - y) ** 2)


def main(steps: int = 40) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 3)
    params_f32 = {
        "layers": jax.random.normal(keys[0], (4, 64, 64)) / 16,
        "head": jnp.zeros((64, 64)),
    }
    x = jax.random.normal(keys[1], (256, 64))
    batch = x, jnp.tanh(x @ jax.random.normal(keys[2], (64, 64)) / 8)
    tx = lowmem.flash_adamw(3e-3)
    params, state = lowmem.init(tx, params_f32)
    train_step = jax.jit(release.train_step(tx, loss_fn), donate_argnums=(0, 1))
    losses = []
    for _ in range(steps):
        loss, params, state = train_step(params, state, batch)
        losses.append(float(loss))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
