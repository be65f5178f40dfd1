"""optax.named_chain, whose state is a dict in the order of its links, is a chain."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from tests.contract_cases import assert_same

PARAMS = {"w": jnp.linspace(-1, 1, 256).reshape(4, 64)}
GRADS = {"w": jnp.full((4, 64), 0.1)}


def both(*links):
    """A chain by position and by names that sort otherwise."""
    return optax.chain(*links), optax.named_chain(*zip("zyx", links, strict=False))


def test_what_changes_updates_after_the_split_raises():
    for tx in both(lowmem.flash_sgd(1.0), optax.scale(1e-4)):
        with pytest.raises(ValueError, match="changed after the split of their master weights"):
            lowmem.init(tx, PARAMS)
    for tx in both(optax.clip_by_global_norm(1.0), lowmem.flash_sgd(1.0)):
        lowmem.init(tx, PARAMS)  # a warning is an error here


@pytest.mark.parametrize(
    "compressed",
    [
        lambda tx: lowmem.compress_state(tx, mu=lowmem.codecs.softsign()),
        lowmem.sqrt_variance_quant,
        lambda tx: lowmem.update_clipping(tx, b2=0.999, eps=1e-8),
    ],
)
def test_slots_are_found(compressed):
    found = []
    for tx in both(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-3)):
        tx, params = compressed(tx), PARAMS
        state = tx.init(params)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(GRADS, state, params)
            params = optax.apply_updates(params, updates)
        found.append((params, jax.tree.leaves(state)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_by_slot():
    chains = both(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3))
    by_position, by_name = (lowmem.memory.report(tx, PARAMS).by_slot for tx in chains)
    assert by_position == by_name and "mu" in by_name


def test_from_optax_and_back():
    found = []
    clip = optax.clip_by_global_norm(1.0)
    ours, plain = both(clip, lowmem.flash_adamw(1e-3)), both(clip, optax.adamw(1e-3))
    for tx, source in zip(ours, plain, strict=True):
        _, old = source.update(GRADS, source.init(PARAMS), PARAMS)
        weights, state = checkpoint.from_optax(tx, old, PARAMS)
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(weights))
        params, back = checkpoint.to_optax(tx, state, weights, source)
        assert jax.tree.structure(back) == jax.tree.structure(old)
        found.append(jax.tree.leaves((weights, state, params, back)))
    assert_same(*found)


def test_a_checkpoint_comes_back(tmp_path):
    _, tx = both(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3))
    params, state = lowmem.init(tx, PARAMS)
    params, state = lowmem.step(tx, GRADS, state, params)
    checkpoint.save(tmp_path, tx, params, state, step=1)
    assert_same(checkpoint.restore(tmp_path, tx, params), (params, state))


@pytest.mark.parametrize("chained", [False, True])
def test_a_transformation_that_passed_through_tree_functions(chained):
    """As `equinox.filter_jit` does with an argument: the functions are leaves of the tuple."""
    tx = lowmem.flash_adamw(1e-2)
    tx = lowmem.chain(optax.clip(1.0), tx) if chained else tx
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
    grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    rebuilt = jax.tree.map(lambda function: function, tx)
    for one, other in zip(
        jax.tree.leaves(lowmem.step(tx, grads, state, params)),
        jax.tree.leaves(lowmem.step(rebuilt, grads, state, params)),
        strict=True,
    ):
        assert (one == other).all()


def test_the_signature_of_a_chain():
    """Programs look at it for the arguments that `update` takes."""
    update = lowmem.chain(lowmem.flash_adamw(1e-2)).update
    assert list(inspect.signature(update).parameters) == ["updates", "state", "params", "extra"]
