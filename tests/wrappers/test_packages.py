"""Programs of other packages' users, run by those packages, with optax's optimizer exchanged.

Flax and Orbax are in `test_integrations`, `test_integrations_loops` and `test_flax`. PureJaxRL is
no package to install: here is what it does with an optimizer, and nothing else of it.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.checkpoint_cases import assert_same_bits
from tests.tiers import rows
from tests.tolerances import LOSS_OF_LOOPS

STEPS, RATE = 60, 3e-3
WIDTHS = (64, 128, 64)  # both kernels have 8192 elements: they are compressed
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, RATE, 5, STEPS)


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    """More examples than the model can learn by heart, with noise: the loss has a floor."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, WIDTHS[0]))
    teacher = rng.normal(size=(WIDTHS[0], WIDTHS[-1])) / 8
    y = np.tanh(x @ teacher) + rng.normal(0, 0.3, (256, WIDTHS[-1]))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


@pytest.fixture(autouse=True)
def as_users_do():
    """Packages broadcast; only the library is held to explicit ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


class Trained(NamedTuple):
    """Results of a program; `losses` are those at its start and at its end."""

    losses: tuple[Any, Any]
    params: Any
    state: Any


def begun(tx, params, dtype):
    """Return the first parameters and state; 16-bit weights as the README makes them."""
    return (params, tx.init(params)) if dtype == "float32" else lowmem.init(tx, params, dtype)


def error(found, y):
    return jnp.mean((found.astype(jnp.float32) - y) ** 2)


# ---- the programs: (optimizer, dtype of the weights) -> Trained ----------------------------------


def equinox(tx, dtype):
    """`filter_jit`, `filter_value_and_grad`, `apply_updates`, which adds without a cast.

    The activation is a leaf of the model: it is None in parameters, gradients and state.
    """
    import equinox as eqx

    x, y = data()
    model = eqx.nn.MLP(
        WIDTHS[0], WIDTHS[-1], WIDTHS[1], 1, activation=jnp.tanh, key=jax.random.key(1)
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params, state = begun(tx, params, dtype)
    model = eqx.combine(params, static)

    def loss_of(model):
        return error(jax.vmap(model)(x), y)

    @eqx.filter_jit(donate="all")
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    start = eqx.filter_jit(loss_of)(model)
    for _ in range(STEPS):
        model, state, _ = step(model, state)
    return Trained(
        (start, eqx.filter_jit(loss_of)(model)), eqx.filter(model, eqx.is_inexact_array), state
    )


def optimistix(tx, dtype):
    """`OptaxMinimiser`: the optimizer's closures become pytrees; it calls `tx.init` itself.

    `minimise` takes the weights as they are, so that 16-bit ones have been rounded before.
    """
    import optimistix as optx

    x, y = data()
    rng = np.random.default_rng(1)
    params = [
        (jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), dtype), jnp.zeros(m, dtype))
        for n, m in zip(WIDTHS, WIDTHS[1:], strict=False)
    ]

    def loss_of(params, args):
        (w, b), (v, c) = params
        x, y = args
        return error(jnp.tanh(x.astype(w.dtype) @ w + b) @ v + c, y)

    solver = optx.OptaxMinimiser(tx, rtol=0.0, atol=0.0)
    found = optx.minimise(loss_of, solver, params, (x, y), max_steps=STEPS, throw=False)
    assert found.stats["num_steps"] == STEPS
    losses = loss_of(params, (x, y)), loss_of(found.value, (x, y))
    return Trained(losses, found.value, found.state.opt_state)


def haiku_program(tx, dtype, with_params):
    """`transform` and a mixed precision policy; Haiku's own examples pass no parameters."""
    import haiku as hk
    import jmp

    x, y = data()
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP(WIDTHS[1:], activation=jnp.tanh)(x))
    )
    params, state = begun(tx, net.init(jax.random.key(1), x), dtype)
    policy = jmp.get_policy(f"params={dtype},compute={dtype},output=float32")

    def loss_of(params):
        with hk.mixed_precision.push_policy(hk.nets.MLP, policy):
            return error(net.apply(params, x), y)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, *([params] if with_params else []))
        return optax.apply_updates(params, updates), state, value

    first = None
    for _ in range(STEPS):
        params, state, value = step(params, state)
        first = value if first is None else first
    return Trained((first, jax.jit(loss_of)(params)), params, state)


def brax(tx, dtype):
    """`gradient_update_fn`, which passes no parameters, in a scan in a `pmap`, as in its PPO."""
    from brax.training import gradients, networks

    x, y = data()
    devices = jax.devices("cpu")[:2]
    split = lambda a: a.reshape(len(devices), -1, a.shape[-1])  # noqa: E731
    net = networks.MLP(layer_sizes=WIDTHS[1:], activation=jnp.tanh)
    params, state = begun(tx, net.init(jax.random.key(1), x), dtype)

    def loss_of(params, x, y):
        value = error(net.apply(params, x), y)
        return value, {"loss": value}

    update = gradients.gradient_update_fn(loss_of, tx, pmap_axis_name="i", has_aux=True)

    def epoch(params, state, x, y):
        def sgd_step(carry, _):
            params, state = carry
            (_, metrics), params, state = update(params, x, y, optimizer_state=state)
            return (params, state), jax.lax.pmean(metrics["loss"], "i")

        (params, state), losses = jax.lax.scan(sgd_step, (params, state), None, STEPS)
        return params, state, losses

    copied = jax.tree.map(lambda a: jnp.stack([a] * len(devices)), (params, state))
    run = jax.pmap(epoch, axis_name="i", devices=devices)
    *ended, losses = run(*copied, split(x), split(y))
    for leaf in jax.tree.leaves(ended):
        np.testing.assert_array_equal(*leaf)  # a device's state is that of every device
    params, state = jax.tree.map(lambda a: a[0], ended)
    return Trained((losses[0, 0], loss_of(params, x, y)[0]), params, state)


def numpyro(tx, dtype):
    """SVI of a Bayesian layer, which keeps (parameters, state) in a pair, as `lowmem.init`."""
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO, init_to_sample
    from numpyro.infer.autoguide import AutoNormal

    x, y = data()

    def model(x, y):
        prior = dist.Normal(0.0, jnp.full((WIDTHS[0], WIDTHS[-1]), WIDTHS[0] ** -0.5))
        w = numpyro.sample("w", prior.to_event(2))
        found = jnp.tanh((x.astype(w.dtype) @ w).astype(jnp.float32))
        numpyro.sample("y", dist.Normal(found, 0.3).to_event(2), obs=y)

    guide = AutoNormal(model, init_loc_fn=init_to_sample(), init_scale=0.02)
    svi = SVI(model, guide, numpyro.optim.optax_to_numpyro(tx), loss=Trace_ELBO())
    state = svi.init(jax.random.key(1), x, y)
    if dtype != "float32":
        i, (params, _) = state.optim_state
        state = state._replace(optim_state=(i, lowmem.init(tx, params, dtype)))
    ran = svi.run(None, STEPS, x, y, progress_bar=False, init_state=state)
    _, (params, opt_state) = ran.state.optim_state
    return Trained((ran.losses[0], ran.losses[-1]), params, opt_state)


def initial():
    """f32 parameters, a dictionary a layer."""
    rng = np.random.default_rng(1)
    return {
        f"mlp/~/linear_{i}": {
            "w": jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), jnp.float32),
            "b": jnp.zeros(m),
        }
        for i, (n, m) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False))
    }


def loss_of(params):
    x, y = data()
    first, last = params.values()
    hidden = jnp.tanh(x.astype(first["w"].dtype) @ first["w"] + first["b"])
    return error(hidden @ last["w"] + last["b"], y)


def purejaxrl(tx, dtype):
    """Flax's `TrainState` inside nested scans over epochs and minibatches."""
    from flax.training import train_state

    params, state = begun(tx, initial(), dtype)
    holder = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    def minibatch(holder, _):
        return holder.apply_gradients(grads=jax.grad(loss_of)(holder.params)), None

    def epoch(holder, _):
        return jax.lax.scan(minibatch, holder, None, 4)[0], None

    run = jax.jit(lambda h: jax.lax.scan(epoch, h, None, STEPS // 4)[0])
    end = run(holder.replace(opt_state=state))
    return Trained((loss_of(params), loss_of(end.params)), end.params, end.opt_state)


# ---- the optimizers: program, (library, options) -> optimizer, options of 16-bit weights ---------

PROGRAMS = {
    "equinox": (equinox, lambda adam, adamw, **how: adamw(RATE, **how), {"update_dtype": "param"}),
    "optimistix": (
        optimistix, lambda adam, adamw, **how: adamw(RATE, **how), {"update_dtype": "param"}
    ),
    "haiku": (
        functools.partial(haiku_program, with_params=False),
        lambda adam, adamw, **how: adam(RATE, **how),
        {"master_weight_bits": None},
    ),
    "haiku with parameters": (
        functools.partial(haiku_program, with_params=True),
        lambda adam, adamw, **how: adamw(RATE, **how),
        {},
    ),
    "brax": (
        brax,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(0.1), adam(RATE, **how)
        ),
        {"master_weight_bits": None},
    ),
    "numpyro": (
        numpyro,
        lambda adam, adamw, **how: adam(optax.cosine_decay_schedule(1e-2, STEPS), **how),
        {},
    ),
    "purejaxrl": (
        purejaxrl,
        lambda adam, adamw, **how: optax.chain(
            optax.clip_by_global_norm(0.5), adam(SCHEDULE, eps=1e-5, **how)
        ),
        {},
    ),
}  # fmt: skip


@functools.cache
def of_optax(name: str) -> float:
    run, make, _ = PROGRAMS[name]
    return float(run(make(optax.adam, optax.adamw), "float32").losses[1])


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(PROGRAMS, ["float32", "bfloat16"]),
        [("haiku with parameters", "float32"), ("equinox", "bfloat16")],
    ),
)
def test_a_program_with_the_optimizer_exchanged(name, dtype):
    run, make, options = PROGRAMS[name]
    storage = lowmem.Storage(**({} if dtype == "float32" else options))
    losses, params, state = run(make(lowmem.flash_adam, lowmem.flash_adamw, storage=storage), dtype)
    codes = [x for x in jax.tree.leaves(optax.tree.get(state, "mu")) if x.dtype == jnp.int8]
    assert len(codes) >= 2
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    start, found, plain = float(losses[0]), float(losses[1]), of_optax(name)
    assert plain < 0.5 * start
    assert abs(found - plain) <= LOSS_OF_LOOPS * plain


def test_brax_is_told_to_keep_no_correction():
    """README: beside 16-bit weights `gradient_update_fn` needs `master_weight_bits=None`."""
    from brax.training import gradients

    tx = lowmem.flash_adam(RATE)
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
    update = gradients.gradient_update_fn(lambda p: jnp.sum(p["w"]), tx, pmap_axis_name=None)
    with pytest.raises(ValueError, match=r"not passing `params`.*corrects the 16-bit weight 'w'"):
        update(params, optimizer_state=state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adaptive_rate_of_brax_ppo(dtype):
    """PPO lowers the rate inside the state of `inject_hyperparams`, behind a clipping."""
    from brax.training.agents.ppo import optimizer as ppo

    storage = lowmem.Storage(master_weight_bits=None)
    made = lowmem.inject_hyperparams(lowmem.flash_adam, static_args="storage")
    tx = optax.chain(optax.clip_by_global_norm(1.0), made(RATE, storage=storage))
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))}, dtype)
    grads = {"w": jnp.linspace(-1, 1, 64 * 128, dtype=dtype).reshape(64, 128)}

    @jax.jit
    def both(state):
        same, _ = tx.update(grads, state)
        state, rate = ppo.adaptive_kl_learning_rate(state, jnp.float32(1.0), 0.01)
        return same, tx.update(grads, state)[0], rate

    same, lowered, rate = both(state)
    np.testing.assert_allclose(rate, RATE / 1.5, rtol=1e-6)
    np.testing.assert_allclose(lowered["w"] * 1.5, same["w"], rtol=1e-6)


def test_equinox_files(tmp_path):
    """`tree_serialise_leaves` of weights and state: every bit comes back, also of 16-bit ones."""
    import equinox as eqx

    tx = lowmem.flash_adamw(RATE)
    model = eqx.nn.Linear(64, 128, key=jax.random.key(1))
    params, state = lowmem.init(tx, model)
    params, state = lowmem.step(tx, jax.tree.map(jnp.cos, params), state, params)
    eqx.tree_serialise_leaves(tmp_path / "run.eqx", (params, state))
    like = jax.eval_shape(lambda: lowmem.init(tx, model))
    assert_same_bits(eqx.tree_deserialise_leaves(tmp_path / "run.eqx", like), (params, state))
