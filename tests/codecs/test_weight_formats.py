"""Weights with the values of 8-bit codes, and their codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.codecs import Layout
from optax_lowmem._src.arrays.codecs.weights import WEIGHT_FORMATS
from optax_lowmem.codecs import decode_weight, encode_weight
from tests import tolerances

BF16, F32 = jnp.bfloat16, jnp.float32
FORMATS = ("int8", "e4m3")
DRAWS, LENGTH = 4096, 72  # the last group is partial


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_the_neighbours_without_bias(name):
    """The largest magnitudes too, and so often that the mean is known."""
    form, layout, rng = WEIGHT_FORMATS[name], Layout(32, LENGTH), np.random.default_rng(0)
    x = rng.normal(0, 0.02, LENGTH) * np.exp(rng.normal(0, 1, LENGTH))
    x[:32] = np.linspace(-1, 1, 32) * np.array([1.999] * 31 + [1.0])
    x = np.float32(x)
    bits = jnp.asarray(rng.integers(0, 2**32, (DRAWS, LENGTH)), jnp.uint32)
    round_all = jax.jit(jax.vmap(lambda bits: form.round(x, bits, layout)))
    found, spacing = np.float64(round_all(bits)), np.float64(form.spacing(x, layout))
    assert (np.abs(found - x) <= spacing).all()
    assert all(len(np.unique(column)) <= 2 for column in found.T)
    deviation = spacing / 2 / np.sqrt(DRAWS)
    assert (np.abs(found.mean(0) - x) <= tolerances.STANDARD_ERRORS_OF_MANY * deviation).all()
    # values of the format stay, also where the random number is the one next to 1
    most = jnp.full(LENGTH, 2**32 - 1, jnp.uint32)
    again = jax.jit(jax.vmap(lambda x: form.round(x, most, layout)))(jnp.float32(found))
    np.testing.assert_array_equal(np.float64(again), found)


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_that_is_not_finite_is_nan_and_others_are_not(name):
    form, layout = WEIGHT_FORMATS[name], Layout(32, 192)
    x = np.ones(192, np.float32)
    x[[1, 33]] = np.nan, -np.inf
    x[64:96] = 0
    x[96:128] = 1e-38
    x[128] = 1e30
    found = form.round(jnp.asarray(x), jnp.zeros(192, jnp.uint32), layout)
    np.testing.assert_array_equal(np.isnan(np.float32(found)), np.arange(192) < 64)
    np.testing.assert_array_equal(np.float32(found[64:128]), 0)
    stored = encode_weight(found, name)
    np.testing.assert_array_equal(np.float32(decode_weight(stored)), np.float32(found))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group_size", [32, 48])
def test_codes_hold_what_a_step_returns(name, group_size):
    storage = lowmem.Storage(
        weights=name, group_size=group_size, master_weight_bits=None, master_rounding="stochastic",
        error_feedback=True,
    )  # fmt: skip
    tx, rng = lowmem.flash_adamw(1e-2, storage=storage), np.random.default_rng(1)
    params = {
        "w": jnp.asarray(rng.normal(0, 1, (96, 200)) * np.exp(rng.normal(0, 3, (96, 1))), BF16),
        "norm": jnp.ones(200, BF16),
    }
    state, step = tx.init(params), jax.jit(functools.partial(lowmem.step, tx))
    for _ in range(3):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 1, p.shape), F32), params)
        params, state = step(grads, state, params)
    stored = encode_weight(params["w"], name, group_size)
    assert stored.codes.dtype.itemsize == stored.scales.dtype.itemsize == 1
    assert stored.codes.shape == (96, 200) and stored.scales.shape == (96, -(-200 // group_size))
    decoded = decode_weight(stored, group_size)
    np.testing.assert_array_equal(np.float32(decoded), np.float32(params["w"]))
    small = decode_weight(encode_weight(params["norm"], name, group_size), group_size)
    assert np.any(small != params["norm"])  # a small leaf has all values of bf16
    said = {
        d.path: d.reason for d in lowmem.explain(tx, params).decisions if d.slot == "correction"
    }
    assert f"to values of {name} in groups of {group_size}" in said["w"]
    assert "to values of" not in said["norm"]


def test_says_what_it_needs():
    rounded = {"master_weight_bits": None, "master_rounding": "stochastic"}
    with pytest.raises(ValueError, match="weights='int8' is for weights without a correction"):
        lowmem.Storage(weights="int8")
    with pytest.raises(ValueError, match="weights must be one of bfloat16, int8, e4m3, got 'int4'"):
        lowmem.Storage(weights="int4", **rounded)
    with pytest.raises(
        ValueError, match="weights='e4m3' needs update_dtype='float32', got 'param'"
    ):
        lowmem.Storage(weights="e4m3", update_dtype="param", **rounded)
    with pytest.raises(ValueError, match="mu and nu are None"):
        lowmem.flash_adamw(
            1e-3, storage=lowmem.Storage(weights="int8", mu=None, nu=None, **rounded)
        )
    with pytest.raises(ValueError, match="weights must be one of int8, e4m3"):
        encode_weight(jnp.ones((4, 4)), "bfloat16")
