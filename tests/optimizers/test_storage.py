"""Storage(...): what it leaves out is the optimizer's own."""

import copy
import dataclasses
import functools
import pickle

import pytest

import optax_lowmem as lowmem
from optax_lowmem.codecs import affine, expanded_e4m3, softsign, sqrt

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
    for storage in (whole, by_position, *copies, dataclasses.replace(lowmem.Storage())):
        assert stored(make, storage)[0] == said
    for storage in (lowmem.Storage.paper(), lowmem.Storage.four_bit()):
        assert stored(make, storage)[0] == {name: getattr(storage, name) for name in COAT}
