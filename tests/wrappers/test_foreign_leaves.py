"""Leaves that are no f32 or 16-bit floats, beside those that an optimizer of ours takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem

PARAMS = {"n": jnp.array([2**24 + 1, 3]), "k": jnp.int32(7), "w": jnp.full((64, 64), 0.3)}
CHOSEN = {"n": False, "k": False, "w": True}
AROUND = {
    "masked": lambda tx: optax.masked(tx, CHOSEN),
    "partition": lambda tx: optax.partition({True: tx, False: optax.set_to_zero()}, CHOSEN),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(
    "tx",
    [
        lowmem.flash_adamw(1e-3),
        lowmem.split_master_weights(optax.adamw(1e-3)),
        lowmem.track_master_ema(lowmem.flash_lion(1e-3), 0.9),
    ],
    ids=["flash_adamw", "split", "ema"],
)
def test_init_leaves_them_to_others(around, tx):
    tx = around(tx)
    params, state = lowmem.init(tx, PARAMS)
    assert params["w"].dtype == jnp.bfloat16
    masters = lowmem.master_params(params, state)
    for name in ("n", "k"):
        assert params[name].dtype == masters[name].dtype == jnp.int32
        np.testing.assert_array_equal(masters[name], PARAMS[name])
    grads = {**PARAMS, "n": jnp.zeros(2, jnp.int32), "k": jnp.int32(0)}
    new, _ = lowmem.step(tx, grads, state, params)
    np.testing.assert_array_equal(new["n"], PARAMS["n"])
    assert (new["w"] != params["w"]).all()


def test_a_key_is_kept():
    tx = optax.masked(lowmem.flash_adamw(1e-3), {"key": False, "w": True})
    params, state = lowmem.init(tx, {"key": jax.random.key(0), "w": jnp.ones((64, 64))})
    assert lowmem.master_params(params, state)["key"].dtype == jax.random.key(0).dtype


COMPLEX = {"z": jnp.ones(4) + 1j}


def test_complex_gradients_stay_complex():
    tx = lowmem.chain(optax.clip_by_global_norm(100.0), optax.sgd(1.0))
    grads = {"z": jnp.ones(4) * 2j}
    updates, _ = tx.update(grads, tx.init(COMPLEX), COMPLEX)
    np.testing.assert_array_equal(updates["z"], -grads["z"])


def test_wide_gradients_stay_wide():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(4, jnp.float64)}
        tx = lowmem.chain(optax.clip(10.0), optax.sgd(1.0))
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["w"].dtype == jnp.float64


def test_a_norm_that_underflows_clips_nothing():
    params = {"w": jnp.ones((8, 8))}
    grads = {"w": jnp.full((8, 8), 1e-24)}
    tx = lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_lion(1.0, weight_decay=0.0))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], -1.0)
