"""Add up the gradients of micro-batches in bf16, with clipping and a schedule."""

import jax
import optax
from _mlp import loss_fn, start

import optax_lowmem as lowmem


def main(steps: int = 60, micro_batches: int = 4) -> tuple[float, float]:
    params_f32, x, y = start()
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
