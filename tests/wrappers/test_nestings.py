"""Wrappers of optax, one inside another, around an optimizer of 16-bit weights."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.compilation import SAME_BITS
from tests.contract_cases import OLD_OPTAX, assert_same, skip_old_multi_steps
from tests.tiers import rows

UPDATE_DTYPES = ("float32", "gradient", "param")
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# These pass updates on, or leave them out: the optimizer inside splits the weights.
AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "skip_not_finite": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "skip_large_updates": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=functools.partial(
            optax.skip_large_updates, max_squared_norm=1e9)
    ).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step, **_: step < 9),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step, **_: step < 9
    ),
    "masked": lambda tx: optax.masked(tx, True),
    "partition": lambda tx: optax.partition({"all": tx, "none": optax.set_to_zero()}, "all"),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask={"w": False}),
    "chain": lambda tx: optax.chain(optax.clip(1e3), tx),
    "named_chain": lambda tx: optax.named_chain(
        ("clip", optax.clip_by_global_norm(1e9)), ("tx", tx)
    ),
    "lowmem.chain": lambda tx: lowmem.chain(optax.clip(1e3), tx),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda x: tx, hyperparam_dtype=F32)(x=1.0),
}  # fmt: skip
# These change updates: the split is around them.
INSIDE = {
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
    "flatten": optax.flatten,
    "scale": lambda tx: optax.chain(tx, optax.scale(0.5)),
}
EVERY = AROUND | INSIDE
SELECTING = {"apply_if_finite", "conditionally_mask", "conditionally_transform"}
ACCUMULATING = {"MultiSteps", "skip_not_finite", "skip_large_updates"}
UNLIKE = "cond branches must have equal output types"


def inside(inner, update_dtype, split):
    """A wrapper around an optimizer, with a split of the weights inside, around both, or none."""
    if split == "inside":
        storage = lowmem.Storage(update_dtype=update_dtype)
        return EVERY[inner](lowmem.flash_sgd(1e-2, storage=storage))
    tx = EVERY[inner](optax.sgd(1e-2))
    return lowmem.split_master_weights(tx, update_dtype=update_dtype) if split == "around" else tx


def nested(outer, inner, update_dtype, inside=inside):
    if outer in INSIDE:
        tx = EVERY[outer](inside(inner, update_dtype, "none"))
        return lowmem.split_master_weights(tx, update_dtype=update_dtype)
    return EVERY[outer](inside(inner, update_dtype, "around" if inner in INSIDE else "inside"))


@functools.cache
def traced_once(*arguments):
    """`inside`, for all outer wrappers together."""
    tx = inside(*arguments)
    return optax.GradientTransformationExtraArgs(jax.jit(tx.init), jax.jit(tx.update))


def refused_by_optax(outer, inner, dtype):
    """Return whether two wrappers do not fit, whatever is inside them; dtype is of gradients."""
    if inner == "lookahead":  # which takes and gives other trees than gradients
        return outer in SELECTING | ACCUMULATING | {"selective_transform", "lookahead", "flatten"}
    # their states get f32 values, of weights in bf16: a norm; in optax 0.2.6 the accumulated sums
    if inner in (ACCUMULATING if OLD_OPTAX else ("skip_large_updates",)):
        return outer in SELECTING and dtype == F32
    return (outer, inner) == ("flatten", "selective_transform")


def emitted(outer, inner, update_dtype, dtype):
    """The dtype of updates of bf16 weights, and whether a condition of optax wants another."""
    seen = F32 if outer == "lowmem.chain" else dtype  # by all but the optimizer itself
    found = {"float32": F32, "gradient": seen, "param": BF16}[update_dtype]
    if update_dtype == "gradient" and "lookahead" in (outer, inner):
        found = F32  # gradients are of other leaves
    wanted = [dtype] * (outer in SELECTING) + [seen] * (inner in SELECTING)
    return found, outer not in INSIDE and any(other != found for other in wanted)


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


ROWS = [
    pytest.param(
        update_dtype,
        dtype,
        outer,
        id=f"{update_dtype}-{dtype}-{outer}",
        # with f32 gradients of one kind of updates nothing is refused that others take
        marks=pytest.mark.full if dtype is F32 and update_dtype != UPDATE_DTYPES[0] else (),
    )
    for update_dtype in UPDATE_DTYPES
    for dtype in (F32, BF16)
    for outer in (EVERY if update_dtype == "gradient" else AROUND)
]


@pytest.mark.parametrize("update_dtype, dtype, outer", ROWS)
def test_a_nesting_works_or_names_the_option(update_dtype, dtype, outer):
    """`update`; where that fails also `step`, which tries again with f32 gradients.

    Around wrappers of INSIDE a split alone decides: one `update_dtype` stands for all.
    """
    grads = {"w": jax.ShapeDtypeStruct((8,), dtype)}
    for inner in EVERY:
        pair = outer, inner
        if refused_by_optax(*pair, dtype):
            continue
        tx = nested(*pair, update_dtype, traced_once)
        params = {"w": jax.ShapeDtypeStruct((8,), BF16)}
        if "lookahead" in pair:
            params = optax.LookaheadParams(params, params)
        state = jax.eval_shape(lambda p, tx=tx: tx.init(p), params)
        update = lambda g, s, p, tx=tx: tx.update(g, s, p)  # noqa: E731
        step = lambda g, s, p, tx=tx: lowmem.step(tx, g, s, p)  # noqa: E731
        found, fails = emitted(*pair, update_dtype, dtype)
        if not fails:
            updates, new = jax.eval_shape(update, grads, state, params)
            assert {u.dtype for u in jax.tree.leaves(updates)} == {found}, pair
        elif emitted(*pair, update_dtype, F32)[1] or refused_by_optax(*pair, F32):
            with pytest.raises(TypeError, match=UNLIKE) as error:
                jax.eval_shape(step, grads, state, params)
            assert "Storage(update_dtype='gradient')" in " ".join(error.value.__notes__), pair
            continue
        else:
            with pytest.raises(TypeError, match=UNLIKE):
                jax.eval_shape(update, grads, state, params)
            weights, new = jax.eval_shape(step, grads, state, params)
            assert described(weights) == described(params), pair
        if "skip_large_updates" not in pair and not OLD_OPTAX:
            assert described(new) == described(state), pair


def test_optax_refuses_the_same_of_its_own():
    for outer, inner in itertools.product(EVERY, EVERY):
        if not refused_by_optax(outer, inner, F32):
            continue
        tx = EVERY[outer](EVERY[inner](optax.sgd(1e-2)))
        params = {"w": jnp.ones(8, BF16)}
        if inner == "lookahead":
            params = optax.LookaheadParams(params, params)
        with pytest.raises((TypeError, ValueError, AttributeError)):
            jax.eval_shape(lambda p, tx=tx: tx.update({"w": jnp.ones(8)}, tx.init(p), p), params)


# ---- values --------------------------------------------------------------------------------------
WEIGHTS = {"w": jnp.linspace(-1, 1, 4 * 64).reshape(4, 64)}
# conditionally_transform hands out gradients in place of updates
_PASSING = [name for name in AROUND if name != "conditionally_transform"]
VALUES = [
    (outer, _PASSING[(i + distance) % len(_PASSING)])
    for i, outer in enumerate(_PASSING)
    for distance in (1, 5)
]


def adamw(inner, update_dtype, split):
    assert split == "inside"
    return EVERY[inner](lowmem.flash_adamw(1e-2, storage=lowmem.Storage(update_dtype=update_dtype)))


def trained(tx, dtype, each, ours):
    """Weights and master weights after two gradients, `each` times one after another."""

    def body(carry, grads):
        params, state = carry
        if ours:
            return lowmem.step(tx, grads, state, params), None
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    params, state = lowmem.init(tx, WEIGHTS)
    twice = jnp.repeat(jnp.stack([WEIGHTS["w"] + 0.1, WEIGHTS["w"] - 0.2]), each, axis=0)
    run = jax.jit(lambda *a: jax.lax.scan(body, a[:2], a[2])[0], compiler_options=SAME_BITS)
    params, state = run(params, state, {"w": twice.astype(dtype)})
    return params, lowmem.master_params(params, state)


@functools.cache
def unwrapped(dtype):
    storage = lowmem.Storage(update_dtype="gradient")
    return trained(lowmem.flash_adamw(1e-2, storage=storage), dtype, 1, ours=True)


@pytest.mark.parametrize("outer, inner", rows(VALUES, VALUES[2::4]))
def test_wrappers_that_change_nothing_change_no_bit(outer, inner):
    """By `step` as by `update`; `MultiSteps` takes the mean of equal gradients."""
    if {outer, inner} & ACCUMULATING:
        skip_old_multi_steps()
    dtype = F32 if outer == "lowmem.chain" else BF16  # all inside sees f32
    tx = nested(outer, inner, "gradient", adamw)
    each = 2 ** sum(name in ACCUMULATING for name in (outer, inner))
    for ours in (True, False):
        found = trained(tx, dtype, each, ours)
        assert_same(found, unwrapped(dtype))
    assert (found[0]["w"] != WEIGHTS["w"].astype(BF16)).all()
