"""Optimizers, meshes and comparisons of states, shared by the tests of checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from tests import contract_cases as cases
from tests.meshes import mesh_of as mesh_of

SMALL = lowmem.Storage(policy=cases.POLICY)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def scrambled(tree, seed=0):
    """Random bits in every array, NaN payloads and subnormals among them."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        bits = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
        return jnp.asarray(bits.view(x.dtype).reshape(x.shape))

    return jax.tree.map(leaf, tree)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    paths = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(paths, jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def adamw(**storage):
    return lowmem.flash_adamw(1e-3, storage=dataclasses.replace(SMALL, **storage))


def two_steps(path):
    tx = lowmem.flash_adamw(1e-2, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    later = scrambled((params, state))
    checkpoint.save(path, tx, params, state, step=1)
    checkpoint.save(path, tx, *later, step=2)
    return tx, (params, state), later
