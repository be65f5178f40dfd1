"""Leaves whose names collide: refused where they would be told apart by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.arrays import random, trees
from tests.checkpoint_cases import assert_same_bits


def leaf(value):
    return jnp.full((2, 64), value)


ONE_NAME = {"a/b": leaf(1.0), "a": {"b": leaf(2.0)}}
ONE_DOTTED = {
    "a.b": {"a.b": leaf(1.0), "a": {"b": leaf(2.0)}},
    "layer.0": {"layer.0": leaf(1.0), "layer": {0: leaf(2.0)}},
}
TX = lowmem.flash_adamw(1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda tree: lowmem.init(TX, tree),
        lambda tree: TX.init(tree),
        lambda tree: lowmem.split_master_weights(optax.adam(1e-3)).init(tree),
        lambda tree: lowmem.explain(TX, tree),
        lambda tree: checkpoint.from_optax(TX, optax.adamw(1e-3).init(tree), tree),
        lambda tree: checkpoint.metadata(optax.adam(1e-3), tree),
    ],
)
def test_one_name_of_two_leaves_is_refused(call):
    with pytest.raises(ValueError, match=r"\['a'\]\['b'\] and \['a/b'\] would both be called"):
        call(ONE_NAME)


@pytest.mark.parametrize("name", ONE_DOTTED)
def test_names_that_only_files_join(name, tmp_path):
    tree = ONE_DOTTED[name]
    weights, state = lowmem.init(TX, tree)
    weights, state = lowmem.step(TX, jax.tree.map(jnp.ones_like, weights), state, weights)
    kept = jax.tree.leaves(lowmem.master_params(weights, state))
    assert sorted(round(float(w[0, 0])) for w in kept) == [1, 2]
    with pytest.raises(ValueError, match=f"would both be called '{name}' in an Orbax checkpoint"):
        checkpoint.save(tmp_path / "all", TX, weights, state, 1)
    with pytest.raises(ValueError, match=f"would both be called '{name}' in the file"):
        checkpoint.export(tmp_path / "w.safetensors", weights, state)
    assert not list(tmp_path.glob("*"))


def test_keys_with_separators_that_collide_with_nothing(tmp_path):
    """Haiku's names: saved and restored, and their random keys are of the joined name."""
    tree = {"mlp/~/linear": {"w": leaf(0.1)}, "mlp/~/norm.1": {"w": leaf(0.3)}}
    assert [name for name, _ in trees.named_leaves(tree)] == ["mlp/~/linear/w", "mlp/~/norm.1/w"]
    assert random.path_hash("mlp/~/linear/w") == np.uint32(0x08E73DD3)
    weights, state = lowmem.init(TX, tree)
    checkpoint.save(tmp_path, TX, weights, state, 1)
    assert_same_bits(checkpoint.restore(tmp_path, TX, weights), (weights, state))
