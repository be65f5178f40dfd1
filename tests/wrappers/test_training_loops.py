"""Loops as other packages write them, with the optimizer exchanged: the loss is that of optax.

Flax and Orbax are in `test_integrations`, `test_integrations_loops` and `test_flax`. Equinox, Brax,
Haiku, NumPyro, Optimistix and the programs built on them are not among the packages of the tests:
here is what each does with an optimizer, and nothing else of it.
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
from optax_lowmem import Storage
from tests.tiers import in_turn
from tests.tolerances import LOSS_OF_LOOPS

STEPS, RATE = 60, 3e-3
WIDTHS = (64, 128, 64)  # both kernels have 8192 elements: they are compressed


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    """More examples than the model can learn by heart, with noise: the loss has a floor."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, WIDTHS[0]))
    teacher = rng.normal(size=(WIDTHS[0], WIDTHS[-1])) / 8
    y = np.tanh(x @ teacher) + rng.normal(0, 0.3, (256, WIDTHS[-1]))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def initial() -> dict[str, dict[str, jax.Array]]:
    """f32 parameters, in Haiku's form."""
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


def haiku(tx, params, state):
    """Haiku, RLax, Brax's `gradient_update_fn`: no parameters are passed to `update`."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_of)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def equinox(tx, params, state):
    """`eqx.apply_updates` adds without a cast; what is no array is None in gradients too."""
    static = {"activation": None}

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: loss_of({k: v for k, v in p.items() if k != "static"}))(params)
        updates, state = tx.update(grads, state, params)
        none = lambda node: node is None  # noqa: E731
        added = lambda u, p: p if u is None else p + u  # noqa: E731
        return jax.tree.map(added, updates, params, is_leaf=none), state

    params, state = {**params, "static": static}, None
    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return {key: value for key, value in params.items() if key != "static"}


def numpyro(tx, params, state):
    """`optax_to_numpyro`: parameters are kept in the optimizer's state, in a scan (`SVI.run`)."""

    def update(carry, _):
        i, (params, state) = carry
        value, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return (i + 1, (optax.apply_updates(params, updates), state)), value

    run = jax.jit(lambda carry: jax.lax.scan(update, carry, None, STEPS))
    (_, (params, _)), _ = run((jnp.array(0), (params, state)))
    return params


def optimistix(tx, params, state):
    """`OptaxMinimiser`: a while loop over flat leaves, loss and gradients as extra arguments."""
    treedef = jax.tree.structure(params)

    def body(carry):
        i, leaves, state = carry
        params = treedef.unflatten(leaves)
        value, grads = jax.value_and_grad(loss_of)(params)
        more = {"value": value, "grad": grads, "value_fn": loss_of}
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **more)
        new = jax.tree.map(lambda p, u: p + u, params, updates)
        return i + 1, jax.tree.leaves(new), state

    run = jax.jit(lambda c: jax.lax.while_loop(lambda carry: carry[0] < STEPS, body, c))
    return treedef.unflatten(run((0, jax.tree.leaves(params), state))[1])


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
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, RATE, 5, STEPS)
# loop, (library, options) -> optimizer, options that the loop's way of adding asks for
LOOPS = {
    "haiku": (haiku, lambda adam, adamw, **how: adam(RATE, **how), {"master_weight_bits": None}),
    "brax": (
        haiku,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(0.1), adam(RATE, **how)
        ),
        {"master_weight_bits": None},
    ),
    "equinox": (equinox, lambda adam, adamw, **how: adamw(RATE, **how), {"update_dtype": "param"}),
    "numpyro": (numpyro, lambda adam, adamw, **how: adam(SCHEDULE, **how), {}),
    "optimistix": (
        optimistix, lambda adam, adamw, **how: adamw(RATE, **how), {"update_dtype": "param"}
    ),
    "purejaxrl": (
        purejaxrl,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(0.5), adam(SCHEDULE, eps=1e-5, **how)
        ),
        {},
    ),
    "easylm": (
        easylm,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(1.0),
            adamw(SCHEDULE, weight_decay=0.1, mask=MASK, b2=0.95, **how),
        ),
        {},
    ),
}  # fmt: skip


@functools.cache
def of_optax(name: str) -> float:
    run, make, _ = LOOPS[name]
    tx, params = make(optax.adam, optax.adamw), initial()
    return float(loss_of(run(tx, params, tx.init(params))))


@pytest.mark.parametrize("name, dtype", in_turn(LOOPS, ["float32", "bfloat16"]))
def test_a_loop_with_the_optimizer_exchanged(name, dtype):
    run, make, options = LOOPS[name]
    storage = Storage(**({} if dtype == "float32" else options))
    tx = make(lowmem.flash_adam, lowmem.flash_adamw, storage=storage)
    params, state = lowmem.init(tx, initial(), dtype)
    codes = [x for x in jax.tree.leaves(optax.tree.get(state, "mu")) if x.dtype == jnp.int8]
    assert len(codes) == 2
    start = float(loss_of(params))
    end = run(tx, params, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(end)} == {jnp.dtype(dtype)}
    found = float(loss_of(end))
    assert of_optax(name) < 0.5 * start
    assert abs(found - of_optax(name)) <= LOSS_OF_LOOPS * of_optax(name)


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
