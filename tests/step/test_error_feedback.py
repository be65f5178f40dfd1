"""The rounding error of a weight, added to its first moment."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_lowmem as lowmem
from tests import tolerances
from tests.compilation import SAME_BITS
from tests.oracle import optimizers as oracle

BF16, F32 = jnp.bfloat16, jnp.float32
ROUNDED = lowmem.Storage(
    mu=None, nu=None, group_size=32, master_weight_bits=None, master_rounding="stochastic"
)
FED = dataclasses.replace(ROUNDED, error_feedback=True)
SHAPE, RATE = (64, 256), 2.0**-9  # of weights near 1, whose neighbours are 2^-7 apart
ADAM = {"b2": 1 - 2.0**-20, "weight_decay": 0.0}  # whose second moments stay
WHOLE = lowmem.blocks.Structure(default="whole")
MAKERS = {
    "adamw": functools.partial(lowmem.flash_adamw, **ADAM),
    "nadam": functools.partial(lowmem.flash_adamw, nesterov=True, **ADAM),
    "eps_root": functools.partial(lowmem.flash_adamw, eps_root=1e-2, **ADAM),
    "stable_adamw": functools.partial(lowmem.stable_adamw, **ADAM),
    "adam_mini": functools.partial(lowmem.flash_adam_mini, blocks=WHOLE, **ADAM),
    "factored": functools.partial(lowmem.flash_factored_adamw, min_dim_size_to_factor=32, **ADAM),
    "sgd": functools.partial(lowmem.flash_sgd, momentum=0.9),
    "nesterov": functools.partial(lowmem.flash_sgd, momentum=0.8, nesterov=True),
}


def started(tx, params, rng):
    """A state long after its start, with moments."""
    state = tx.init(params)
    state = state._replace(
        count=jnp.int32(2**21), mu={"w": jnp.asarray(rng.normal(0, 0.1, SHAPE), F32)}
    )
    if "nu" in state._fields:
        state = state._replace(nu={"w": 1 + jnp.zeros(state.nu["w"].shape, F32)})
    return state


def stepped(tx, grads, state, params, steps=1):
    def body(carry, _):
        params, state = carry
        return lowmem.step(tx, grads, state, params), None

    run = jax.jit(lambda *carry: jax.lax.scan(body, carry, None, steps)[0])
    return run(params, state)


@pytest.mark.parametrize("name", MAKERS)
def test_the_following_steps_move_the_weight_by_its_error(name):
    """Without gradients it comes to rest where the unrounded weight does."""
    make, rng = MAKERS[name], np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.uniform(1, 2, SHAPE), BF16)}
    grads = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), F32)}
    free = make(RATE, storage=lowmem.Storage.full_precision())  # of f32 weights
    ends, starts = [], []
    for tx, dtype in (
        (free, F32),
        (make(RATE, storage=FED), BF16),
        (make(RATE, storage=ROUNDED), BF16),
    ):
        weights = {"w": params["w"].astype(dtype)}
        weights, state = stepped(
            tx, grads, started(tx, weights, rng := np.random.default_rng(1)), weights
        )
        weights, nothing = {"w": weights["w"].astype(F32)}, {"w": jnp.zeros(SHAPE, F32)}
        starts.append(np.float64(weights["w"]))
        ends.append(np.float64(stepped(free, nothing, state, weights, 200)[0]["w"]))
    errors = starts[0] - starts[1]
    assert np.abs(errors).mean() > 2.0**-12
    np.testing.assert_array_equal(starts[1], starts[2])
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=tolerances.REST)
    np.testing.assert_allclose(ends[0] - ends[2], errors, rtol=0, atol=tolerances.REST)


RULES = {
    "adamw": (oracle.adamw, lowmem.flash_adamw, {"weight_decay": 0.1}),
    "sgd": (oracle.sgd, lowmem.flash_sgd, {"momentum": 0.9}),
}


@pytest.mark.parametrize("peak", [1e-2, 1e-4])  # the second is under the least rate of most
@pytest.mark.parametrize("name", RULES)
def test_is_the_oracles(name, peak):
    rule, make, more = RULES[name]
    rate = optax.linear_schedule(peak, peak / 2, 4)
    tx, rng = make(rate, storage=FED, **more), np.random.default_rng(0)
    w = rng.normal(0, 1, SHAPE) * np.exp(rng.normal(0, 2, SHAPE))
    params = {"w": jnp.asarray(w, BF16)}
    state = tx.init(params)
    for t in range(1, 5):
        g = rng.normal(0, 1, SHAPE).astype(np.float32)
        before = {slot: np.float64(getattr(state, slot)["w"]) for slot in rule.slots}
        old = np.float64(params["w"])
        params, state = stepped(tx, {"w": jnp.asarray(g)}, state, params)
        exact, slots = oracle.step(rule, old, before, g, t, lr=rate, **more)
        new = np.float64(params["w"])
        fed = oracle.fed_back(rule, slots, exact - new, exact, t, lr=float(rate(t - 1)))
        size = np.maximum(np.abs(old), np.abs(exact))
        room = oracle.fed_back(rule, slots, size, exact, t, lr=float(rate(t - 1)))
        terms = np.abs(before["mu"]) + np.abs(g)
        room = tolerances.FEEDBACK * (np.abs(room - slots["mu"]) + terms)
        assert (np.abs(np.float64(state.mu["w"]) - fed) <= room).all()
        assert (np.abs(fed - slots["mu"]) > room).mean() > 0.9


def test_is_unbiased_and_less_noisy():
    """64 steps of a sixteenth of the spacing: in all the same move, with less noise."""
    steps, rng = 64, np.random.default_rng(2)
    params = {"w": jnp.asarray(rng.uniform(1.25, 1.75, SHAPE), BF16)}
    grads = {"w": jnp.asarray(rng.choice([-1.0, 1.0], SHAPE), F32)}
    moved = []
    for storage in (ROUNDED, FED):
        tx = lowmem.flash_adamw(2.0**-11, b2=0.9, weight_decay=0.0, storage=storage)
        new, _ = stepped(tx, grads, tx.init(params), params, steps)
        change = (np.float64(new["w"]) - np.float64(params["w"])) * -np.float64(grads["w"])
        moved.append(change / 2.0**-11)
    (plain, fed) = moved
    error = tolerances.STANDARD_ERRORS * fed.std() / np.sqrt(fed.size)
    assert abs(fed.mean() - steps) < error
    assert fed.std() < 0.6 * plain.std()


@pytest.mark.parametrize("codec", ["int8", None])
def test_rates_of_zero_and_rising_ones_stay_finite(codec):
    rates = jnp.asarray([0, 1e-30, 1e-8, 1e-2, 1.0, 0, 1e-3])
    storage = dataclasses.replace(FED, mu=codec, nu=codec)
    tx, rng = (
        lowmem.flash_adamw(lambda count: rates[count], storage=storage),
        np.random.default_rng(3),
    )
    params = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), BF16).at[0].set(0)}
    state = tx.init(params)
    for _ in rates:
        grads = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), F32)}
        params, state = stepped(tx, grads, state, params)
        assert bool(jnp.isfinite(params["w"]).all())
    assert float(jnp.abs(params["w"]).max()) < 100  # one step at a rate of 1 moves by about 1


def test_a_micro_batch_that_does_not_move_the_weights_feeds_nothing_back():
    rng = np.random.default_rng(4)
    params = {"w": jnp.asarray(rng.uniform(1, 2, SHAPE), BF16)}
    grads = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), F32)}
    tx = lowmem.flash_sgd(RATE, momentum=0.9, storage=FED)
    wanted, inner = stepped(tx, grads, tx.init(params), params)
    accumulated = lowmem.accumulate_gradients(tx, 2, into="moments")
    same, state = stepped(accumulated, grads, accumulated.init(params), params)
    np.testing.assert_array_equal(same["w"], params["w"])
    np.testing.assert_array_equal(state.inner_state.mu["w"], grads["w"] / 2)
    found, state = stepped(accumulated, grads, state, same)
    # they were rounded by other random bits: what one moved more, the other has in its momentum
    moved = np.float64(found["w"]) - np.float64(wanted["w"])
    fed = np.float64(state.inner_state.mu["w"]) - np.float64(inner.mu["w"])
    room = tolerances.FEEDBACK * (2 / 9 / RATE + np.abs(inner.mu["w"]))
    assert (np.abs(fed - moved / 9 / RATE) <= room).all() and np.any(moved)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_bits_on_a_mesh_are_those_on_one_device(weights):
    storage = dataclasses.replace(FED, mu="int8", nu="int8", weights=weights)
    tx, rng = lowmem.flash_adamw(1e-2, storage=storage), np.random.default_rng(5)
    params = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), BF16)}
    grads = {"w": jnp.asarray(rng.normal(0, 1, SHAPE), F32)}
    run = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    of_params = {"w": NamedSharding(mesh, PartitionSpec("rows", "columns"))}
    of_state = lowmem.sharding.state_shardings(tx, params, of_params)
    alone = grads, tx.init(params), params
    divided = jax.device_put(alone, (of_params, of_state, of_params))
    for _ in range(2):
        alone, divided = ((g, *run(g, state, p)[::-1]) for g, state, p in (alone, divided))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(divided), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_says_what_it_needs():
    with pytest.raises(ValueError, match="also pass master_weight_bits=None and master_rounding="):
        lowmem.Storage(error_feedback=True)
    with pytest.raises(TypeError, match="error_feedback must be True or False, got 'yes'"):
        dataclasses.replace(ROUNDED, error_feedback="yes")
    fed = lowmem.Storage(master_weight_bits=None, master_rounding="stochastic", error_feedback=True)
    none = (
        lowmem.flash_lion, lowmem.flash_muon, lowmem.flash_sgd,
        functools.partial(lowmem.flash_adamw, b1=0.0),
        functools.partial(lowmem.flash_sgd, momentum=0.0),
    )  # fmt: skip
    for make in none:
        with pytest.raises(ValueError, match="needs a momentum.*use AdamW"):
            make(1e-3, storage=fed)
    with pytest.raises(ValueError, match="a direction alone"):
        lowmem.scale_by_flash_adam(storage=fed)
    params = {"w": jnp.ones(SHAPE, BF16), "f32": jnp.ones(SHAPE)}
    tx = lowmem.flash_adamw(1e-3, storage=fed)
    plans = {plan.path: plan for plan in tx.engine.plans(params)}
    assert plans["w"].feeds_back and not plans["f32"].feeds_back
    said = {
        d.path: d.reason for d in lowmem.explain(tx, params).decisions if d.slot == "correction"
    }
    assert said["w"].endswith("rounded, stochastically; its error goes into mu")
    unfed = lowmem.flash_adamw(1e-3, storage=dataclasses.replace(fed, error_feedback=False))
    reports = [lowmem.memory.report(make, params).bytes_per_param for make in (tx, unfed)]
    assert reports[0] == reports[1]
