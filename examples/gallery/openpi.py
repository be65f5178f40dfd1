"""Fine-tune a small pi0 as openpi does: AdamW, clipping, EMA of 0.99, parts frozen by a regex."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _pi0 import language, loss_fn, projections, vision

import optax_lowmem as lowmem

GEMMA = ".*llm(?!.*_1).*"  # not the action expert


def optimizer(rate, paths, frozen):
    """openpi's optimizer; frozen parameters have neither moments nor an average."""
    labels = {path: "frozen" if re.fullmatch(frozen, path) else "trained" for path in paths}
    adamw = lowmem.flash_adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-10)
    tx = lowmem.chain(optax.clip_by_global_norm(1.0), adamw)
    tx = lowmem.track_master_ema(tx, decay=0.99)
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def planned(frozen: str = "") -> tuple[float, float]:
    """GiB of pi0's weights, state, average and gradients: in openpi, and here."""
    shapes = language() | vision() | projections()
    params = {path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape in shapes.items()}
    trained = sum(p.size for path, p in params.items() if not re.fullmatch(frozen, path))
    rest = sum(p.size for p in params.values()) - trained
    here = lowmem.memory.report(optimizer(1e-5, shapes, frozen), params).total_bytes + 2 * trained
    return (20 * trained + 4 * rest) / 2**30, here / 2**30  # f32; frozen ones twice, in bf16


def main(steps: int = 120) -> tuple[float, float]:
    small = dict(depth=1, widths=(64, 32), hidden=(128, 64), heads=4, size=16, words=64)
    shapes = language(**small) | projections(width=32, actions=8)
    rng = np.random.default_rng(0)
    params_f32 = {path: rng.normal(0, 1 / 8, shape) for path, shape in shapes.items()}
    params_f32 = jax.tree.map(jnp.float32, params_f32)
    prompt, state = rng.integers(0, 64, (16, 6)), rng.normal(size=(16, 8))
    batch = prompt, jnp.float32(state), jnp.ones((16, 5, 8))  # the action is to stand still
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, steps)
    tx = optimizer(schedule, shapes, GEMMA)
    params, opt_state = lowmem.init(tx, params_f32, allow_rounding=True)  # frozen ones to bf16

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, opt_state, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch, key)
        return *lowmem.step(tx, grads, opt_state, params), loss

    first, keys = None, jax.random.split(jax.random.key(0), steps)
    for key in keys:
        params, opt_state, loss = train_step(params, opt_state, key)
        first = first or float(loss)
    averages = lowmem.ema_params(opt_state)  # MaskedNode() for each frozen parameter
    averaged = {p: params[p] if re.fullmatch(GEMMA, p) else averages[p] for p in params}
    return first, float(jax.jit(loss_fn)(averaged, *batch, keys[0]))


if __name__ == "__main__":
    for frozen in ("", GEMMA):
        openpi, here = planned(frozen)
        print(f"pi0, frozen {frozen or 'nothing'}: {here:.1f} GiB instead of {openpi:.1f}")
    print("loss at the first step, and of the averaged weights:", *main())
