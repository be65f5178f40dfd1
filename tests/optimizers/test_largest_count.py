"""A count that has no next number stays, as optax's does, and the step has one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import contract_cases as cases
from tests.tiers import rows

LARGEST = 2**31 - 1
WRAPPED = {
    "nesterov": lambda: lowmem.flash_adamw(1e-2, nesterov=True),
    "b2_schedule": lambda: lowmem.flash_adamw(1e-2, b2=lowmem.b2_schedule()),
    "mean": lambda: lowmem.accumulate_gradients(lowmem.flash_adamw(1e-2), 2, "bfloat16"),
    "moments": lambda: lowmem.accumulate_gradients(lowmem.flash_adamw(1e-2), 2, "moments"),
    "ema": lambda: lowmem.track_master_ema(lowmem.flash_adamw(1e-2), 0.9),
    "compress": lambda: lowmem.split_master_weights(
        lowmem.compress_state(optax.adamw(1e-2), mu=lowmem.codecs.softsign())
    ),
}


def is_count(x):
    return x.dtype == jnp.int32 and not x.ndim


@pytest.mark.parametrize(
    "name", rows([*lowmem.OPTIMIZERS, *WRAPPED], [*list(cases.RULES)[::3], *WRAPPED])
)
def test_the_largest_count_stays(name):
    make = WRAPPED[name] if name in WRAPPED else lambda: cases.CASES[name].make(1e-2, cases.Form())
    tx = make()
    params, state = lowmem.init(tx, {"w": jnp.ones((4, 32)), "b": jnp.ones(8)})
    state = jax.tree.map(lambda x: jnp.full_like(x, LARGEST) if is_count(x) else x, state)
    micro = name in ("mean", "moments")
    if micro:  # the place in the sum is no count of steps
        state = state._replace(micro_step=jnp.zeros((), jnp.int32))
    update = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.01), params)
    for _ in range(3 if micro else 2):
        params, state = update(grads, state, params)
    counts = [int(x) for x in jax.tree.leaves(state) if is_count(x)]
    assert sorted(counts) == [1] * micro + [LARGEST] * (len(counts) - micro)
    masters = lowmem.master_params(params, state)
    moved = [np.abs(np.asarray(w) - 1).max() for w in jax.tree.leaves(masters)]
    assert all(1e-5 < by < 20 for by in moved), moved  # of moments that start at 0
