"""The average of the master weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import tolerances

STEPS, DECAY, SIDE = 5000, 0.9999, 64


def rising(bits):
    """The average, and a plain bf16 one, of weights that rise from 1 to 2 in 5000 steps."""
    tx = lowmem.track_master_ema(optax.sgd(1.0), DECAY, bits=bits)
    params = {"w": jnp.ones((SIDE, SIDE))}
    grads = {"w": jnp.full((SIDE, SIDE), -(2.0**-12))}

    def one(carry, _):
        params, state, plain = carry
        params, state = lowmem.step(tx, grads, state, params)
        narrow = params["w"][0, 0].astype(jnp.bfloat16)
        plain = plain + jnp.bfloat16(1 - DECAY) * (narrow - plain)
        return (params, state, plain), None

    start = (params, tx.init(params), jnp.ones((), jnp.bfloat16))
    (params, state, plain), _ = jax.jit(lambda c: jax.lax.scan(one, c, length=STEPS))(start)
    return lowmem.ema_params(state)["w"], float(plain), params["w"][0, 0]


def exact():
    w, e = 1.0, 1.0
    for _ in range(STEPS):
        w += 2.0**-12  # exact in f32
        e += (1 - DECAY) * (w - e)
    return w, e


def test_24_bits_do_not_stall():
    average, plain, weight = rising(24)
    w, e = exact()
    assert float(weight) == w
    assert plain == 1, "the control: bf16 has not moved at all"
    assert e > 1.2
    average = np.asarray(average, np.float64)
    spacing = 2.0**-15  # of 24-bit masters in [1, 2)
    tolerance = tolerances.stochastic_sum(STEPS, spacing, SIDE**2) + STEPS * 2.0**-24 * (1 - DECAY)
    assert abs(average.mean() - e) <= tolerance + tolerances.F32_EPS * 4
    assert np.abs(average - e).max() <= tolerances.stochastic_sum(STEPS, spacing, 1) * 1.5
    bound = 2.0**-16 * e / np.sqrt(1 - DECAY**2)  # of the docstring; e rises, so it is the largest
    assert bound / 4 < average.std() <= bound


def test_32_bits_are_f32():
    average, _, _ = rising(32)
    assert abs(float(average[0, 0]) - exact()[1]) <= STEPS * 2.0**-24
    assert float(jnp.max(average)) == float(jnp.min(average))


def test_one_step_through_a_split_optimizer():
    """The average is of the masters, not of their bf16 rounding; updates are the optimizer's."""
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.uniform(1, 2, (64, 128)), jnp.float32)}
    inner = lowmem.flash_adamw(1e-2)
    tx = lowmem.track_master_ema(inner, 0.75, bits=32)
    params, state = lowmem.init(tx, start)
    alone, alone_state = lowmem.init(inner, start)
    first = lowmem.master_params(params, state)["w"]
    assert bool(jnp.all(lowmem.ema_params(state)["w"] == first))
    grads = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}
    params, state = lowmem.step(tx, grads, state, params)
    alone, alone_state = lowmem.step(inner, grads, alone_state, alone)
    assert bool(jnp.all(params["w"] == alone["w"]))
    after = lowmem.master_params(alone, alone_state)["w"]
    expected = 0.75 * np.asarray(first, np.float64) + 0.25 * np.asarray(after, np.float64)
    np.testing.assert_allclose(lowmem.ema_params(state)["w"], expected, rtol=2.0**-22)


@pytest.mark.parametrize(("bits", "size"), [(24, 3), (32, 4)])
def test_bytes(bits, size):
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    found = lowmem.memory.report(lowmem.track_master_ema(optax.sgd(0.1), 0.9, bits=bits), params)
    assert round(found.state_bytes / 2**20, 4) == size


def test_through_wrappers():
    tx = optax.chain(optax.identity(), lowmem.track_master_ema(lowmem.flash_lion(1e-2), 0.0))
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 128)), "b": jnp.ones((3,))})
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    params, state = lowmem.step(tx, grads, state, params)
    masters, average = lowmem.master_params(params, state), lowmem.ema_params(state)
    assert jax.tree.structure(average) == jax.tree.structure(params)
    for name in ("w", "b"):  # decay 0: the masters themselves, at 24 bits
        assert float(masters[name].reshape(-1)[0]) < 0.991
        np.testing.assert_allclose(average[name], masters[name], rtol=2.0**-15)


def test_none_or_two_averages():
    params = {"w": jnp.ones((8, 8))}
    once = lowmem.track_master_ema(optax.sgd(0.1), 0.9)
    twice = lowmem.track_master_ema(once, 0.99)
    for tx, count in ((optax.adam(0.1), 0), (twice, 2)):
        with pytest.raises(ValueError, match=f"has {count} averages.*track_master_ema once"):
            lowmem.ema_params(tx.init(params))


def test_steps_under_half_a_spacing_of_the_weights_count():
    """Ten steps that bf16 weights do not show: the average follows their masters."""
    tx = lowmem.track_master_ema(lowmem.flash_sgd(2.0**-13), 0.5)
    params, state = lowmem.init(tx, {"w": jnp.ones(4)})
    step = jax.jit(lambda state: lowmem.step(tx, {"w": -jnp.ones(4)}, state, params))
    average = 1.0
    for n in range(1, 11):
        new, state = step(state)
        average += 0.5 * (1 + n * 2.0**-13 - average)
        np.testing.assert_array_equal(new["w"], params["w"])
    assert average > 1.001
    np.testing.assert_allclose(lowmem.ema_params(state)["w"], average, atol=2.0**-14)
