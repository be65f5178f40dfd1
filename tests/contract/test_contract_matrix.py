"""Every optimizer x dtype x master width x group size x rounding x optax wrapper.

The default tier runs rows in which every pair of values occurs, of the optimizers that differ in
more than their codecs, but only about half of those of an optimizer and a wrapper; the full one
such rows of all optimizers with every wrapper, and of those that differ in more each dtype and
wrapper with master widths, group sizes and roundings in turn. A row trains on a fixed gradient
stream and must follow the same wrapper around plain f32 optax.
"""

import functools
import itertools
import operator
from collections.abc import Callable
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
    DISTINCT,
    DTYPES,
    WIDE,
    Case,
    Form,
    changes,
    distance,
    masters,
    pairs_of,
    pairwise,
    skip_old_multi_steps,
    stream,
    train,
)
from tests.tolerances import CONTRACT_DISTANCE

STEPS = 8
Make = Callable[[Any], optax.GradientTransformation]  # from a learning rate

# None: without split master weights, for wrappers that must be inside the split.
OUTERMOST, INSIDE = True, False


def _chain(link: Callable) -> Callable:
    return lambda make, lr: link(optax.clip(5.0), optax.clip_by_global_norm(20.0), make(lr))


def _masked(make: Make, lr: float) -> optax.GradientTransformation:
    trained = {"block": True, "norm": False}
    frozen = jax.tree.map(operator.not_, trained)
    return optax.chain(optax.masked(make(lr), trained), optax.masked(optax.set_to_zero(), frozen))


def _partition(make: Make, lr: float) -> optax.GradientTransformation:
    parts = {"block": make(lr), "norm": make(lr / 2)}
    return optax.partition(parts, {"block": {"w": "block"}, "norm": "norm"})


def _multi_steps(make: Make, lr: float) -> optax.GradientTransformation:
    return optax.MultiSteps(make(lr), every_k_schedule=2).gradient_transformation()


def _inject(make: Make, lr: float) -> optax.GradientTransformation:
    def factory(learning_rate: Any) -> optax.GradientTransformation:
        return make(learning_rate)

    schedule = optax.linear_schedule(lr, lr / 2, STEPS)
    return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=schedule)


WRAPPERS: dict[str, tuple[bool, Callable[[Make, float], optax.GradientTransformation]]] = {
    "chain": (OUTERMOST, _chain(optax.chain)),
    "lowmem.chain": (OUTERMOST, _chain(lowmem.chain)),
    "masked": (OUTERMOST, _masked),
    "partition": (OUTERMOST, _partition),
    "MultiSteps": (OUTERMOST, _multi_steps),
    "inject_hyperparams": (OUTERMOST, _inject),
    "apply_if_finite": (OUTERMOST, lambda make, lr: optax.apply_if_finite(make(lr), 3)),
    "schedule_free": (INSIDE, lambda make, lr: optax.contrib.schedule_free(make(lr), lr)),
    "lookahead": (INSIDE, lambda make, lr: optax.lookahead(make(lr), 3, 0.5)),
}
BITS, GROUPS, ROUNDINGS = (24, 32), (16, 32), ("stochastic", "nearest")
OTHERS = (tuple(DTYPES), BITS, GROUPS, ROUNDINGS, tuple(WRAPPERS))
FACTORS = (WIDE, *OTHERS)
OF_EACH = (FACTORS.index(WIDE), FACTORS.index(tuple(WRAPPERS)))
FAST = pairwise((DISTINCT, *OTHERS), but=OF_EACH)


def _is_distinct(row: tuple) -> bool:
    """Of another rule; and without a 16-bit weight there is no master width to vary."""
    return row[0] in DISTINCT and (row[1] != "float32" or row[2] == 24)


def _in_turn(row: tuple) -> bool:
    """One of the master weights, group sizes and roundings for each choice of the rest."""
    places = [values.index(value) for values, value in zip(FACTORS, row, strict=True)]
    turning = [FACTORS.index(values) for values in (BITS, GROUPS, ROUNDINGS)]
    turn = sum(place for factor, place in enumerate(places) if factor not in turning)
    for factor in turning:
        turn, wanted = divmod(turn, len(FACTORS[factor]))
        if places[factor] != wanted:
            return False
    return True


PAIRS = set(pairwise(FACTORS))
REST = sorted(
    row
    for row in set(itertools.product(*FACTORS)) - set(FAST)
    if row in PAIRS or _is_distinct(row) and _in_turn(row)
)


def _start(wrapper: str) -> Any:
    weights = masters()
    if wrapper == "lookahead":
        return optax.LookaheadParams(weights, jax.tree.map(jnp.copy, weights))
    return weights


@functools.cache
def _plain(optimizer: str, wrapper: str) -> list:
    case, (_, wrap) = CASES[optimizer], WRAPPERS[wrapper]
    tx, start = wrap(case.plain, case.step), _start(wrapper)
    end, _ = train(tx, start, tx.init(start), stream(masters(), STEPS))
    return changes(start, end)


def _ours(case: Case, wrapper: str, form: Form) -> optax.GradientTransformation:
    outermost, wrap = WRAPPERS[wrapper]
    if outermost == OUTERMOST:
        return wrap(lambda lr: case.make(lr, form), case.step)
    bare = Form(None, form.group_size, form.rounding, form.seed, form.policy)
    inner = wrap(lambda lr: case.make(lr, bare), case.step)
    return lowmem.split_master_weights(inner, form.bits)


def _codes(state: Any, shape: tuple[int, ...]) -> int:
    kinds = (jnp.int8, jnp.uint8)
    leaves = jax.tree.leaves(state)
    return sum(leaf.dtype in kinds and leaf.shape[-2:] == shape for leaf in leaves)


def _check(optimizer: str, dtype: str, bits: int, group: int, rounding: str, wrapper: str) -> None:
    if wrapper == "MultiSteps" and dtype != "float32":
        skip_old_multi_steps()
    case = CASES[optimizer]
    tx = _ours(case, wrapper, Form(bits, group, rounding))
    start = _start(wrapper)
    masked = wrapper == "masked"  # without an optimizer, the norm is rounded
    params, state = lowmem.init(tx, start, DTYPES[dtype], allow_rounding=masked)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, params), state)
    assert _codes(state, (3, 40)) >= len(case.slots)
    begun = lowmem.master_params(params, state)
    gradients = stream(masters(), STEPS)
    new, state = train(tx, params, state, gradients)  # a scan: shapes and dtypes are stable
    chex.assert_trees_all_equal_shapes_and_dtypes(new, params)
    ours = changes(begun, lowmem.master_params(new, state))
    assert distance(ours, _plain(optimizer, wrapper)) < CONTRACT_DISTANCE


@pytest.mark.parametrize(("optimizer", "dtype", "bits", "group", "rounding", "wrapper"), FAST)
def test_pairs_of_choices_follow_plain_optax(optimizer, dtype, bits, group, rounding, wrapper):
    _check(optimizer, dtype, bits, group, rounding, wrapper)


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "dtype", "bits", "group", "rounding", "wrapper"), REST)
def test_all_choices_follow_plain_optax(optimizer, dtype, bits, group, rounding, wrapper):
    _check(optimizer, dtype, bits, group, rounding, wrapper)


def test_the_fast_rows_hold_every_pair():
    seen = {pair for row in FAST for pair in pairs_of(row)}
    factors = (DISTINCT, *OTHERS)
    for (i, left), (j, right) in itertools.combinations(enumerate(factors), 2):
        found = [((i, a), (j, b)) in seen for a, b in itertools.product(left, right)]
        assert np.mean(found) > 0.43 if (i, j) == OF_EACH else all(found)
    smallest = len(DTYPES) * len(WRAPPERS)
    assert smallest <= len(FAST) <= smallest * 1.1
