"""Train low-rank adapters beside a frozen matrix in 4 bits (QLoRA)."""

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from optax_lowmem.layers import nf4


def loss_fn(adapters, base, x, y):
    update = (x @ adapters["a"].astype(x.dtype)) @ adapters["b"].astype(x.dtype)
    return jnp.mean((nf4.matmul(x, base) + update - y).astype(jnp.float32) ** 2)


def main(steps: int = 100) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 4)
    kernel = jax.random.normal(keys[0], (128, 128)) / 11
    base = nf4.quantize(kernel)  # frozen
    x = jax.random.normal(keys[1], (256, 128), jnp.bfloat16)
    y = x @ (kernel + jnp.outer(*jax.random.normal(keys[2], (2, 128))) / 50).astype(x.dtype)
    tx = lowmem.flash_adamw(1e-2)
    adapters = {"a": jax.random.normal(keys[3], (128, 8)) / 11, "b": jnp.zeros((8, 128))}
    adapters, state = lowmem.init(tx, adapters)

    @jax.jit
    def train_step(adapters, state):
        loss, grads = jax.value_and_grad(loss_fn)(adapters, base, x, y)
        return *lowmem.step(tx, grads, state, adapters), loss

    losses = []
    for _ in range(steps):
        adapters, state, loss = train_step(adapters, state)
        losses.append(float(loss))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
