"""Loops that add updates to the weights without a cast, by Equinox's `apply_updates`."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from tests.contract_cases import assert_same
from tests.tiers import in_turn, rows

PARAMS = {"w": jnp.linspace(-1, 1, 6144).reshape(48, 128), "b": jnp.ones(8), "s": jnp.float32(2)}
SOFTSIGN = {"mu": lowmem.codecs.softsign()}
MADE = {
    "flash_adamw": lambda dtype: lowmem.flash_adamw(1e-2, storage=Storage(update_dtype=dtype)),
    "flash_sgd": lambda dtype: lowmem.flash_sgd(1e-2, storage=Storage(update_dtype=dtype)),
    "split": lambda dtype: lowmem.split_master_weights(
        lowmem.compress_state(optax.adamw(1e-2), **SOFTSIGN), update_dtype=dtype
    ),
    "around": lambda dtype: optax.apply_if_finite(
        lowmem.flash_adamw(1e-2, storage=Storage(update_dtype=dtype)), 5
    ),
}


@jax.jit
def gradient(params):
    return jax.tree.map(lambda p: (p - 0.1).astype(p.dtype), params)


@pytest.mark.parametrize(
    "name, dtype", in_turn([name for name in MADE if name != "around"], ["float16", "bfloat16"])
)
def test_a_promoted_weight_is_named_with_the_cure(name, dtype):
    tx = MADE[name]("float32")  # optax's own condition refuses f32 updates of 16-bit gradients
    params, state = lowmem.init(tx, PARAMS, dtype)
    updates, state = tx.update(gradient(params), state, params)
    promoted = eqx.apply_updates(params, updates)
    assert promoted["w"].dtype == jnp.float32
    message = r"'\w' is float32, .*16-bit.*without a cast.*Storage\(update_dtype='param'\)"
    with pytest.raises(ValueError, match=message):
        tx.update(gradient(promoted), state, promoted)


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(MADE, ["bfloat16", "float16"]),
        [("flash_sgd", "float16"), ("split", "bfloat16")],
    ),
)
def test_updates_in_the_dtype_of_the_weights(name, dtype):
    make = MADE[name]
    tx = make("param")
    params, state = lowmem.init(tx, PARAMS, dtype)
    start = lowmem.master_params(params, state)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), eqx.apply_updates(params, updates), state

    for _ in range(3):
        cast, params, state = step(params, state)
        assert_same(params, cast)  # in its dtypes too
    end = lowmem.master_params(params, state)
    assert (np.abs(end["w"] - start["w"]) > 0).mean() > 0.9
