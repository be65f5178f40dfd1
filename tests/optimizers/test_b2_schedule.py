"""The schedule 1 - t^-lambda of b2: exact weighted means without debiasing, to t = 10^6 in f32."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from optax_lowmem._src.arrays.hyperparameters import decay_at
from optax_lowmem._src.optim.optimizers.adam import adam_moments
from tests.tiers import in_turn

POWERS = (0.45, 0.5, 0.65, 0.8, 1.0)  # Figure 14's, Adafactor's, the plain mean
# lambda log t up to 13.8, off by a rounding of lambda, of log and of the product: 13.8 * 3 u
RELATIVE = 13.8 * 3 * 2.0**-24
FULL = Storage.full_precision()


def steps():
    return np.unique(np.concatenate([np.arange(1, 300), np.logspace(2, 6, 400).astype(int)]))


@pytest.mark.parametrize("power", POWERS)
def test_both_sides_of_1_are_accurate(power):
    t = steps()
    exact = t.astype(np.float64) ** -power
    schedule = lowmem.b2_schedule(power)
    for read in (decay_at, jax.jit(decay_at, static_argnums=(0, 1))):
        value, complement, correction = read("b2", schedule, jnp.asarray(t - 1, jnp.int32))
        np.testing.assert_allclose(np.asarray(complement, np.float64), exact, rtol=RELATIVE)
        np.testing.assert_allclose(
            np.asarray(value, np.float64), 1 - exact, rtol=RELATIVE, atol=2.0**-25
        )
        assert correction == 1
    assert (value[0], complement[0]) == (0, 1)
    assert value.dtype == complement.dtype == jnp.float32
    np.testing.assert_array_equal(schedule(jnp.asarray(t - 1)), value)


def test_subtraction_would_not_do():
    """Computing the complement as 1 - b2 would fail the test above."""
    t = steps()
    b2 = np.asarray(lowmem.b2_schedule(0.8)(jnp.asarray(t - 1)))
    assert np.max(np.abs((1 - b2) * t**0.8 - 1)) > 1e-3


def weights_of(power, t):
    """Of g_1^2 ... g_t^2 in v_t, in float64."""
    weights = np.zeros(t)
    for i in range(1, t + 1):
        weights[: i - 1] *= 1 - i**-power
        weights[i - 1] = i**-power
    return weights


@pytest.mark.parametrize("power, nesterov", in_turn(POWERS, [False, True]))
def test_steps_against_float64(power, nesterov):
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(60, 16)) * np.exp(rng.normal(size=(60, 1)))
    tx = lowmem.flash_adam(
        1e-2, b2=lowmem.b2_schedule(power), eps=1e-8, nesterov=nesterov, storage=FULL
    )
    params = {"w": jnp.zeros(16)}
    state, update = tx.init(params), jax.jit(tx.update)
    mu = np.zeros(16)
    for t, g in enumerate(grads, start=1):
        found, state = update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        weights = weights_of(power, t)
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        v = weights @ grads[:t] ** 2
        mu = 0.9 * mu + 0.1 * g
        mu_hat = mu / (1 - 0.9**t)
        if nesterov:
            mu_hat = 0.9 * mu / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
        # f32 sums of up to 60 terms, and mu near a zero of it
        np.testing.assert_allclose(state.nu["w"], v, rtol=1e-5)
        np.testing.assert_allclose(
            found["w"], -1e-2 * mu_hat / (np.sqrt(v) + 1e-8), rtol=1e-4, atol=1e-7
        )


def test_a_million_steps_on():
    """nu moves by t^-lambda of its way to g^2, without debiasing."""
    h = adam_moments(0.9, lowmem.b2_schedule(0.8), 1e-8, 0.0, False)(jnp.int32(999_999))
    assert float(h["one_minus_b2"]) == pytest.approx(1e6**-0.8, rel=RELATIVE)
    assert h["nu_bias_correction"] == 1
    assert h["root_nu_bias_correction"] == pytest.approx(1)


def test_with_codes_and_masters():
    tx = lowmem.flash_adamw(1e-3, b2=lowmem.b2_schedule(), weight_decay=0.0)
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda g, s, p: lowmem.step(tx, g, s, p), n=1))
    for _ in range(50):
        params, state = step({"w": jnp.full((64, 64), 0.25, jnp.bfloat16)}, state, params)
    root = state.nu["w"].astype(jnp.float32) / 255 * jnp.repeat(state.nu_scale["w"], 32, axis=-1)
    np.testing.assert_allclose(root, 0.25, rtol=1 / 255)
    moved = 1 - lowmem.master_params(params, state)["w"]
    np.testing.assert_allclose(moved, 50e-3, atol=50 * 2.0**-16)  # a rounding of the master a step
    assert float(moved.mean()) == pytest.approx(50e-3, rel=5e-3)


def test_accumulated_into_moments():
    """Only a batch's first gradient is met by b2, whose step 1 forgets nothing."""
    tx = lowmem.accumulate_gradients(
        lowmem.flash_adam(1e-2, b2=lowmem.b2_schedule(1.0), storage=FULL), 2, "moments"
    )
    params = {"w": jnp.zeros(4)}
    state = tx.init(params)
    for size in (1.0, 2.0, 3.0, 4.0):
        _, state = tx.update({"w": jnp.full(4, size)}, state, params)
    # ((1/2)^2 + (2/2)^2 + (3/2)^2 + (4/2)^2) / 2
    np.testing.assert_allclose(state.inner_state.nu["w"], 3.75, rtol=1e-6)


def test_under_inject_hyperparams():
    grads, params = {"w": jnp.ones(4)}, {"w": jnp.zeros(4)}
    schedule = lowmem.b2_schedule(0.8)

    def second_step(inject=optax.inject_hyperparams, **options):
        make = inject(lowmem.flash_adam, **options)
        tx = make(optax.constant_schedule(1e-2), b2=schedule, storage=FULL)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        return float(updates["w"][0])

    assert second_step(lowmem.inject_hyperparams) == pytest.approx(-1e-2, rel=1e-5)
    assert second_step(static_args="b2") == pytest.approx(-1e-2, rel=1e-5)
    # what the docstring says of an injected one: 1 / (1 - b2^2) of b2 = 1 - 2^-0.8
    debiased = 1 / (1 - (1 - 2**-0.8) ** 2)
    assert second_step() == pytest.approx(-1e-2 / math.sqrt(debiased), rel=1e-5)


def test_any_schedule_that_starts_at_0():
    capped = lambda count: jnp.minimum(lowmem.b2_schedule(0.8)(count), 0.5)  # noqa: E731
    tx = lowmem.flash_adam(1e-2, b2=capped, storage=FULL)
    params = {"w": jnp.zeros(4)}
    state, v = tx.init(params), 0.0
    for t, size in enumerate((1.0, 3.0, 2.0, 5.0), start=1):
        b2 = min(1 - t**-0.8, 0.5)
        v = b2 * v + (1 - b2) * size**2
        _, state = tx.update({"w": jnp.full(4, size)}, state, params)
        np.testing.assert_allclose(state.nu["w"], v, rtol=1e-6)


def test_made_while_tracing():
    @jax.jit
    def nothing(w):
        lowmem.flash_adam(1e-3, b2=lambda count: 1 - 1 / (count + 1.0)).init({"w": w})
        return w

    assert nothing(jnp.zeros(3)).shape == (3,)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: lowmem.b2_schedule(0.0), ValueError, r"power must be in \(0, 1\], got 0\.0"),
        (lambda: lowmem.b2_schedule(1.5), ValueError, r"power must be in \(0, 1\]"),
        (lambda: lowmem.b2_schedule(math.nan), ValueError, r"power must be in \(0, 1\]"),
        (lambda: lowmem.b2_schedule(True), TypeError, "power must be a number known when tracing"),
        (lambda: lowmem.b2_schedule("0.8"), TypeError, "power must be a number"),
        (
            lambda: lowmem.flash_adamw(1e-3, b2=optax.constant_schedule(0.99)),
            ValueError,
            "schedule of b2 starts at 0.99, not at 0.*b2_schedule, or lowmem.inject_hyperparams",
        ),
    ],
)
def test_misuse(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda s: lowmem.flash_adamw(1e-3, b1=s),
        lambda s: lowmem.flash_lion(1e-3, b2=s),
        lambda s: lowmem.flash_adamw(1e-3, eps=s),
    ],
)
def test_hyperparameters_that_take_no_schedule(make):
    params = {"w": jnp.zeros(4)}
    tx = make(lowmem.b2_schedule())
    with pytest.raises(TypeError, match="takes a number or an f32 scalar here, not a schedule"):
        tx.update(params, tx.init(params), params)


def test_the_schedule_is_static():
    assert lowmem.b2_schedule(0.5) == lowmem.b2_schedule(0.5) != lowmem.b2_schedule(0.6)
    assert len({lowmem.b2_schedule(0.5), lowmem.b2_schedule(0.5)}) == 1
