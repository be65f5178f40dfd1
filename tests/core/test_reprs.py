"""The short repr of codecs, Storage and Policy: what differs from the defaults."""

import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays.codecs import base

NAMES = {**vars(codecs), **vars(base), "Storage": lowmem.Storage, "Policy": lowmem.Policy}
NAMES.update({type(c).__name__: type(c) for c in codecs.CODECS.values()})


@pytest.mark.parametrize("value", [*codecs.CODECS.values(), lowmem.Storage.paper()], ids=str)
def test_a_repr_makes_the_value_again(value):
    assert eval(repr(value), NAMES) == value  # noqa: S307
    assert len(repr(value)) < 200
