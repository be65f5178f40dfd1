"""Requirements of optax 0.2.8's own test suites, applied to every optimizer and wrapper.

Convergence, state as a plain tree and execution under jit, scan and cond are in the tests beside
this one. Each exception stands in a table with its reason.
"""

import functools
import inspect
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import tolerances
from tests.contract_cases import (
    CASES,
    DIRECTIONS,
    DISTINCT,
    EVERYONE,
    RULES,
    WRAPPERS,
    Form,
    assert_same,
    skip_old_multi_steps,
)
from tests.tiers import in_turn, rows

SMALL = lowmem.Policy(min_size=0)
IN_DTYPE = Form(policy=SMALL, update_dtype="param")
everyone = pytest.mark.parametrize("name", rows(EVERYONE, (*DISTINCT, *WRAPPERS)))


def _parabola(x: jax.Array) -> jax.Array:
    return jnp.sum((x - jnp.array([1.0, -1.0, 1.0], x.dtype)) ** 2)


def _start(dtype: Any = "float32") -> jax.Array:
    return jnp.array([-1.0, 10.0, 1.0], dtype)


# ---- extra arguments, trees, schedules -----------------------------------------------------------


@pytest.mark.parametrize("name", rows(EVERYONE, [*DISTINCT, *list(WRAPPERS)[1::3]]))
def test_unexpected_arguments_are_taken_and_nothing_recompiles(name):
    tx, params = EVERYONE[name](1e-2, Form(policy=SMALL)), _start()
    chex.clear_trace_counter()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def step(params, state):
        grads = jax.grad(_parabola)(params)
        updates, state = tx.update(grads, state, params, unexpected_by_your_optimizer=1)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    assert_same(optax.tree.map_params(tx, lambda value: value, state), state)
    for _ in range(3):
        params, state = step(params, state)
    assert np.isfinite(params).all()


@pytest.mark.parametrize("name", rows(EVERYONE, [*DISTINCT, *list(WRAPPERS)[::3]]))
def test_a_constant_schedule_is_its_number(name):
    params, grads = {"w": jnp.ones((3, 40))}, {"w": jnp.cos(jnp.arange(120.0).reshape(3, 40))}
    found = []
    for rate in (1e-3, optax.constant_schedule(1e-3)):
        tx = EVERYONE[name](rate, Form())

        @jax.jit
        def second(grads, params, tx=tx):
            _, state = tx.update(grads, tx.init(params), params)
            return tx.update(grads, state, params)[0]

        found.append(second(grads, params))
    np.testing.assert_allclose(found[1]["w"], found[0]["w"], rtol=tolerances.REORDERED_SLOT)


# ---- hyperparameters in the state ----------------------------------------------------------------

WITH_NUMBERS = {
    **{name: (getattr(lowmem, name), {"learning_rate": 1e-2}) for name in lowmem.OPTIMIZERS},
    **{name: (make, {}) for name, make in DIRECTIONS.items()},
    "flash_trace": (lowmem.flash_trace, {"decay": 0.9}),
    "compand_momentum": (lowmem.compand_momentum, {"inner": 0.9}),
    "sqrt_variance_quant": (lowmem.sqrt_variance_quant, {"inner": 0.9}),
    "track_master_ema": (
        functools.partial(lowmem.track_master_ema, lowmem.flash_adam(1e-2)), {"decay": 0.9}
    ),
    "update_clipping": (
        functools.partial(lowmem.update_clipping, optax.adam(1e-2)), {"b2": 0.999, "eps": 1e-8}
    ),
}  # fmt: skip
# how wide or how often something is, which a trace must know: as warmup_steps and rank of optax
STATIC = ("group_size", "bits", "every", "seed", "smooth_beta", "ns_steps",
          "min_dim_size_to_factor")  # fmt: skip


@pytest.mark.parametrize(
    "name, inject",
    rows(
        itertools.product(WITH_NUMBERS, [optax.inject_hyperparams, lowmem.inject_hyperparams]),
        [
            (name, (optax.inject_hyperparams, lowmem.inject_hyperparams)[i % 2])
            for i, name in enumerate(WITH_NUMBERS)
            if i % 4 < 3
        ],
    ),
)
def test_hyperparameters_can_be_injected(name, inject):
    factory, options = WITH_NUMBERS[name]
    arguments = inspect.signature(factory).parameters
    if "blocks" in arguments:
        options = {**options, "blocks": lowmem.blocks.Structure(default="whole")}
    static = tuple(known for known in STATIC if known in arguments)
    params = [-np.ones((2, 3), np.float32), np.ones((2, 5, 2), np.float32)]
    grads = [-p for p in params]
    plain, injected = factory(**options), inject(factory, static)(**options)
    first = lambda tx: jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)  # noqa: E731
    (wanted, state), (found, own) = first(plain), first(injected)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5)
    chex.assert_trees_all_close(own.inner_state, state, rtol=1e-5, atol=1e-5)


# ---- dtypes --------------------------------------------------------------------------------------


def _mixed() -> dict[str, jax.Array]:
    return {dtype: _start(dtype) for dtype in ("float32", "bfloat16", "float16")}


@everyone
def test_updates_have_the_dtype_of_the_gradients_and_states_keep_their_layout(name):
    """The dtype where it is asked for, `update_dtype="param"`: the default is f32.

    The layout in a `lax.cond` with the state before, and with the weights in the updates' place.
    """
    tx, params = EVERYONE[name](1e-2, IN_DTYPE), _mixed()

    def step(params, state, taken):
        grads = jax.grad(lambda p: sum(map(_parabola, p.values())))(params)

        updates, state = jax.lax.cond(
            taken, lambda: tx.update(grads, state, params), lambda: (params, state)
        )
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    new = jax.eval_shape(step, params, state, True)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, (params, state))


DEFAULT_DTYPE = {
    "flash_adam": (lowmem.flash_adam, "mu_dtype"),
    "flash_adamw": (lowmem.flash_adamw, "mu_dtype"),
    "flash_lion": (lowmem.flash_lion, "mu_dtype"),
    "flash_sgd": (functools.partial(lowmem.flash_sgd, momentum=0.9), "accumulator_dtype"),
}


@pytest.mark.parametrize("name", DEFAULT_DTYPE)
def test_the_dtype_of_a_moment(name):
    """As told where it is not compressed; else f32, beside 16-bit weights too (optax: theirs)."""
    make, argument = DEFAULT_DTYPE[name]
    full = lowmem.Storage.full_precision()
    for given, wanted in ((None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        tx = make(1e-2, storage=full, **{argument: given})
        for dtype, x in _mixed().items():
            assert tx.init({"w": x}).mu["w"].dtype == wanted, dtype


@pytest.mark.parametrize("name", rows(WRAPPERS, list(WRAPPERS)[::4]))
def test_updates_between_the_steps_of_multi_steps_are_zero(name):
    skip_old_multi_steps()
    tx = optax.MultiSteps(WRAPPERS[name](1e-2, Form(policy=SMALL)), 4)
    params = _mixed()
    state = jax.jit(tx.init)(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert not any(np.asarray(u, np.float32).any() for u in updates.values())
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@everyone
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_dtypes_that_are_refused(name, dtype):
    """optax takes them: 8-bit state of a float64 weight would lose it, of a complex one half."""
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, dtype)}
        with pytest.raises(TypeError, match=f"'w' is {dtype}.*optax.masked"):
            EVERYONE[name](1e-2, Form()).init(params)


# ---- wrappers find what they look for ------------------------------------------------------------

TARGETS = {
    "parabola": (_parabola, _start(), jnp.array([1.0, -1.0, 1.0])),
    "matrix": (
        lambda x: jnp.sum((x - jnp.array([[3.0, -2.0], [1.0, 4.0]])) ** 2),
        jnp.zeros((2, 2)),
        jnp.array([[3.0, -2.0], [1.0, 4.0]]),
    ),
}
RATES = {"scale_by_flash_lion": 1e-2, "flash_trace": 1e-2, "split_master_weights": 1e-2,
         "links": 1e-2, "flash_sgd plain": 1e-2}  # fmt: skip


@pytest.mark.parametrize(
    "name, target",
    rows(
        itertools.product(WRAPPERS, TARGETS),
        list(zip(WRAPPERS, itertools.cycle(TARGETS), strict=False))[::2],
    ),
)
def test_wrappers_converge(name, target):
    objective, start, end = TARGETS[target]
    tx = WRAPPERS[name](RATES.get(name, 1e-1), Form(policy=SMALL))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(objective)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda c: jax.lax.scan(body, c, None, 5000)[0])
    np.testing.assert_allclose(run((start, tx.init(start)))[0], end, rtol=3e-2, atol=3e-2)


AROUND = {
    "mechanize": lambda make, _: optax.contrib.mechanize(make(1.0), weight_decay=0.0),
    "schedule_free": lambda make, lr: optax.contrib.schedule_free(make(lr), learning_rate=lr),
    "reduce_on_plateau": lambda make, lr: optax.chain(
        make(lr), optax.contrib.reduce_on_plateau(patience=1000)
    ),
}


@pytest.mark.parametrize("name, around", in_turn(RULES, AROUND))
def test_wrappers_of_optax_contrib_converge(name, around):
    """Around f32 weights; of 16-bit ones the split is outermost."""
    case, (objective, start, end) = CASES[name], TARGETS["parabola"]
    make = functools.partial(case.make, form=Form(policy=SMALL))
    tx = AROUND[around](make, case.learning_rate)

    def body(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(objective)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda c: jax.lax.scan(body, c, None, 10_000)[0])
    params, state = run((start, tx.init(start)))
    if around == "schedule_free":
        params = optax.contrib.schedule_free_eval_params(state, params)
    np.testing.assert_allclose(params, end, rtol=3e-2, atol=3e-2)
