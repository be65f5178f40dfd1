"""Formulas of the rules, in f32: steps of optax, decay with its mask and its own schedule."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage

FULL = Storage.full_precision()
PARAMS = {"a": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.asarray([3.0, -0.25])}
STEPS = [  # of other sizes and signs, so that no debiasing and no order of b1 and b2 cancels out
    {"a": jnp.asarray([0.3, -0.1, 2.0]), "b": jnp.asarray([-1.0, 0.02])},
    {"a": jnp.asarray([-0.2, -0.4, 0.1]), "b": jnp.asarray([0.5, 0.3])},
    {"a": jnp.asarray([0.05, 0.9, -1.0]), "b": jnp.asarray([0.1, -2.0])},
]
DECAY = optax.linear_schedule(0.5, 0.0, 3)
ONLY_A = {"a": True, "b": False}
RULES = {  # large eps and decay, which show
    "adamw": (
        lambda: lowmem.flash_adamw(0.1, 0.8, 0.9, 0.3, weight_decay=0.2, storage=FULL),
        lambda: optax.adamw(0.1, 0.8, 0.9, 0.3, weight_decay=0.2),
    ),
    "eps_root": (
        lambda: lowmem.flash_adam(0.1, 0.8, 0.9, 0.3, 0.2, storage=FULL),
        lambda: optax.adam(0.1, 0.8, 0.9, 0.3, 0.2),
    ),
    "nesterov adam": (
        lambda: lowmem.flash_adam(0.1, 0.8, 0.9, 0.3, nesterov=True, storage=FULL),
        lambda: optax.nadam(0.1, 0.8, 0.9, 0.3),
    ),
    "lion": (
        lambda: lowmem.flash_lion(0.1, 0.5, 0.9, weight_decay=0.2, storage=FULL),
        lambda: optax.lion(0.1, 0.5, 0.9, weight_decay=0.2),
    ),
    "lion smooth": (
        lambda: optax.chain(
            lowmem.scale_by_flash_lion(0.5, 0.9, mode="smooth", smooth_beta=3.0, storage=FULL),
            optax.scale(-0.1),
        ),
        lambda: optax.chain(
            optax.scale_by_lion(0.5, 0.9, mode="smooth", smooth_beta=3.0), optax.scale(-0.1)
        ),
    ),
    "lion refined": (
        lambda: optax.chain(
            lowmem.scale_by_flash_lion(0.1, 0.9, mode="refined", storage=FULL), optax.scale(-0.1)
        ),
        lambda: optax.chain(optax.scale_by_lion(0.1, 0.9, mode="refined"), optax.scale(-0.1)),
    ),
    "adamw, decay by schedule": (
        lambda: lowmem.flash_adamw(0.1, 0.8, 0.9, weight_decay=DECAY, mask=ONLY_A, storage=FULL),
        lambda: optax.adamw(0.1, 0.8, 0.9, weight_decay=DECAY, mask=ONLY_A),
    ),
    "lion, decay by schedule": (
        lambda: lowmem.flash_lion(0.1, weight_decay=DECAY, storage=FULL),
        lambda: optax.lion(0.1, weight_decay=DECAY),
    ),
    "momentum, coupled decay by schedule": (
        lambda: lowmem.flash_sgd(0.1, 0.7, weight_decay=DECAY, storage=FULL),
        lambda: optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(0.1, 0.7)),
    ),
    "momentum, coupled decay": (
        lambda: lowmem.flash_sgd(0.1, 0.7, weight_decay=0.2, storage=FULL),
        lambda: optax.chain(optax.add_decayed_weights(0.2), optax.sgd(0.1, 0.7)),
    ),
    "nesterov momentum": (
        lambda: lowmem.flash_sgd(0.1, 0.7, nesterov=True, storage=FULL),
        lambda: optax.sgd(0.1, 0.7, nesterov=True),
    ),
}


def three_steps(tx):
    @jax.jit
    def run(params, steps):
        state = tx.init(params)
        for grads in steps:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return run(PARAMS, STEPS)


@pytest.mark.parametrize("ours, theirs", RULES.values(), ids=RULES)
def test_three_steps_are_optaxs(ours, theirs):
    chex.assert_trees_all_close(three_steps(ours()), three_steps(theirs()), rtol=2e-6, atol=2e-6)


# -- decay: with gradients of 0 a step is the decay alone ------------------------------------------
LR, DECAY = 0.5, 0.1
DECAYING = {
    "flash_adamw": lowmem.flash_adamw,
    "stable_adamw": lowmem.stable_adamw,
    "adam_mini": lowmem.adam_mini,
    "flash_lion": lowmem.flash_lion,
    "flash_sgd": lambda *args, **kwargs: lowmem.flash_sgd(*args, decoupled=True, **kwargs),
    "flash_sgd, coupled": lowmem.flash_sgd,
}
# not the same from the other end
WEIGHTS = {name: jnp.full((2,), float(n)) for n, name in enumerate("abcd", 1)}
MASK = {"a": True, "b": True, "c": False, "d": True}


def decayed(tx, params=WEIGHTS, step=0):
    """Measure the mean share by which one step with gradients of 0 reduces each weight."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)._replace(count=jnp.int32(step))
    updates, _ = jax.jit(tx.update)(zeros, state, params)
    return {name: float(np.mean(-np.asarray(u) / params[name])) for name, u in updates.items()}


@pytest.mark.filterwarnings("ignore:.*block")  # of adam_mini, which does not know these names
@pytest.mark.parametrize("make", DECAYING.values(), ids=DECAYING)
def test_decay_is_where_its_mask_is(make):
    tx = make(LR, weight_decay=DECAY, mask=MASK, storage=FULL)
    expected = {name: LR * DECAY if here else 0.0 for name, here in MASK.items()}
    assert decayed(tx) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*block")
@pytest.mark.parametrize("peak", [True, 2.0], ids=["constant", "schedule"])
@pytest.mark.parametrize(
    "make", [make for name, make in DECAYING.items() if "coupled" not in name],
    ids=[name for name in DECAYING if "coupled" not in name],
)  # fmt: skip
def test_decoupled_decay_goes_by_the_share_of_the_peak(make, peak):
    """With `decouple_lr` a step decays by lr / peak of `weight_decay`, not by lr times it."""
    schedule = LR if peak is True else lambda count: jnp.where(count < 3, 2.0, LR)
    tx = make(schedule, weight_decay=DECAY, storage=FULL, decouple_lr=peak)
    share = DECAY if peak is True else DECAY * LR / peak
    expected = dict.fromkeys("abcd", share)
    assert decayed(tx, step=3) == pytest.approx(expected, rel=1e-6)
