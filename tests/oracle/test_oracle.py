"""The uncompressed rules against optax, the quantized steps by hand, and the closed-loop probes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from . import closed_loop, flash, optimizers, split


def schedule(count):
    return 0.1 / (1 + count)


RUNS = {
    "adamw": (
        optimizers.adamw,
        {"lr": 1e-2, "weight_decay": 0.1},
        lambda: optax.adamw(1e-2, weight_decay=0.1),
    ),
    "nadamw": (
        optimizers.adamw,
        {"lr": 1e-2, "nesterov": True, "eps_root": 1e-6, "b1": 0.8, "b2": 0.95},
        lambda: optax.adam(1e-2, b1=0.8, b2=0.95, eps_root=1e-6, nesterov=True),
    ),
    "lion": (
        optimizers.lion,
        {"lr": schedule, "weight_decay": 0.2},
        lambda: optax.lion(schedule, weight_decay=0.2),
    ),
    "sgd": (optimizers.sgd, {"lr": 0.1}, lambda: optax.sgd(0.1, momentum=0.9)),
    "sgd-plain": (optimizers.sgd, {"lr": schedule, "momentum": None}, lambda: optax.sgd(schedule)),
    "sgd-nesterov-coupled": (
        optimizers.sgd,
        {"lr": 0.1, "nesterov": True, "weight_decay": 0.1, "decoupled": False},
        lambda: optax.chain(
            optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)
        ),
    ),
    "sgd-decoupled": (
        optimizers.sgd,
        {"lr": 0.1, "weight_decay": 0.1},
        lambda: optax.chain(
            optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.1)
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_uncompressed_rules_are_optax(name):
    rule, hyper, make = RUNS[name]
    rng = np.random.default_rng(7)
    theta, grads = rng.normal(size=(5, 7)), rng.normal(size=(20, 5, 7))
    states = optimizers.trajectory(rule, theta, grads, **hyper)
    with jax.enable_x64(True):
        tx = make()
        params = jnp.asarray(theta)
        state = tx.init(params)
        for g, (want, _) in zip(grads, states[1:], strict=True):
            updates, state = tx.update(jnp.asarray(g), state, params)
            params = optax.apply_updates(params, updates)
            # optax debiases with float32 powers of the int32 count
            np.testing.assert_allclose(params, want, rtol=1e-6, atol=1e-7)
    forced = optimizers.teacher_forced(rule, states[:-1], grads, **hyper)
    assert all((a == b).all() for (a, _), (b, _) in zip(forced, states[1:], strict=True))


def test_decoupled_learning_rate():
    theta, _ = optimizers.step(
        optimizers.lion,
        np.ones(1),
        {"mu": np.zeros(1)},
        np.zeros(1),
        1,
        lr=0.01,
        peak_lr=0.1,
        weight_decay=0.5,
    )
    np.testing.assert_allclose(theta, [1 - 0.5 * 0.1], rtol=1e-14)


# -- the quantized steps -----------------------------------------------------------------------


def test_flash_adamw_first_step_by_hand():
    # t = 1: m = 0.1 g and v = 0.001 g^2, so u = sign(g) and theta = 1 - lr (+-1 + 0.1)
    state = flash.init(optimizers.adamw, np.ones((1, 3)), flash.PAPER)
    assert (state.slots["mu"][0] == 0).all() and (state.correction == 0).all()
    g = np.array([[1.0, -1 / 3, 0.5]])
    state = flash.step(
        optimizers.adamw, state, g, 1, flash.PAPER, lr=2.0**-6, weight_decay=0.1, eps=0.0
    )
    codes, scale = state.slots["mu"]
    assert codes.tolist() == [[127, -64, 85]] and scale.tolist() == [[float(np.float16(0.1))]]
    codes, scale = state.slots["nu"]
    assert codes.tolist() == [[255, 85, 128]] and scale.tolist() == [
        [float(np.float16(0.001**0.5))]
    ]
    want = 1 - 2.0**-6 * (np.array([[1, -1, 1]]) + 0.1)
    p, rho = split.split_ulp(np.float32(want))
    assert (state.weight == p).all() and (state.correction == rho).all()
    np.testing.assert_allclose(flash.master_weight(state, flash.PAPER), want, rtol=1.6e-5)


@pytest.mark.parametrize(
    "rule", [optimizers.adamw, optimizers.lion, optimizers.sgd], ids=lambda r: r.name
)
@pytest.mark.parametrize(
    "storage", [flash.PAPER, flash.Storage(), flash.Storage(bits=32)], ids=["paper", "safe", "32"]
)
def test_flash_follows_the_exact_rule(rule, storage):
    rng = np.random.default_rng(8)
    theta = rng.normal(size=(4, 70))
    grads = rng.normal(size=(30, 4, 70))
    state = flash.init(rule, theta, storage)
    for t, g in enumerate(grads, start=1):
        state = flash.step(rule, state, g, t, storage, lr=1e-2)
    assert state.weight.dtype == ml_dtypes.bfloat16 and state.slots["mu"][1].shape == (4, 3)
    moved = flash.master_weight(state, storage) - theta
    exact = optimizers.trajectory(rule, theta, grads, lr=1e-2)[-1][0] - theta
    assert np.sum(moved * exact) / np.linalg.norm(moved) / np.linalg.norm(exact) > 0.99
    lossless = flash.Storage(mu=None, nu=None, bits=None)
    state = flash.init(rule, theta, lossless)
    for t, g in enumerate(grads, start=1):
        state = flash.step(rule, state, g, t, lossless, lr=1e-2)
    if rule is not optimizers.lion:  # sign() of a float32 momentum may differ at a crossing
        np.testing.assert_allclose(state.weight - theta, exact, atol=2e-5)


# -- closed loop -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, storage, low, high",
    [
        ("constant", "fp16", 0.7, 0.85),
        ("constant", "e8m8", 0.44, 0.56),
        ("constant", "f32", 0.999, 1.001),
    ],
)
def test_nearest_16_bit_scales_stall(case, storage, low, high):
    assert (
        low < np.median(closed_loop.variance_ratio(case, storage, groups=256, group_size=1)) < high
    )


def test_a_stochastic_scale_must_not_fall_below_the_maximum():
    clipped, up = (
        np.median(
            closed_loop.variance_ratio(
                "shrink", s, groups=256, group_size=1, steps=4000, change=10**6
            )
        )
        for s in ("stochastic", "stochastic_up")
    )
    assert clipped < 0.9 and abs(up - 1) < 0.03


def test_lonely_gradient():
    stored, exact = closed_loop.lonely_gradient(floor=False, steps=200)
    assert abs(exact[0] - 2.844) < 1e-3 and abs(exact[-1]) < 1e-6
    assert (np.abs(stored - 3558.07) < 0.01).all()
    stored, _ = closed_loop.lonely_gradient(floor=True, steps=200)
    assert (np.abs(stored - 0.9 * 255 / 253) < 1e-3).all()


def test_sleeping_drift():
    # code 1 for ever: steps * 0.9 / 253 over 9 * 0.003
    assert (
        abs(closed_loop.sleeping_drift(steps=600, groups=1) / (600 * 0.9 / 253 / 0.027) - 1) < 1e-3
    )
    assert (
        abs(closed_loop.sleeping_drift("stochastic_f32", start=0.1, steps=300, groups=1024) - 1)
        < 0.03
    )


def test_zero_variance_codes_under_lognormal_scales():
    run = {"nu_storage": "stochastic_f32", "codes_by": "stored", "groups": 128, "steps": 400}
    bare = closed_loop.lognormal_direction(floor=False, warm=True, **run)
    floored = closed_loop.lognormal_direction(floor=True, warm=True, **run)
    assert bare["zero_codes"] > 0 and bare["max"] > 100
    assert floored["zero_codes"] == 0 and floored["max"] < 3 and floored["nmse"] < 0.1
