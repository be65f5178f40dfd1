"""A new optimizer is a rule and a record: RMSprop with momentum, as optax has it, put in the table.

It then passes what the tests of the table ask of every optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from benchmarks.peers import cases as benchmark
from tests import contract_cases as cases
from tests import tolerances
from tests.checkpoint import test_checkpoint_optax as of_checkpoint
from tests.contract import test_contract_matrix as of_contract
from tests.pages import page_block

FILE = page_block("docs/internals/extending.md", "class RmsRule")  # the file of the optimizer
flash_rmsprop, RECORD = FILE["flash_rmsprop"], FILE["RECORD"]
# where master_params looks for states
FILE["FlashRmsState"].__module__ = "optax_lowmem._src.optim.optimizers.rmsprop"
NAME = "flash_rmsprop"


@pytest.fixture
def table(monkeypatch):
    """The tables with the new optimizer."""
    monkeypatch.setitem(lowmem.OPTIMIZERS, NAME, RECORD)
    monkeypatch.setitem(cases.CASES, NAME, cases.case_of(NAME))


# ---- what every optimizer owes -------------------------------------------------------------------
@pytest.mark.parametrize("wrapper", ["chain", "inject_hyperparams"])
def test_it_follows_optax(table, wrapper):
    of_contract.test_pairs_of_choices_follow_plain_optax(
        NAME, "bfloat16", 24, 32, "stochastic", wrapper
    )


def test_in_f32_it_is_optaxs():
    """The rate comes before the momentum, so that a schedule's rates lie in the trace."""
    schedule = optax.linear_schedule(1e-2, 0.0, 8)
    params = cases.masters()
    tx = flash_rmsprop(schedule, storage=lowmem.Storage.full_precision())
    plain = RECORD.plain(schedule)
    gradients = cases.stream(params, 8)
    found, state = cases.train(tx, params, tx.init(params), gradients)
    wanted, old = cases.train(plain, params, plain.init(params), gradients)
    trace = optax.tree.get(old, "trace")
    pairs = zip(jax.tree.leaves((found, state.mu)), jax.tree.leaves((wanted, trace)), strict=True)
    for one, other in pairs:
        size = float(np.abs(other).max())  # of terms that may cancel
        limits = {"rtol": tolerances.REORDERED_SLOT, "atol": tolerances.REORDERED_SLOT * size}
        np.testing.assert_allclose(one, other, **limits)


def test_its_state_goes_to_optax_and_back(table):
    of_checkpoint.test_there_and_back(NAME)


def test_its_counterpart_is_found(table):
    """At a constant rate and with a schedule, whose count optax keeps by itself."""
    of_checkpoint.test_the_optax_optimizer_is_found(NAME)


def test_its_corrections_are_found():
    params = {"w": jnp.full((64, 128), 0.1)}
    weights, state = lowmem.init(flash_rmsprop(1e-3), params)
    found = lowmem.master_params(weights, state)["w"]
    np.testing.assert_allclose(found, params["w"], rtol=tolerances.MASTER_24_MAX)
    assert found[0, 0] != weights["w"][0, 0]
    with pytest.raises(TypeError, match="optimizer's state"):
        lowmem.master_params(state, weights)


def test_memory_and_explain(table):
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    tx = RECORD.make(1e-3)
    report = lowmem.memory.report(tx, params)
    # codes, a correction, scales of 2 and 4 bytes a group of 32; count and seed
    assert report.state_bytes == 64 * 128 * (1 + 1 + 1) + 64 * 4 * (2 + 4) + 8
    forms = {d.slot: d.form for d in lowmem.explain(tx, params).decisions}
    assert forms == {"mu": "softsign-int8", "nu": "sqrt-uint8", "correction": "bits-24"}


def test_a_case_of_the_benchmark():
    """By optax's name for it, with the arguments that optax's takes."""
    assert RECORD.short_name == "rmsprop" and RECORD.moments == ("mu", "nu")
    hyper = benchmark.hyperparameters(RECORD)
    assert hyper == {"learning_rate": 5e-4, "momentum": 0.9}
    RECORD.make(**hyper), RECORD.in_optax(**hyper)
