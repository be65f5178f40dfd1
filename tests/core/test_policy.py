"""Tests of the policy: leaves and slots that stay uncompressed, and the recorded reasons."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.tree_util import DictKey, GetAttrKey

import optax_lowmem as lowmem
from optax_lowmem import Policy, Storage, codecs
from optax_lowmem._src.arrays import trees


def params():
    def ones(*shape):
        return jnp.ones(shape, jnp.bfloat16)

    return {
        "embed": {"w": ones(64, 128)},
        "layers": [{"w": ones(64, 64), "bias": ones(64)}, {"w": ones(64, 63), "bias": ones(64)}],
        "scale": ones(),
        "none": ones(0, 4),
    }


LARGE = {"embed/w", "layers/0/w"}  # 64 * 63 = 4032 is under the default min_size


def flash(policy):
    return lowmem.flash_adamw(1e-3, storage=Storage(policy=policy))


def compressed(policy):
    slots = {"mu": codecs.softsign(), "nu": codecs.sqrt()}
    return lowmem.compress_state(optax.adamw(1e-3), policy=policy, **slots)


both = pytest.mark.parametrize("make", [flash, compressed], ids=["flash", "compress_state"])


def stored(tx):
    """slot -> the paths whose state holds codes; a scale of 0 dimensions beside every other."""
    state = tx.init(params())
    found = {}
    for slot, dtype in (("mu", jnp.int8), ("nu", jnp.uint8)):
        leaves = jax.tree_util.tree_leaves_with_path(optax.tree.get(state, slot))
        paths = {jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in leaves}
        found[slot] = {path for path, a in paths.items() if a.dtype == dtype}
        assert all(a.dtype == jnp.float32 for path, a in paths.items() if path not in found[slot])
    return found


def reasons(tx):
    return lowmem.memory.report(tx, params()).reasons


@both
def test_default(make):
    tx = make(Policy())
    assert stored(tx) == {"mu": LARGE, "nu": LARGE}
    kept = reasons(tx)
    assert kept["layers/1/w"]["mu"] == "4032 elements, fewer than min_size=4096"
    assert kept["layers/0/bias"]["nu"] == "64 elements, fewer than min_size=4096"
    assert kept["scale"]["mu"] == "a 0-d leaf has no group"
    assert kept["none"]["mu"] == "the leaf is empty"
    assert not LARGE & {path for path, slots in kept.items() if {"mu", "nu"} & slots.keys()}


@both
def test_min_size(make):
    everything = LARGE | {"layers/1/w", "layers/0/bias", "layers/1/bias"}
    assert stored(make(Policy(min_size=0)))["mu"] == everything
    assert stored(make(Policy(min_size=4032)))["mu"] == LARGE | {"layers/1/w"}
    assert stored(make(Policy(min_size=4033)))["mu"] == LARGE
    assert stored(make(Policy(min_size=8193)))["mu"] == set()


@both
def test_patterns(make):
    tx = make(Policy(exclude=("*embed*",)))
    assert stored(tx) == {"mu": {"layers/0/w"}, "nu": {"layers/0/w"}}
    assert reasons(tx)["embed/w"]["mu"] == "excluded by the pattern '*embed*'"


@both
def test_patterns_of_one_slot(make):
    tx = make(Policy(exclude=("nu:embed/*",)))
    assert stored(tx) == {"mu": LARGE, "nu": {"layers/0/w"}}
    assert reasons(tx)["embed/w"] == {"nu": "excluded by the pattern 'nu:embed/*'"}


MASKS = {
    "tree": {
        "embed": {"w": False},
        "layers": [{"w": True, "bias": True}, {"w": True, "bias": True}],
        "scale": True,
        "none": True,
    },
    "prefix": {"embed": False, "layers": True, "scale": True, "none": True},
    "function": lambda tree: jax.tree.map(lambda p: p.shape != (64, 128), tree),
    "function of a prefix": lambda tree: {name: name != "embed" for name in tree},
}


@both
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(make, mask):
    tx = make(Policy(mask=mask))
    assert stored(tx) == {"mu": {"layers/0/w"}, "nu": {"layers/0/w"}}
    assert reasons(tx)["embed/w"]["mu"] == "the policy's mask is False here"
    assert "bias" not in reasons(tx)


@both
def test_uncompressed_leaves_step_like_optax(make):
    """f32 moments are optax's own, to f32 rounding: all leaves but the large ones."""
    tx, plain, weights = make(Policy()), optax.adamw(1e-3), params()
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.1, jnp.float32), weights)
    _, ours = tx.update(grads, tx.init(weights), weights)
    full = jax.tree.map(lambda p: p.astype(jnp.float32), weights)
    _, theirs = plain.update(grads, plain.init(full), full)
    for slot in ("mu", "nu"):
        mine, reference = (optax.tree.get(s, slot)["layers"][1] for s in (ours, theirs))
        for name in ("w", "bias"):
            assert jnp.allclose(mine[name], reference[name], rtol=1e-6, atol=0)


def test_reason_of_a_slot_without_codec():
    tx = lowmem.flash_adamw(1e-3, storage=Storage(nu=None))
    assert reasons(tx)["embed/w"] == {"nu": "storage.nu is None"}


def test_reason_of_a_block_wise_slot():
    """Why it is not compressed, beside why its block has that form."""
    nu = lowmem.codecs.linear(signed=False)
    storage = Storage(nu=nu, policy=Policy(min_size=0, exclude=("*w",)))
    tx = lowmem.flash_adam_mini(1e-3, storage=storage)
    decisions = lowmem.explain(tx, {"mlp": {"w": jnp.ones((64, 64))}}).decisions
    (found,) = (d for d in decisions if d.slot == "nu")
    assert "pattern" in found.reason and found.form.startswith("f32")


def test_a_parameter_that_is_called_value():
    """Its name is its own; that of a box's content is the box's."""
    params = {"attention": {name: jnp.ones((64, 64)) for name in ("query", "key", "value")}}
    policy = Policy(exclude=("*/value",))
    mu = lowmem.flash_adamw(1e-3, storage=Storage(policy=policy)).init(params).mu["attention"]
    assert {name: leaf.dtype for name, leaf in mu.items()} == {
        "query": jnp.int8, "key": jnp.int8, "value": jnp.float32}  # fmt: skip
    seen, _ = lowmem.init(lowmem.gaussws_noise(lowmem.flash_adamw(1e-3), "qkv"), params)
    assert all((leaf != 1).any() for leaf in seen["attention"].values())
    assert trees.path_name((DictKey("w"), GetAttrKey("value"))) == "w"
