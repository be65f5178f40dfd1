"""The paths for XLA against the reference, leaf by leaf, and a clipping folded into the step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._core import random
from optax_lowmem.kernels.fused_update import packed, reference, twopass
from tests import tolerances

SHAPES = {"a": (96,), "b": (7, 33), "c": (64, 256), "d": (3, 5, 1000)}
LEARNING_RATE = 1e-3
CASES = {
    "adamw": lambda s: lowmem.flash_adamw(LEARNING_RATE, weight_decay=0.1, storage=s),
    "lion": lambda s: lowmem.flash_lion(LEARNING_RATE, storage=s),
    "sgd": lambda s: lowmem.flash_sgd(LEARNING_RATE, momentum=0.9, weight_decay=1e-2, storage=s),
}
STORAGE = functools.partial(lowmem.Storage, policy=lowmem.Policy(min_size=0))
FAST = {("adamw", 24, jnp.bfloat16), ("lion", 32, jnp.float16), ("sgd", None, jnp.float32)}
GRID = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
    for case in itertools.product(CASES, (24, 32, None), (jnp.bfloat16, jnp.float16, jnp.float32))
]


def some_steps_in(tx, dtype):
    """Parameters, gradients and a state some steps old."""
    rng = np.random.default_rng(0)

    def draw(scale, dtype):
        return {n: jnp.asarray(rng.normal(0, scale, s), dtype) for n, s in SHAPES.items()}

    params, state = lowmem.init(tx, draw(0.1, jnp.float32), dtype)
    step = jax.jit(functools.partial(lowmem.step, tx))
    for _ in range(3):
        params, state = step(draw(1e-3, jnp.bfloat16), state, params)
    return params, draw(1e-3, jnp.bfloat16), state


@pytest.mark.parametrize("name, bits, dtype", GRID)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("path", [packed, twopass], ids=["packed", "twopass"])
def test_a_path_is_the_reference(name, bits, dtype, rounding, path):
    tx = CASES[name](STORAGE(master_weight_bits=bits, rounding=rounding))
    params, grads, state = some_steps_in(tx, dtype)
    engine = tx.engine
    plans = engine._plans(params)
    backend = {packed: "cpu", twopass: "gpu"}[path]
    assert all(path.supported(plan, backend) is None for plan in plans)

    @functools.partial(jax.jit, static_argnums=0)
    def run(update_leaf, params, grads, state):
        rows = zip(
            plans, grads.values(), params.values(), engine._unpack(state, plans), strict=True
        )
        h = engine.hyperparameters(state.count)
        key = random.leaf_key(state.seed, state.count, "w")
        return [update_leaf(engine.rule, *row, h, key, state.count > 0) for row in rows]

    def plain(*args):
        return reference.fused_update(*args[:-1])

    both = (run(f, params, grads, state) for f in (plain, path.fused_update))
    for plan, p, one, other in zip(plans, params.values(), *both, strict=True):
        compare(plan, p, one, other)


def units(stored):
    """Codes or scales as integers that are one apart where they are neighbours."""
    stored = np.asarray(stored)
    if stored.dtype.kind == "f":
        stored = stored.view(f"int{8 * stored.dtype.itemsize}")
    return stored.astype(np.int64)


def same_state(plan, one, other):
    """Codes at most one apart and in few elements, scales next to each other, the rest f32."""
    columns = (plan.slots, one.slots, other.slots, one.scales, other.scales)
    for slot, stored, stored2, scale, scale2 in zip(*columns, strict=True):
        assert (scale.dtype, scale.shape) == (scale2.dtype, scale2.shape)
        assert stored.dtype == stored2.dtype == slot.dtype, slot.name
        if slot.codec is None:
            stored, stored2 = np.asarray(stored), np.asarray(stored2)
            size = np.abs(stored).max() * tolerances.REORDERED_SLOT
            np.testing.assert_allclose(stored2, stored, rtol=tolerances.REORDERED_SLOT, atol=size)
            continue
        off = np.abs(units(stored) - units(stored2))
        assert off.max() <= 1, slot.name
        assert (off > 0).sum() <= max(1, tolerances.REORDERED_CODES * off.size), slot.name
        most = tolerances.REORDERED_SCALE_UNITS[slot.codec.scale.name]
        assert np.abs(units(scale) - units(scale2)).max() <= most, slot.name
    assert (one.correction.dtype, one.correction.shape) == (
        other.correction.dtype,
        other.correction.shape,
    )


def master(plan, p, update, correction):
    """f32 of the master weight after an update, or after a direct step, which gives the weight."""
    landed = update if plan.direct else optax.apply_updates(p, update)
    assert (landed.shape, landed.dtype) == (p.shape, p.dtype)
    joined = landed if plan.split is None else plan.split.join(landed, correction)
    return np.asarray(joined, np.float32)


def compare(plan, p, one, other, step=LEARNING_RATE * tolerances.REORDERED_STEP):
    """Two results of one leaf: codes, scales, and where the weight lands."""
    same_state(plan, one[1], other[1])
    if p is None:
        np.testing.assert_allclose(other[0], one[0], rtol=tolerances.REORDERED_SLOT, atol=step)
        return
    masters = [master(plan, p, update, state.correction) for update, state in (one, other)]
    bits = plan.split and plan.split.bits
    unit = tolerances.REORDERED_MASTER[bits, jnp.dtype(plan.dtype)]
    np.testing.assert_allclose(*masters, rtol=unit, atol=step)


def test_reasons():
    tx = CASES["adamw"](lowmem.Storage())
    (plan,) = tx.engine._plans({"w": jnp.zeros((8, 8), jnp.bfloat16)})
    assert "no slot is compressed" in packed.supported(plan, "cpu")
    assert "not gpu" in packed.supported(plan, "gpu")
    assert "no slot is compressed" in twopass.supported(plan, "gpu")
    assert "not cpu" in twopass.supported(plan, "cpu")
    (plan,) = tx.engine._plans({"w": jnp.zeros((128, 64), jnp.bfloat16)})
    assert packed.supported(plan, "cpu") is None
    assert twopass.supported(plan, "gpu") is None


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the packed path is for CPUs")
def test_a_small_output_is_computed_in_a_conditional():
    """What the packed path rests on: the conditionals are still there when compiled."""
    tx = CASES["adamw"](lowmem.Storage())
    params, state = lowmem.init(tx, {"w": jnp.ones((128, 128))})
    grads = {"w": jnp.ones((128, 128))}
    compiled = jax.jit(functools.partial(lowmem.step, tx)).lower(grads, state, params).compile()
    assert compiled.as_text().count(" conditional(") == 2  # {weight, correction, mu} and nu
