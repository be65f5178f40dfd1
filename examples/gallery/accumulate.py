"""Add up the gradients of micro-batches in bf16, with clipping and a schedule."""

import jax
import jax.numpy as jnp
import optax

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


def main(steps: int = 60, micro_batches: int = 4) -> tuple[float, float]:
    params_f32, x, y = make_problem()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, steps)
    tx = lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(schedule))
    params, state = lowmem.init(tx, params_f32)
    mean_gradient = lowmem.value_and_grad(lambda p, batch: loss_fn(p, *batch), micro_batches)

    @jax.jit
    def train_step(params, state, step):
        loss, grads = mean_gradient(params, (x, y), step)  # the step is the seed
        return *lowmem.step(tx, grads, state, params), loss

    losses = []
    for i in range(steps):
        params, state, loss = train_step(params, state, i)
        losses.append(float(loss))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
