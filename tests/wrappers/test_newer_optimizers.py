"""Schedule-free, Prodigy, cautious and MARS: the table and the code of docs/api/wrappers.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.pages import ROOT, page_block
from tests.tiers import rows
from tests.tolerances import LOSS_OF_LOOPS

PAGE = "docs/api/wrappers.md"
NAMES = ("schedule-free AdamW", "Prodigy", "cautious Adam", "MARS-AdamW")


@functools.cache
def optimizers():
    """{name: (in f32, with low memory)}."""
    names = page_block(PAGE, "def cautious")
    assert tuple(names["in_f32"]) == tuple(names["low_memory"]) == NAMES
    return {name: (names["in_f32"][name], names["low_memory"][name]) for name in NAMES}


def problem():
    """Weights, and the loss of a linear model that has to find others."""
    rng = np.random.default_rng(0)
    x, target = (jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for _ in range(2))
    loss = lambda p: jnp.mean((x @ (p["w"].astype(jnp.float32) - target / 8)) ** 2)  # noqa: E731
    return {"w": jnp.zeros((64, 64))}, loss


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name):
    found = []
    for tx, dtype in zip(optimizers()[name], (jnp.float32, jnp.bfloat16), strict=True):
        like = {"w": jax.ShapeDtypeStruct((1024, 1024), dtype)}
        assert lowmem.explain(tx, like).warnings == ()
        report = lowmem.memory.report(tx, like)
        found.append(report.total_bytes / report.parameters)
    row = "| {} | {:.2f} | {:.2f} |".format(name, *found)
    assert row in (ROOT / PAGE).read_text("utf-8")


@pytest.mark.parametrize("name", rows(NAMES, ["Prodigy", "MARS-AdamW"]))
def test_same_loss_as_in_f32(name):
    ends = []
    for tx, dtype in zip(optimizers()[name], (jnp.float32, jnp.bfloat16), strict=True):
        weights, loss_fn = problem()

        @jax.jit
        def step(params, state, tx=tx, loss_fn=loss_fn):
            loss, grads = jax.value_and_grad(loss_fn)(params)
            return *lowmem.step(tx, grads, state, params), loss

        params, state = lowmem.init(tx, weights, dtype)
        losses = []
        for _ in range(60):
            params, state, loss = step(params, state)
            losses.append(float(loss))
        ends.append(losses[-1])
    if name.startswith("schedule-free"):
        masters = lowmem.master_params(params, state)
        inner = state.inner_state.inner_state
        averaged = optax.contrib.schedule_free_eval_params(inner, masters)
        assert float(loss_fn(averaged)) < losses[0]
    assert ends[0] < 0.5 * losses[0]
    np.testing.assert_allclose(ends[1], ends[0], rtol=LOSS_OF_LOOPS)
