"""Tests of optax's wrappers and of Flax beyond equality with plain optax; see also the matrix."""

import inspect
import itertools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import (
    CASES,
    DISTINCT,
    FLASH,
    OPTIMIZER,
    Form,
    assert_same,
    at,
    codes_shape,
    masters,
    stream,
    third,
)
from tests.tiers import rows

LABELS = {"block": {"w": "trained"}, "norm": "frozen"}


def _make(name: str, lr: Any = None) -> optax.GradientTransformationExtraArgs:
    return CASES[name].make(CASES[name].step if lr is None else lr, Form())


def _gradient() -> Any:
    return at(stream(masters(), 1), 0)


@OPTIMIZER
def test_frozen_and_masked_leaves_have_no_state(name):
    mask = {"block": {"w": True}, "norm": False}
    for tx in (
        optax.partition({"trained": _make(name), "frozen": optax.set_to_zero()}, LABELS),
        optax.masked(_make(name), mask),
    ):
        with pytest.raises(ValueError, match="^'norm' would be rounded"):
            lowmem.init(tx, masters())
        params, state = lowmem.init(tx, masters(), allow_rounding=True)
        shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
        assert params["block"]["w"].shape in shapes
        assert params["norm"].shape not in shapes
        np.testing.assert_allclose(
            lowmem.master_params(params, state)["block"]["w"],
            masters()["block"]["w"],
            rtol=2.0**-16,
        )


@third(0)
def test_an_injected_learning_rate_changes_without_recompiling(name):
    def factory(learning_rate):
        return _make(name, learning_rate)

    lr = CASES[name].step
    tx = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=lr)
    params, state = lowmem.init(tx, masters())
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda g, s, p: lowmem.step(tx, g, s, p), n=1))
    moved = {}
    for rate in (lr, 0.0, lr / 2):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        new, after = step(_gradient(), state, params)
        before = lowmem.master_params(params, state)["block"]["w"]
        moved[rate] = np.abs(lowmem.master_params(new, after)["block"]["w"] - before).sum()
    assert moved[0.0] == 0
    np.testing.assert_allclose(moved[lr / 2], moved[lr] / 2, rtol=0.02)  # 24 bits: 2^-16 of w = 1


@pytest.mark.parametrize("name", rows(lowmem.OPTIMIZERS, ["flash_adamw", "flash_muon"]))
def test_public_optimizers_can_be_injected_themselves(name):
    make = getattr(lowmem, name)
    options = {"momentum": 0.9} if name == "flash_sgd" else {}
    if "blocks" in inspect.signature(make).parameters:
        options["blocks"] = lowmem.blocks.Structure(default="whole")
    storage = Form().storage(FLASH)
    injected = lowmem.inject_hyperparams(make)
    tx = injected(learning_rate=optax.linear_schedule(1e-3, 0, 10), storage=storage, **options)
    plain = make(optax.linear_schedule(1e-3, 0, 10), storage=storage, **options)
    params, state = lowmem.init(tx, masters())
    other = lowmem.init(plain, masters())[1]
    new, _ = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))(_gradient(), state, params)
    same, _ = jax.jit(lambda g, s, p: lowmem.step(plain, g, s, p))(_gradient(), other, params)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2.0**-8)


@third(1)
def test_apply_if_finite_drops_a_step_with_nan(name):
    tx = optax.apply_if_finite(_make(name), 5)
    params, state = lowmem.init(tx, masters())
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    params, state = step(_gradient(), state, params)
    bad = jax.tree.map(lambda g: g.at[..., 0].set(jnp.nan), _gradient())
    after, skipped = step(bad, state, params)
    assert_same(after, params)
    assert_same(skipped.inner_state, state.inner_state)
    assert int(skipped.notfinite_count) == 1


@third(2)
def test_multi_steps_moves_once_in_two_calls(name):
    tx = optax.MultiSteps(_make(name), every_k_schedule=2)
    params, state = lowmem.init(tx, masters())
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    waiting, between = step(_gradient(), state, params)
    assert_same(waiting, params)
    assert_same(between.inner_opt_state, state.inner_opt_state)
    moved, after = step(_gradient(), between, waiting)
    before = lowmem.master_params(params, state)["block"]["w"]
    assert (lowmem.master_params(moved, after)["block"]["w"] != before).mean() > 0.9


def _parabola(x: jax.Array) -> jax.Array:
    return jnp.sum((x - jnp.array([1.0, -1.0, 1.0], x.dtype)) ** 2)


def _rosenbrock(x: jax.Array) -> jax.Array:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


TARGETS = {
    "parabola": (_parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
    "rosenbrock": (_rosenbrock, [0.0, 0.0], [1.0, 1.0]),
}


@pytest.mark.parametrize(
    "name, target",
    rows(
        itertools.product(CASES, TARGETS),
        list(zip(DISTINCT, itertools.cycle(TARGETS), strict=False)),
    ),
)
def test_converges_on_optax_targets(name, target):
    objective, start, end = TARGETS[target]
    form = Form(policy=lowmem.Policy(min_size=0))
    tx = CASES[name].make(CASES[name].learning_rate, form)
    params, state = lowmem.init(tx, {"x": jnp.array(start)}, jnp.float32)
    assert optax.tree.get(state, CASES[name].slots[0])["x"].dtype in (jnp.int8, jnp.uint8)

    def body(carry, _):
        params, state = carry
        return lowmem.step(tx, {"x": jax.grad(objective)(params["x"])}, state, params), None

    run = jax.jit(lambda c: jax.lax.scan(body, c, None, 10000)[0])
    params, _ = run((params, state))
    np.testing.assert_allclose(params["x"], np.array(end), rtol=3e-2, atol=3e-2)


@third(0)
def test_linen_train_state(name):
    train_state = pytest.importorskip("flax.training.train_state")
    tx = _make(name)
    params, state = lowmem.init(tx, masters())
    holder = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    chex.assert_trees_all_equal_shapes_and_dtypes(holder.opt_state, state)
    step = jax.jit(lambda h, g: h.apply_gradients(grads=g))
    new = step(holder.replace(opt_state=state), _gradient())
    assert int(new.step) == 1
    expected = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))(_gradient(), state, params)
    assert_same((new.params, new.opt_state), expected)


@third(1)
def test_nnx_optimizer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax's own, at import
        nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(40, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, _make(name), wrt=nnx.Param)
    state = jax.tree.leaves(nnx.state(optimizer))
    bytes_ = [leaf for leaf in state if leaf.dtype in (jnp.int8, jnp.uint8) and leaf.ndim == 2]
    shapes = [codes_shape(name, (40, 8))] * len(CASES[name].slots) + [(40, 8)]  # the correction
    assert sorted(leaf.shape for leaf in bytes_) == sorted(shapes)
    x = jax.random.normal(jax.random.key(0), (64, 40))
    y = x[:, :8]

    def loss(model):
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert model.kernel[...].dtype == jnp.bfloat16
    assert losses[-1] < losses[0]
