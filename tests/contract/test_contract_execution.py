"""Every optimizer under JAX's own transformations: scan, cond, vmap, donation, x64, debug_nans."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import (
    CASES,
    OPTIMIZER,
    Form,
    assert_same,
    at,
    code_differences,
    codes_shape,
    masters,
    stream,
    third,
)
from tests.tiers import rows

_compiled = jax.jit


def _make(name: str, **form: Any) -> optax.GradientTransformationExtraArgs:
    return CASES[name].make(CASES[name].step, Form(**form))


@functools.cache
def _begun(name: str) -> tuple[Any, Any, Any]:
    tx = _make(name)
    return tx, *lowmem.init(tx, masters())


@functools.cache
def _step(name: str) -> Any:
    tx = _begun(name)[0]
    return _compiled(lambda g, s, p, **extra: lowmem.step(tx, g, s, p, **extra))


def _gradient() -> Any:
    return at(stream(masters(), 1), 0)


@OPTIMIZER
def test_state_is_a_plain_tree_that_eval_shape_knows(name):
    tx, params, state = _begun(name)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, params), state)
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
    for slot in CASES[name].slots:
        tree = optax.tree.get(state, slot)
        assert jax.tree.structure(tree) == jax.tree.structure(params)
        assert tree["block"]["w"].shape == codes_shape(name, params["block"]["w"].shape)
        assert tree["block"]["w"].dtype in (jnp.int8, jnp.uint8)
        assert tree["norm"].dtype == jnp.float32


@OPTIMIZER
def test_slots_and_count_can_be_got_set_and_mapped(name):
    tx, params, state = _begun(name)
    for slot in CASES[name].slots:
        doubled = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), optax.tree.get(state, slot))
        changed = optax.tree.set(state, **{slot: doubled})
        assert_same(optax.tree.get(changed, slot), doubled)
        chex.assert_trees_all_equal_shapes_and_dtypes(changed, state)
    counts = optax.tree.get_all_with_path(state, "count")
    assert counts and all(int(value) == 0 for _, value in counts)
    counted = _step(name)(_gradient(), state, params)[1]
    assert all(int(value) == 1 for _, value in optax.tree.get_all_with_path(counted, "count"))
    again = optax.tree.set(counted, count=jnp.zeros((), jnp.int32))
    # optax does not look inside a state whose own field it has set: that of compress_state here
    inside = name.startswith("optax.") and len(counts) > 2
    zeros = [int(value) for _, value in optax.tree.get_all_with_path(again, "count")].count(0)
    assert zeros == (len(counts) - 1 if inside else len(counts))


@OPTIMIZER
def test_map_params_reaches_every_tree_of_the_parameters(name):
    tx, params, state = _begun(name)
    names = {"block": {"w": "w"}, "norm": "norm"}
    mapped = optax.tree.map_params(
        tx, lambda leaf, label: label, state, names, transform_non_params=lambda leaf: "other"
    )
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    for leaf, label in zip(jax.tree.leaves(state), jax.tree.leaves(mapped), strict=True):
        if leaf.shape == params["block"]["w"].shape:
            assert label == "w"
    for slot in CASES[name].slots:
        assert optax.tree.get(mapped, slot) == names
    assert jax.tree.leaves(mapped).count("other") >= 2  # count and seed


@OPTIMIZER
def test_extra_arguments_are_ignored_and_nothing_recompiles(name):
    _, params, state = _begun(name)
    step = _step(name)
    one = step(_gradient(), state, params)
    compiled = step._cache_size()
    two = step(_gradient(), one[1], one[0])
    assert step._cache_size() == compiled
    chex.assert_trees_all_equal_shapes_and_dtypes(two, (params, state))
    with_extra = step(_gradient(), state, params, loss=jnp.float32(1), grad_norm=jnp.float32(2))
    assert_same(with_extra, one)


@pytest.mark.parametrize("name", rows(CASES, ["optax.amsgrad"]))
def test_step_is_update_and_apply_and_updates_are_f32(name):
    tx, params, state = _begun(name)

    @jax.jit
    def both(grads, state, params):
        updates, new = tx.update(grads, state, params)
        return updates, (optax.apply_updates(params, updates), new)

    for dtype in (jnp.float32, jnp.bfloat16):
        grads = optax.tree.cast(_gradient(), dtype)
        updates, whole = both(grads, state, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        assert_same(whole, _step(name)(grads, state, params))


@third(1)
def test_scan_and_cond_equal_separate_steps(name):
    tx, params, state = _begun(name)
    gradients = stream(masters(), 3)

    def body(carry, grads):
        take = grads["norm"][0] < jnp.inf  # always, but not known when tracing
        new = jax.lax.cond(take, lambda c: lowmem.step(tx, grads, c[1], c[0]), lambda c: c, carry)
        return new, None

    scan = jax.jit(lambda c, g: jax.lax.scan(body, c, g)[0])
    scanned = scan((params, state), gradients)
    for index in range(3):
        params, state = _step(name)(at(gradients, index), state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(scanned, (params, state))
    largest, share = code_differences(scanned, (params, state))
    assert largest <= 1 and share <= 0.01, (largest, share)


@third(2)
def test_donation_is_used_and_changes_nothing(name):
    tx, params, state = _begun(name)
    kept = _step(name)(_gradient(), state, params)
    copies = jax.tree.map(jnp.copy, (params, state))
    step = _compiled(lambda p, s, g: lowmem.step(tx, g, s, p), donate_argnums=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        donated = step(*copies, _gradient())
    assert_same(donated, kept)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies[0]))
    assert copies[1] is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(copies[1]))


@pytest.mark.parametrize("name", rows(CASES, ["optax.amsgrad"]))
def test_members_of_an_ensemble_round_on_their_own(name):
    tx, *_ = _begun(name)
    start = masters()
    gradients = stream(start, 2)

    def member(seed):
        params, state = lowmem.init(tx, start, seed=seed)
        for index in range(2):
            params, state = lowmem.step(tx, at(gradients, index), state, params)
        return params, state

    many = _compiled(jax.vmap(member))(jnp.arange(2, dtype=jnp.uint32) + 7)
    one = _compiled(member)
    first, second = (at(many, index) for index in (0, 1))
    slot = CASES[name].slots[0]
    assert code_differences(*(optax.tree.get(s, slot) for _, s in (first, second)))[1] > 0.1
    for index, part in enumerate((first, second)):
        alone = one(jnp.uint32(7 + index))
        chex.assert_trees_all_equal_shapes_and_dtypes(alone, part)
        largest, share = code_differences(alone[1], part[1])
        assert largest <= 1 and share <= 0.01, (largest, share)


@contextlib.contextmanager
def _config(name: str) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


@third(0)
def test_x64_changes_no_code(name):
    tx, params, state = _begun(name)
    kept = _step(name)(_gradient(), state, params)
    host = jax.tree.map(np.asarray, (masters(), _gradient()))
    with _config("jax_enable_x64"):
        begun = lowmem.init(tx, jax.tree.map(jnp.asarray, host[0]))
        assert_same(begun, (params, state))
        wide = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))(
            jax.tree.map(jnp.asarray, host[1]), begun[1], begun[0]
        )
        assert not [leaf for leaf in jax.tree.leaves(wide) if leaf.dtype in (np.float64, np.int64)]
        chex.assert_trees_all_equal_shapes_and_dtypes(wide, kept)
        wide = jax.tree.map(np.asarray, wide)
    largest, share = code_differences(wide, kept)
    assert largest <= 1 and share <= 0.01, (largest, share)


def test_wide_gradients_are_clipped_as_f32():
    """The clipping that an optimizer takes as a factor, of float64 gradients beside f32 ones."""
    tx = lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3))
    found = []
    with _config("jax_enable_x64"):
        params, state = lowmem.init(tx, {"w": jnp.ones((64, 128), jnp.float32)})
        for dtype in (jnp.float32, jnp.float64):
            grads = {"w": jnp.ones((64, 128), dtype)}
            found.append(jax.tree.map(np.asarray, lowmem.step(tx, grads, state, params)))
    assert_same(*found)


@pytest.mark.parametrize("name", rows(CASES, ["flash_lion"]))
def test_debug_nans_finds_none_even_in_zero_gradients(name):
    tx, params, state = _begun(name)
    zero = jax.tree.map(jnp.zeros_like, _gradient())
    with _config("jax_debug_nans"):
        new = _step(name)(zero, state, params)
        with jax.disable_jit():  # every operation's result is then looked at
            lowmem.step(tx, zero, state, params)
        lowmem.step(tx, _gradient(), new[1], new[0])
    for leaf in jax.tree.leaves(new):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
