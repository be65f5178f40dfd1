"""The loss scale that skips tensors: what it skips, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import assert_alike

SCALE = 2.0**16
POLICY = lowmem.Policy(min_size=0)
SHAPES = {"w": (7, 33), "b": (40,), "scalar": ()}
OPTIMIZERS = {
    "flash_adamw": lambda: lowmem.flash_adamw(1e-2, storage=lowmem.Storage(policy=POLICY)),
    "stable_adamw": lambda: lowmem.stable_adamw(1e-2, storage=lowmem.Storage(policy=POLICY)),
    "compressed": lambda: lowmem.split_master_weights(
        lowmem.compress_state(optax.adamw(1e-2), mu=lowmem.codecs.softsign(), policy=POLICY)
    ),
    "clipped": lambda: lowmem.chain(
        optax.clip_by_global_norm(0.1), lowmem.flash_lion(1e-2, storage=lowmem.Storage())
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), {"w": True, "b": False, "scalar": True}), optax.scale(-1e-2)
    ),
}


def gradients(seed, bad=()):
    rng = np.random.default_rng(seed)
    made = {n: jnp.asarray(SCALE * rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}
    for name, value in bad:
        made[name] = made[name].at[(0,) * made[name].ndim].set(value)
    return made


def start(tx):
    params = {n: 0.1 * g / SCALE for n, g in gradients(9).items()}

    def dtype(path, leaf):
        return jnp.bfloat16 if leaf.ndim else jnp.float32

    return lowmem.init(tx, params, dtype, allow_rounding=True)


@pytest.fixture(params=OPTIMIZERS)
def optimizers(request):
    """Plain, and scaled."""
    make = OPTIMIZERS[request.param]
    return make(), lowmem.per_tensor_loss_scale(make(), SCALE)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_finite_gradients_are_unscaled(optimizers):
    plain, scaled = optimizers
    params, state = start(plain)
    same((params, state), start(scaled))
    for seed in range(3):
        grads = gradients(seed)
        wanted = jax.jit(plain.update)({n: g / SCALE for n, g in grads.items()}, state, params)
        found = jax.jit(scaled.update)(grads, state, params)
        assert_alike(found, wanted, seed + 1)
        params, state = optax.apply_updates(params, wanted[0]), wanted[1]


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_tensor_is_skipped_and_the_others_are_not(optimizers, value):
    plain, scaled = optimizers
    params, state = start(plain)
    updates, state = jax.jit(scaled.update)(gradients(0), state, params)
    params = optax.apply_updates(params, updates)
    updates, after = jax.jit(scaled.update)(gradients(1, [("w", value)]), state, params)
    new = optax.apply_updates(params, updates)
    masters = [lowmem.master_params(*pair) for pair in ((params, state), (new, after))]
    same(masters[0]["w"], masters[1]["w"])
    for name in ("b", "scalar"):
        assert np.isfinite(masters[1][name]).all() and (masters[1][name] != masters[0][name]).any()
    kept = jax.tree_util.tree_leaves_with_path(state)
    for (path, old), now in zip(kept, jax.tree.leaves(after), strict=True):
        assert jnp.issubdtype(now.dtype, jnp.integer) or np.isfinite(now).all()
        if "'w'" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(old, now)
    zero = {**gradients(1), "w": jnp.zeros(SHAPES["w"])}
    wanted, _ = jax.jit(scaled.update)(zero, state, params)
    same({n: updates[n] for n in ("b", "scalar")}, {n: wanted[n] for n in ("b", "scalar")})


def test_f16_gradients_that_overflowed():
    tx = lowmem.per_tensor_loss_scale(optax.sgd(1.0), SCALE)
    grads = {"a": jnp.full(3, jnp.inf, jnp.float16), "b": jnp.full(3, 6e4, jnp.float16)}
    updates, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_array_equal(updates["a"], 0)
    np.testing.assert_allclose(updates["b"], -6e4 / SCALE, rtol=1e-3)


@pytest.mark.parametrize("inner", [optax.sm3(1e-3), optax.lbfgs(1e-3)], ids=["sm3", "lbfgs"])
def test_a_state_that_is_not_of_tensors_is_refused(inner):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(3)}
    tx = lowmem.per_tensor_loss_scale(inner, SCALE)
    with pytest.raises(ValueError, match="do not have one array per tensor.*apply_if_finite"):
        tx.init(params)


@pytest.mark.parametrize("into", ["bfloat16", "moments"])
def test_accumulation_inside_is_refused(into):
    """A skipped tensor would keep the sum of a batch that its count has left."""
    inner = lowmem.accumulate_gradients(lowmem.flash_sgd(1.0, momentum=0.9), 2, into)
    with pytest.raises(ValueError, match="accumulate_gradients is inside"):
        lowmem.per_tensor_loss_scale(inner, SCALE).init({"w": jnp.zeros(3)})


@pytest.mark.parametrize("around", ["accumulate_gradients", "MultiSteps"])
def test_an_overflow_in_a_part_of_a_batch(around):
    """All gradients are 1 but one infinity: no step is larger than 1."""
    if around == "MultiSteps":
        tx = lowmem.per_tensor_loss_scale(optax.MultiSteps(optax.sgd(1.0), 2), 1.0)
    else:
        tx = lowmem.per_tensor_loss_scale(optax.sgd(1.0), 1.0)
        tx = lowmem.accumulate_gradients(tx, 2, "bfloat16")
    params = {"w": jnp.zeros(3)}
    state, steps, update = tx.init(params), [], jax.jit(tx.update)
    for i in range(6):
        grads = {"w": jnp.full(3, jnp.inf if i == 1 else 1.0)}
        updates, state = update(grads, state, params)
        steps.append(float(updates["w"][0]))
    assert steps == [0, 0, 0, -1, 0, -1]
