"""Storage(...): what it leaves out is the optimizer's own."""

import copy
import dataclasses
import functools
import inspect
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem.codecs import affine, expanded_e4m3, softsign, sqrt
from tests.compilation import SAME_BITS

# of every optimizer whose own storage is not flash_adamw's
COAT = dict(mu=expanded_e4m3(), nu=expanded_e4m3(signed=False), group_size=128)
MINI = dict(mu=softsign(), nu=None, group_size=32)
OWN = {
    lowmem.coat_adamw: COAT, lowmem.q_adamw: dict(mu=affine(), nu=sqrt(), group_size=256),
    lowmem.q_adam_mini: dict(mu=affine(), nu=None, group_size=256), lowmem.flash_adam_mini: MINI,
    lowmem.adam_mini: MINI, lowmem.flash_factored_adamw: MINI,
    lowmem.flash_adamw: dict(mu=softsign(), nu=sqrt(), group_size=32),
}  # fmt: skip
EVERY = {make.__name__: (functools.partial(make, 1e-3), own) for make, own in OWN.items()} | {
    make.__name__: (make, MINI)
    for make in (lowmem.scale_by_adam_mini, lowmem.scale_by_factored_adam)
}


def stored(make, storage):
    """(codecs and groups of an optimizer, its whole storage)."""
    found = make(storage=storage).engine.storage
    return {name: getattr(found, name) for name in COAT}, found


@pytest.mark.parametrize("name", EVERY)
def test_what_is_left_out_is_the_optimizers_own(name):
    make, own = EVERY[name]
    for changed in (dict(seed=7), dict(rounding="nearest"), dict(master_weight_bits=32)):
        form, found = stored(make, lowmem.Storage(**changed))
        assert form == own
        assert found == dataclasses.replace(found, **changed)
    form, _ = stored(make, lowmem.Storage(mu=None))
    assert form == {**own, "mu": None}
    # which is also the default, but of the optimizers that are f32 by themselves
    if not name.startswith(("adam_mini", "scale_by")):
        assert make().engine.storage == make(storage=lowmem.Storage()).engine.storage


@pytest.mark.parametrize("name", EVERY)
def test_what_is_said_is_as_it_is_said(name):
    """Also where it is what `Storage` has by itself, by position, and in a copy."""
    make, _ = EVERY[name]
    said = dict(mu=softsign(), nu=sqrt(), group_size=32)
    whole = lowmem.Storage(**said)
    by_position = lowmem.Storage(24, softsign(), sqrt(), 32)
    copies = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), dataclasses.replace(whole)]
    for storage in (whole, by_position, *copies):
        assert stored(make, storage)[0] == said
    for storage in (lowmem.Storage.paper(), lowmem.Storage.four_bit()):
        assert stored(make, storage)[0] == {name: getattr(storage, name) for name in COAT}


@pytest.mark.parametrize("name", EVERY)
def test_what_is_the_optimizers_own_is_in_the_value(name):
    """Equal storages are stored alike, and `replace` changes what it names alone."""
    make, own = EVERY[name]
    left = lowmem.Storage()
    assert (left.mu, left.nu, left.group_size) == ("default", "default", None)
    assert left == lowmem.Storage(mu="default", nu="default", group_size=None)
    given = {"mu": softsign(), "nu": sqrt(), "group_size": 32}
    for field, value in given.items():
        assert left != lowmem.Storage(**{field: value})
        form, _ = stored(make, dataclasses.replace(left, **{field: value}))
        assert form == {**own, field: value}
    replaced = dataclasses.replace(lowmem.Storage(seed=1), seed=2)
    assert replaced == lowmem.Storage(seed=2) and hash(replaced) == hash(lowmem.Storage(seed=2))
    assert stored(make, replaced)[0] == own
    assert repr(replaced) == "Storage(seed=2)"


# ---- codecs by name ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", codecs.NAMES)
def test_a_name_is_the_codec_of_its_slot(name):
    first, second = codecs.NAMES[name]
    assert lowmem.Storage(nu=name, group_size=64).nu == second
    if first.signed:  # test_errors.py has the others
        assert lowmem.Storage(mu=name, group_size=64).mu == first
    if name not in ("int8", "int4"):
        assert first == getattr(codecs, name)() and (second == first or not second.signed)


def test_every_codec_that_needs_no_argument_has_its_functions_name():
    functions = {name: getattr(codecs, name) for name in codecs.__all__}
    made = {
        name
        for name, make in functions.items()
        if inspect.isfunction(make)
        and all(p.default is not p.empty for p in inspect.signature(make).parameters.values())
    }
    assert set(codecs.NAMES) == made | {"int8", "int4"}


@pytest.mark.parametrize("name", EVERY)
def test_a_name_is_as_good_as_its_codec(name):
    make, own = EVERY[name]
    assert stored(make, lowmem.Storage(mu="int8"))[0] == {**own, "mu": softsign()}
    assert stored(make, lowmem.Storage(nu="dynamic"))[0] == {**own, "nu": codecs.dynamic(False)}
    named, given = lowmem.Storage(mu="int8", nu="int8"), lowmem.Storage(mu=softsign(), nu=sqrt())
    assert named == given and hash(named) == hash(given)


def test_names_in_the_state_of_any_optimizer():
    params = {"w": jnp.ones((64, 128))}
    tx = lowmem.compress_state(optax.adan(1e-3), m="int8", v="linear", n="linear")
    found = {d.slot: d.codec for d in lowmem.explain(tx, params).decisions}
    assert found == {"m": softsign(), "v": codecs.linear(), "n": codecs.linear(signed=False)}
    for moment in (lowmem.compand_momentum, lowmem.sqrt_variance_quant):
        codec = codecs.e4m3(moment is lowmem.compand_momentum)
        states = [moment(optax.scale_by_adam(), codec=c).init(params) for c in ("e4m3", codec)]
        chex.assert_trees_all_equal(*states)
        chex.assert_trees_all_equal_dtypes(*states)


# ---- presets -------------------------------------------------------------------------------------


def test_four_bits_have_one_format_of_scales():
    nu = dataclasses.replace(codecs.linear4(signed=False), scale=codecs.softsign4().scale)
    four = lowmem.Storage(mu=codecs.softsign4(), nu=nu, group_size=64)
    assert lowmem.Storage.four_bit() == four


@pytest.mark.parametrize("make", [lowmem.flash_adamw, lowmem.flash_lion, lowmem.flash_muon])
def test_exact_storage_loses_nothing(make):
    """The master weights of 16-bit weights are the weights of the same run in f32."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}
    tx = make(1e-3, storage=lowmem.Storage.exact())
    step = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
    weights, state = lowmem.init(tx, params)
    plain, plain_state = lowmem.init(tx, params, jnp.float32)
    assert weights["w"].dtype == jnp.bfloat16
    for _ in range(5):
        grads = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.bfloat16)}
        weights, state = step(grads, state, weights)
        plain, plain_state = step(grads, plain_state, plain)
    chex.assert_trees_all_equal(lowmem.master_params(weights, state), plain)
    assert float(jnp.abs(plain["w"] - params["w"]).min()) > 0
    report = lowmem.memory.report(lowmem.flash_adamw(1e-3, storage=lowmem.Storage.exact()), weights)
    assert report.state_bytes / report.parameters == pytest.approx(10, abs=0.01)
