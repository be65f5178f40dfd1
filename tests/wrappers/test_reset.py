"""`lowmem.reset`: exact zeros where asked, the same values elsewhere, in every codec."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage, codecs
from optax_lowmem.checkpoint import to_optax
from tests.tiers import rows

RNG = np.random.default_rng(0)
STORAGES = {
    "flash": Storage(),
    "affine": Storage(mu=codecs.affine(), nu=codecs.affine_paper(), group_size=32),
    "fp8": Storage(mu=codecs.expanded_e4m3(), nu=codecs.expanded_e4m3(signed=False)),
    "four bits": Storage.four_bit(),
    "ulp": Storage(split="ulp"),
    "f32": Storage(mu=None, nu=None),
}
MASKS = {
    "rows": np.arange(64)[:, None] % 3 == 0,
    "columns": np.arange(95)[None] % 5 == 1,
    "elements": RNG.random((64, 95)) < 0.1,
}


def trained(tx):
    params, state = lowmem.init(tx, {"a": jnp.ones((64, 95)), "b": jnp.ones(3), "c": jnp.ones(5)})
    step = jax.jit(functools.partial(lowmem.step, tx))
    for _ in range(2):
        grads = jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), p.dtype), params)
        params, state = step(grads, state, params)
    return params, state


@pytest.mark.parametrize("name", rows(STORAGES, ["flash", "four bits"]))
def test_zero_where_asked_and_the_same_elsewhere(name):
    tx = lowmem.flash_adamw(0.1, weight_decay=0.0, storage=STORAGES[name])
    params, state = trained(tx)
    before = to_optax(tx, state, params)
    for mask in MASKS.values():
        new = jax.jit(lambda state, mask: lowmem.reset(state, {"a": mask}))(state, mask)
        after = to_optax(tx, new, params)
        for slot in ("mu", "nu"):
            old = optax.tree_utils.tree_get(before, slot)
            found = optax.tree_utils.tree_get(after, slot)
            np.testing.assert_array_equal(found["a"], np.where(mask, 0, old["a"]))
            np.testing.assert_array_equal(found["b"], old["b"])
        jax.tree.map(np.testing.assert_array_equal, new.correction, state.correction)
    # a step of zero gradients moves no weight whose moments were reset
    new = lowmem.reset(state, {"a": MASKS["rows"], "b": True, "c": True})
    kept, _ = lowmem.step(tx, jax.tree.map(jnp.zeros_like, params), new, params)
    rows = MASKS["rows"][:, 0]
    np.testing.assert_array_equal(kept["a"][rows], params["a"][rows])
    np.testing.assert_array_equal(kept["b"], params["b"])
    assert (kept["a"][~rows] != params["a"][~rows]).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_lion(0.1)),
        lambda: lowmem.split_master_weights(
            optax.masked(
                lowmem.flash_adam(0.1, storage=Storage(master_weight_bits=None)),
                {"a": True, "b": False, "c": True},
            )
        ),
        lambda: optax.MultiSteps(lowmem.flash_adamw(0.1), 2).gradient_transformation(),
        pytest.param(
            lambda: lowmem.inject_hyperparams(lowmem.flash_sgd)(0.1, momentum=0.9),
            marks=pytest.mark.full,
        ),
        lambda: lowmem.split_master_weights(
            lowmem.compress_state(optax.adam(0.1), mu=codecs.softsign(), nu=codecs.sqrt())
        ),
        pytest.param(lambda: lowmem.split_master_weights(optax.adam(0.1)), marks=pytest.mark.full),
        lambda: lowmem.flash_factored_adamw(0.1, min_dim_size_to_factor=32),
    ],
)
def test_all_moments_of_a_wrapped_state(make):
    params, state = trained(make())
    new = lowmem.reset(state)
    kept = ("count", "seed", "correction", "mini_step", "gradient_step", "acc_grads", "hyperparams")
    seen = 0
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(state), strict=True
    ):
        if any(name in jax.tree_util.keystr(path) for name in kept):
            np.testing.assert_array_equal(x, y)
        else:
            seen += 1
            assert not np.asarray(x).any(), jax.tree_util.keystr(path)
    assert seen and jax.tree.structure(new) == jax.tree.structure(state)


def test_a_row_that_is_not_finite_is_cleared():
    tx = lowmem.flash_adamw(0.1)
    params, state = trained(tx)
    grads = jax.tree.map(jnp.zeros_like, params)
    grads["a"] = grads["a"].at[5, 7].set(jnp.nan)
    _, state = lowmem.step(tx, grads, state, params)
    state = lowmem.reset(state, {"a": np.arange(64)[:, None] == 5})
    assert np.isfinite(optax.tree_utils.tree_get(to_optax(tx, state, params), "nu")["a"]).all()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": np.ones((64, 1), np.int32)}, r"where\['a'\] is int32"),
        ({"a": np.ones(64, bool)}, r"where\['a'\] fits no moment .*\(64,\)"),
        ({"a": np.ones((63, 1), bool)}, r"where\['a'\] fits no moment"),
        ({"d": True}, r"where\['d'\] fits no moment"),
    ],
)
def test_masks_that_fit_nothing(where, message):
    _, state = trained(lowmem.flash_adamw(0.1))
    with pytest.raises((TypeError, ValueError), match=message):
        lowmem.reset(state, where)
