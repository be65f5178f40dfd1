"""`Storage.four_bit` in every optimizer: what it takes, what it says, what a step reads back."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import small_leaves

FOUR = lowmem.Storage.four_bit()
NOWHERE = lowmem.Policy(exclude=("nu:*",))
SHAPE = (512, 1024)
BUDGET = 1.07  # bytes per parameter of both moments with their scales


def four(name, **changes):
    """4 bits of every moment that has a value per element."""
    if lowmem.OPTIMIZERS[name].rule.prepares == "blocks":
        changes["nu"] = None
    return dataclasses.replace(FOUR, **changes)


@pytest.mark.parametrize("name", lowmem.OPTIMIZERS)
def test_moments_are_within_their_budget(name):
    """Nothing is allocated; without a correction the state is moments, a count and a seed."""
    tx = small_leaves.record(name).make(1e-3, storage=four(name, master_weight_bits=None))
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    report = lowmem.memory.report(tx, params)
    per_parameter = report.state_bytes / np.prod(SHAPE)
    slots = len(lowmem.OPTIMIZERS[name].moments)
    rows_and_columns = 4 * sum(SHAPE) / np.prod(SHAPE) if "factored" in name else 0  # in f32
    assert 0.5 < per_parameter <= BUDGET * slots / 2 + rows_and_columns
    state = jax.eval_shape(tx.init, params)
    codes = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint8 and x.shape[0] == SHAPE[0]]
    assert codes and all(x.shape[-1] <= SHAPE[1] // 2 for x in codes)


def test_explain_names_the_codecs():
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    text = str(lowmem.explain(lowmem.flash_adamw(1e-3, storage=FOUR), params))
    groups = "groups of 64, 2 codes per byte, stochastic rounding"
    assert all(words in text for words in ("softsign-int4", "linear-uint4", groups))


def test_changes_and_what_is_refused():
    assert lowmem.Storage.four_bit(rounding="nearest").rounding == "nearest"
    assert lowmem.Storage.four_bit(group_size=128).mu == FOUR.mu
    with pytest.raises(ValueError, match="2 codes per byte.*multiple of 2, got 31"):
        lowmem.Storage.four_bit(group_size=31)
    with pytest.raises(ValueError, match="slot 'mu' has negative values.*'log-uint4' is unsigned"):
        lowmem.Storage.four_bit(mu=lowmem.codecs.log4())


def test_second_moments_alone_can_be_rounded_stochastically():
    """Codes of m are those of rounding to nearest, codes of v those of rounding at random."""
    keys = jax.random.split(jax.random.key(0), 2)
    params, gradient = ({"w": jax.random.normal(key, (64, 128))} for key in keys)
    found = {}
    for rounding in ("stochastic", "nearest", "nu"):
        tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage.four_bit(rounding=rounding))
        state = tx.init(params)
        step = jax.jit(lambda state, tx=tx: tx.update(gradient, state, params)[1])
        found[rounding] = step(state)
    mixed = found["nu"]
    assert (mixed.mu["w"] == found["nearest"].mu["w"]).all()
    assert (mixed.nu["w"] == found["stochastic"].nu["w"]).all()
    assert (mixed.mu["w"] != found["stochastic"].mu["w"]).any()
    assert (mixed.nu["w"] != found["nearest"].nu["w"]).any()
    text = str(lowmem.explain(tx, params))
    assert "2 codes per byte, nearest rounding" in text
    assert "2 codes per byte, stochastic rounding" in text


@pytest.mark.parametrize("make", [lowmem.flash_adam_mini, lowmem.flash_factored_adamw])
def test_second_moments_that_many_elements_share_are_no_place_for_4_bits(make):
    params = {"w": jnp.ones((128, 256), jnp.bfloat16), "v": jnp.ones((256, 128), jnp.bfloat16)}
    blocks = lowmem.blocks.Structure(rules=[("*", lowmem.blocks.Block((0,)))])
    more = {"blocks": blocks} if make is lowmem.flash_adam_mini else {}
    tx = make(1e-3, storage=FOUR, **more)
    for init in (tx.init, functools.partial(lowmem.init, tx)):
        with pytest.warns(UserWarning, match=r"leaf 'v' and 1 more.*4 bits.*nu=None"):
            init(params)
    lowmem.memory.report(tx, params)  # which says nothing
    make(1e-3, storage=lowmem.Storage.four_bit(nu=None), **more).init(params)


@pytest.mark.parametrize("nu", [FOUR.nu, lowmem.codecs.sqrt4()], ids=["linear4", "sqrt4"])
def test_a_second_moment_per_element_in_4_bits_names_the_better_choice(nu):
    params = {"w": jnp.ones((64, 128)), "v": jnp.ones((128, 64)), "b": jnp.ones(8)}
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage.four_bit(nu=nu))
    better = r"flash_factored_adamw.*storage=Storage.four_bit\(nu=None, group_size=32\)"
    for init in (tx.init, functools.partial(lowmem.init, tx)):
        with pytest.warns(
            UserWarning, match=rf"leaf 'v' and 1 more\) are stored.*4 bits.*{better}"
        ):
            init(params)
    lowmem.memory.report(tx, params)  # which says nothing


def test_compress_state_warns_of_second_moments_in_4_bits():
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(8)}
    of_4_bits = lowmem.codecs.linear4(signed=False)
    for tx in (
        lowmem.compress_state(optax.adam(1e-3), nu=of_4_bits),
        lowmem.compress_state(optax.adan(1e-3), n=of_4_bits),
        lowmem.sqrt_variance_quant(optax.scale_by_adam(), codec=of_4_bits),
    ):
        for init in (tx.init, functools.partial(lowmem.init, tx, allow_rounding=True)):
            with pytest.warns(UserWarning, match=r"leaf 'w'\) are stored in 4 bits"):
                init(params)
        lowmem.memory.report(tx, params)  # which says nothing


def test_other_forms_of_4_bits_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tx in (
            lowmem.flash_factored_adamw(1e-3, storage=lowmem.Storage.four_bit(nu=None)),
            lowmem.flash_adamw(1e-3, storage=lowmem.Storage.four_bit(nu=None)),
            lowmem.flash_adamw(1e-3, storage=lowmem.Storage.four_bit(policy=NOWHERE)),
            lowmem.flash_lion(1e-3, storage=FOUR),
            lowmem.compress_state(optax.adam(1e-3), mu=lowmem.codecs.softsign4()),
        ):
            tx.init({"w": jnp.ones((64, 128))})
