"""Codes of one array in blocks of rows, XLA's on a TPU: the bits of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.codecs import group_codec
from tests import blocks_of_rows
from tests.tiers import rows

CODECS = {
    "softsign": lowmem.codecs.softsign(),
    "sqrt": lowmem.codecs.sqrt(),
    "linear4": lowmem.codecs.linear4(),
}
CASES = [(name, how, shape) for name in CODECS for how in ("nearest", "stochastic")
         for shape in ((96, 70), (2, 3, 64, 64))]  # fmt: skip
IN_SHORT = [("softsign", "stochastic", (2, 3, 64, 64)), ("linear4", "nearest", (96, 70))]


@pytest.mark.parametrize(("name", "how", "shape"), rows(CASES, IN_SHORT))
def test_codes_scales_and_values(name, how, shape, monkeypatch):
    codec = CODECS[name]
    x = jnp.abs(jax.random.normal(jax.random.key(0), shape)).at[(0,) * len(shape)].set(jnp.nan)
    key = jnp.uint32(3) if how == "stochastic" else None

    def run(x):
        stored = group_codec.encode(codec, x, 32, key, "mu")
        return stored, group_codec.decode(codec, *stored, 32, x.shape[-1])

    whole, in_blocks = blocks_of_rows.both(monkeypatch, run, x, elements=2048)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(in_blocks), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert np.isnan(in_blocks[1]).sum() == 32
