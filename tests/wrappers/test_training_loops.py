"""Loops as other programs write them, with the optimizer exchanged: the loss is that of optax.

Equinox, Optimistix, Haiku, Brax and NumPyro run their own in `test_packages`; Flax and Orbax are in
`test_integrations`, `test_integrations_loops` and `test_flax`. PureJaxRL, EasyLM and MaxText are
programs, not packages to install: here is what each does with an optimizer, and nothing else of it.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import optax_lowmem as lowmem
from tests.loop_cases import (
    RATE,
    SCHEDULE,
    STEPS,
    WIDTHS,
    assert_learns_as_optax,
    compressed,
    data,
    exchanged,
)
from tests.tolerances import LOSS_OF_LOOPS


def initial() -> dict[str, dict[str, jax.Array]]:
    """f32 parameters, a dictionary a layer."""
    rng = np.random.default_rng(1)
    return {
        f"mlp/~/linear_{i}": {
            "w": jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), jnp.float32),
            "b": jnp.zeros(m),
        }
        for i, (n, m) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False))
    }


def loss_of(params: Any) -> jax.Array:
    x, y = data()
    layers = list(params.values())
    for i, layer in enumerate(layers):
        x = x.astype(layer["w"].dtype) @ layer["w"] + layer["b"][None]
        x = jnp.tanh(x) if i + 1 < len(layers) else x
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


# ---- the loops: (optimizer, parameters, state) -> parameters of the last step --------------------


def purejaxrl(tx, params, state):
    """PureJaxRL: Flax's `TrainState` inside nested scans over epochs and minibatches."""
    holder = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    def minibatch(holder, _):
        return holder.apply_gradients(grads=jax.grad(loss_of)(holder.params)), None

    def epoch(holder, _):
        return jax.lax.scan(minibatch, holder, None, 4)[0], None

    run = jax.jit(lambda h: jax.lax.scan(epoch, h, None, STEPS // 4)[0])
    return run(holder.replace(opt_state=state)).params


def easylm(tx, params, state):
    """EasyLM, MaxText: gradients in f32 whatever the weights are, a donated step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss_of)(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.array, (params, state))
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


# ---- the optimizers: how each loop makes one -----------------------------------------------------

MASK = jax.tree.map(lambda p: p.ndim > 1, jax.eval_shape(initial))
# loop, (library, options) -> optimizer
LOOPS = {
    "purejaxrl": (
        purejaxrl,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(0.5), adam(SCHEDULE, eps=1e-5, **how)
        ),
    ),
    "easylm": (
        easylm,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(1.0),
            adamw(SCHEDULE, weight_decay=0.1, mask=MASK, b2=0.95, **how),
        ),
    ),
}


@functools.cache
def of_optax(name: str) -> float:
    run, make = LOOPS[name]
    tx, params = make(optax.adam, optax.adamw), initial()
    return float(loss_of(run(tx, params, tx.init(params))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_with_the_optimizer_exchanged(name, dtype):
    run, make = LOOPS[name]
    tx = exchanged(make, dtype, {})
    params, state = lowmem.init(tx, initial(), dtype)
    assert len(compressed(state)) == 2
    start = float(loss_of(params))
    end = run(tx, params, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(end)} == {jnp.dtype(dtype)}
    assert_learns_as_optax(float(loss_of(end)), start, of_optax(name))


def test_linen_and_its_apply():
    """Flax's own example loop, lm1b and gemma: `TrainState.create`, `apply_gradients`."""

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTHS[2])(nn.tanh(nn.Dense(WIDTHS[1])(x)))

    x, y = data()

    def trained(tx):
        params = MLP().init(jax.random.key(0), x)["params"]
        state = train_state.TrainState.create(apply_fn=MLP().apply, params=params, tx=tx)

        @jax.jit
        def step(state, _):
            loss = lambda p: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        return float(jax.lax.scan(step, state, None, STEPS)[1][-1])

    plain = trained(optax.adamw(RATE, 0.9, 0.98, 1e-9, weight_decay=1e-1))
    found = trained(lowmem.flash_adamw(RATE, 0.9, 0.98, 1e-9, weight_decay=1e-1))
    assert abs(found - plain) <= LOSS_OF_LOOPS * plain
