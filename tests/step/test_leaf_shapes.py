"""Leaves without a group beside leaves with one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import small_leaves
from tests.tiers import rows


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(lowmem.OPTIMIZERS, [jnp.float32, jnp.bfloat16]),
        # of rules that differ in what a leaf is to them
        [
            ("flash_lion", jnp.bfloat16),
            ("flash_muon", jnp.float32),
            ("flash_factored_adamw", jnp.bfloat16),
            ("q_adam_mini", jnp.float32),
        ],
    ),
)
def test_scalar_and_empty_leaves(name, dtype):
    """They keep f32 slots, so a scalar moves as the plain optimizer's f32 one does."""
    row = small_leaves.record(name)
    tx = row.make(row.learning_rate, storage=lowmem.Storage(policy=lowmem.Policy(min_size=0)))
    plain = row.plain(row.learning_rate)
    masters = {"scalar": jnp.float32(1.5), "empty": jnp.zeros(0), "hollow": jnp.zeros((3, 0, 2)),
               "one": jnp.full((1,), 0.5), "odd": jnp.full((2, 33), 0.25)}  # fmt: skip
    params, state = lowmem.init(tx, masters, dtype)
    reference, plain_state = masters, plain.init(masters)
    assert state.mu["scalar"].dtype == jnp.float32 and state.mu["odd"].dtype == jnp.int8
    step, plain_step = jax.jit(functools.partial(lowmem.step, tx)), jax.jit(plain.update)
    for size in (1.0, -0.25, 0.5):
        grads = jax.tree.map(lambda p, size=size: jnp.full(p.shape, size), masters)
        params, state = step(grads, state, params)
        updates, plain_state = plain_step(grads, plain_state, reference)
        reference = optax.apply_updates(reference, updates)
    got = lowmem.master_params(params, state)
    if row.rule.prepares == "matrices":  # of rank 1: rounding's rows grow to its size
        assert np.isfinite(got.pop("odd")).all()
    for path, leaf in got.items():
        assert leaf.shape == masters[path].shape and params[path].dtype == dtype
        moved = np.abs(reference[path] - masters[path])
        # 24-bit masters: three roundings; codes of groups of equal values: half a code of 127
        allowed = 3 * 2.0**-16 * np.abs(masters[path]) + (0 if path == "scalar" else 0.02) * moved
        assert (np.abs(leaf - reference[path]) <= allowed).all()
        assert not moved.size or moved.min() > 0
