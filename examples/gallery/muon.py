"""Train with Muon: its matrices take 4.06 bytes per parameter, weight included."""

import jax
from _mlp import loss_fn, start

import optax_lowmem as lowmem


def main(steps: int = 60) -> tuple[float, float]:
    params_f32, x, y = start()
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
