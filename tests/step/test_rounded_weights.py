"""bf16 weights that are rounded stochastically, without a correction beside them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import numerics
from tests import tolerances
from tests.tiers import rows

BF16, F32 = jnp.bfloat16, jnp.float32
STORAGE = lowmem.Storage(master_weight_bits=None, master_rounding="stochastic")
PLAIN = lowmem.Storage(master_weight_bits=None)
SHAPE = (64, 512)


def test_rounding_is_between_the_neighbours_and_unbiased():
    """Of many draws of each value; what is bf16 already, NaN and infinities stay."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=64) * np.exp(rng.normal(0, 8, 64)))
    bits = jnp.asarray(rng.integers(0, 2**32, (4096, 64)), jnp.uint32)
    found = np.float64(numerics.narrow_stochastically(jnp.broadcast_to(x, bits.shape), bits))
    low, high = found.min(0), found.max(0)
    assert (np.abs(low) != np.abs(high)).all() and (low < x).all() and (x < high).all()
    assert all(len(np.unique(column)) == 2 for column in found.T)
    # the mean of 4096 draws: five of its standard deviations
    bound = 5 * (high - low) / 2 / np.sqrt(4096)
    assert (np.abs(found.mean(0) - x) <= bound).all()
    kept = jnp.asarray([0.0, -0.0, 1.5, -3.375, np.inf, -np.inf, np.nan, 3.3895314e38], F32)
    same = numerics.narrow_stochastically(kept, jnp.full(8, 2**32 - 1, jnp.uint32))
    np.testing.assert_array_equal(np.asarray(same, np.float32), kept)
    largest = jnp.asarray([3.4028235e38], F32)
    assert np.isfinite(np.float32(numerics.narrow_stochastically(largest, bits[:1, 0])))


MAKERS = {
    "flash_adamw": functools.partial(lowmem.flash_adamw, b2=0.9, weight_decay=0.0),
    "flash_sgd": functools.partial(lowmem.flash_sgd, momentum=0.9),
    "plain": lowmem.flash_sgd,
    "flash_muon": lowmem.flash_muon,
}


@pytest.mark.parametrize(
    "name, direct",
    rows(itertools.product(MAKERS, [True, False]), [("flash_adamw", True), ("flash_sgd", False)]),
)
def test_small_steps_add_up(name, direct):
    ulp, steps = 2.0**-7, 64  # of weights from 1 to 2
    rate = ulp / 16 if name != "flash_muon" else ulp / 16 * np.sqrt(64)
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.uniform(1.25, 1.75, SHAPE), BF16)}
    grads = {"w": jnp.asarray(rng.choice([-1.0, 1.0], SHAPE), F32)}
    moved = {}
    for storage in (STORAGE, PLAIN, lowmem.Storage(master_weight_bits=32)):
        tx = MAKERS[name](rate / 10 if name == "flash_sgd" else rate, storage=storage)

        @jax.jit
        def run(params, state, tx=tx):
            def body(carry, _):
                params, state = carry
                if direct:
                    return lowmem.step(tx, grads, state, params), None
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(body, (params, state), None, steps)[0]

        new, state = run(params, tx.init(params))
        assert new["w"].dtype == BF16
        assert (state.correction["w"].ndim == 0) == (storage.master_weight_bits is None)
        masters = lowmem.master_params(new, state)["w"]
        moved[storage] = np.float64(masters) - np.float64(params["w"])
    ours, lost, exact = moved.values()
    along = lambda change: float(np.sum(change * exact) / np.sum(exact**2))  # noqa: E731
    assert abs(along(ours) - 1) <= tolerances.ROUNDED_WEIGHTS
    if name != "flash_muon":  # whose elements differ in size
        assert abs(along(lost)) <= tolerances.ROUNDED_WEIGHTS


def test_who_rounds():
    storages = STORAGE, PLAIN, lowmem.Storage()
    assert [storage.rounds_weights for storage in storages] == [True, False, False]
    tx = lowmem.flash_adamw(1e-3, storage=STORAGE)
    params = {"w": jnp.ones(SHAPE, BF16), "f32": jnp.ones(SHAPE)}
    plans = {plan.path: plan for plan in tx.engine.plans(params)}
    assert plans["w"].weight_format and not plans["f32"].weight_format
    said = {d.path: d for d in lowmem.explain(tx, params).decisions if d.slot == "correction"}
    assert "rounded, stochastically" in said["w"].reason and said["w"].form is None
    assert lowmem.memory.report(tx, params).by_slot["correction"] <= 2 * len(params)
    with pytest.raises(ValueError, match="'w' is float16.*only bfloat16"):
        tx.init({"w": jnp.ones(SHAPE, jnp.float16)})
    tx, grads = lowmem.flash_adam(1e-3, storage=STORAGE), {"w": params["w"]}
    with pytest.raises(ValueError, match="rounding of 16-bit weights uses"):
        tx.update(grads, tx.init(grads))


def test_a_nan_shows_in_its_own_weight():
    tx = lowmem.flash_sgd(1e-3, storage=STORAGE)
    params = {"w": jnp.ones(SHAPE, BF16)}
    grads = {"w": jnp.zeros(SHAPE).at[3, 5].set(jnp.nan)}
    new, _ = jax.jit(functools.partial(lowmem.step, tx))(grads, tx.init(params), params)
    wanted = np.ones(SHAPE, np.float32)
    wanted[3, 5] = np.nan
    np.testing.assert_array_equal(np.asarray(new["w"], np.float32), wanted)
