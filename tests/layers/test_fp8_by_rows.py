"""Activations in FP8 in blocks of rows, XLA's on a TPU: the bits of the whole."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem.layers import fp8_flow
from tests import blocks_of_rows, tolerances
from tests.tiers import rows

RECIPES = {"exact": fp8_flow.Recipe(), "of codes": fp8_flow.Recipe.paper()}
SHAPES = {"a matrix": (96, 80), "batches": (2, 64, 48)}


def of_weights(function):
    return lambda x, scale, bias, recipe: function(x, scale, recipe=recipe)


FUNCTIONS = {
    "gated product": lambda x, s, b, recipe: fp8_flow.gated_product(x, 2 * x[::-1], recipe=recipe),
    "activation": lambda x, s, b, recipe: fp8_flow.gated_product(x, recipe=recipe),
    "RMSNorm": of_weights(fp8_flow.rms_norm),
    "LayerNorm": lambda x, s, b, recipe: fp8_flow.layer_norm(x, s, b, recipe=recipe),
    "without a bias": of_weights(fp8_flow.layer_norm),
}


CASES = list(itertools.product(FUNCTIONS, RECIPES, SHAPES))
IN_SHORT = [("gated product", "exact", "a matrix"), ("RMSNorm", "of codes", "batches")]


def close(one, other, length):
    """The norm of another compilation: sums of a row, then bf16, or codes at ties."""
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    atol, rtol = 4 * tolerances.of_row_sum(length), 2 * tolerances.HALF_SPACING["bfloat16"]
    far = ~np.isclose(one, other, rtol=rtol, atol=atol)
    assert far.mean() <= tolerances.EAGER_JIT_SHARE * 4
    np.testing.assert_allclose(one, other, rtol=1 / 8, atol=atol)


@pytest.mark.parametrize(("name", "recipe", "shape"), rows(CASES, IN_SHORT))
def test_values_codes_and_gradients(name, recipe, shape, monkeypatch):
    """But LayerNorm's means, and gradients of weights, whose sums have another order."""
    size = SHAPES[shape]
    keys = iter(jax.random.split(jax.random.key(1), 4))
    x, g = (jax.random.normal(next(keys), size).astype(jnp.bfloat16) for _ in range(2))
    x = x.at[(0,) * (x.ndim - 1)].set(0)
    weights = [1 + jax.random.normal(next(keys), size[-1:]) / 8 for _ in range(2)]

    def run(x, *weights):
        def value(x, *weights):
            coded = FUNCTIONS[name](x, *weights, RECIPES[recipe])
            return coded.value, coded.quantized

        y, pull, codes = jax.vjp(value, x, *weights, has_aux=True)
        return y, codes, pull(g)

    (y, codes, (dx, *of_weights)), (y2, codes2, (dx2, *of_weights2)) = blocks_of_rows.both(
        monkeypatch, run, x, *weights, elements=32 * 80
    )
    for one, other in zip(*map(jax.tree.leaves, ((y, codes, dx), (y2, codes2, dx2))), strict=True):
        if name in ("LayerNorm", "without a bias"):
            close(one, other, size[-1])
        else:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    for one, other in zip(of_weights, of_weights2, strict=True):
        # of about 100 terms up to a few
        np.testing.assert_allclose(one, other, rtol=tolerances.ACTIVATION, atol=100 * 8 * 2.0**-23)
    assert np.any(np.asarray(dx2, np.float32) != 0)


def test_a_number_that_is_not_finite_stays_in_its_group(monkeypatch):
    x = jnp.ones((96, 64)).at[40, 20].set(jnp.nan)

    def run(x):
        y, pull = jax.vjp(lambda x: fp8_flow.gated_product(x).value, x)
        return y, pull(jnp.ones_like(y))

    whole, in_blocks = blocks_of_rows.both(monkeypatch, run, x, elements=2048)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(in_blocks), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(in_blocks[1][0]).sum() == 16
