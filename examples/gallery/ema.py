"""Average the weights of a run, and evaluate with the average."""

import jax
from _mlp import loss_fn, start

import optax_lowmem as lowmem


def main(steps: int = 60) -> tuple[float, float]:
    params_f32, x, y = start()
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
