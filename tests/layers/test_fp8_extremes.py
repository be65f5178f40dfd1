"""Every function of the FP8 flow on what breaks scales: zeros, a spike of 1e6, ragged widths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tolerances as tol
from tests.oracle import fp8_flow as oracle
from tests.tiers import rows

pytest.importorskip("flax")

from flax import nnx  # noqa: E402

from optax_lowmem import layers  # noqa: E402
from optax_lowmem.layers import fp8_flow  # noqa: E402
from optax_lowmem.layers.fp8_flow import Recipe  # noqa: E402
from tests.layers.test_fp8_flow import bounds_of, drawn, restore, store  # noqa: E402

jitted = jax.jit
SIZES = (4, 8, 16, 32, 64)
TOKENS, WIDTH, CHANNEL = 6, 50, 17  # no size divides the width
EPS = 1e-6


def hard(seed, width=WIDTH):
    """A token of zeros, a channel of a million in the others, and one token of it alone."""
    x = drawn(seed, (TOKENS, width)).at[:, CHANNEL].set(1e6)
    return x.at[0].set(0).at[1].set(0).at[1, CHANNEL].set(-1e6)


def every(recipe, x, up, w, g):
    """Name -> (result, what multiplies, gradients) of each function."""
    ones = jnp.ones(WIDTH)
    coded = {
        "rms_norm": (lambda x: fp8_flow.rms_norm(x, ones, recipe=recipe), (x,)),
        "layer_norm": (lambda x: fp8_flow.layer_norm(x, ones, recipe=recipe), (x,)),
        "gated_product": (lambda x, u: fp8_flow.gated_product(x, u, recipe=recipe), (x, up)),
        "code": (lambda x: fp8_flow.code(x), (x,)),
    }
    found = {}
    for name, (function, given) in coded.items():
        y, pull = jax.vjp(function, *given)
        zeros = jax.tree.map(jnp.zeros_like, y.quantized)
        codes = y.quantized.codes.astype(jnp.float32) * y.quantized.scales
        found[name] = y.value, codes, pull(fp8_flow.Coded(g, zeros))
    for keep in ("codes", "input"):
        y, pull = jax.vjp(lambda x, w, k=keep: fp8_flow.linear(x, w, keep=k, recipe=recipe), x, w)
        found[f"linear, {keep}"] = y, y, pull(g)
    return found


@pytest.mark.parametrize("size", rows(SIZES, [32]))
def test_every_function(size):
    recipe = Recipe.paper(group_size=size)
    x, up, w, g = hard(1), drawn(2, (TOKENS, WIDTH)), drawn(3, (WIDTH, WIDTH)), drawn(4, (6, WIDTH))
    found = jitted(functools.partial(every, recipe))(x, up, w, g)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    exact, ups, weights, gs = (np.float64(a) for a in (x, up, w, g))
    kept, kept_up = (np.float64(restore(store(a, size), size)) for a in (x, up))
    limit = oracle.store(exact, size).scale
    assert (np.abs(kept - exact) <= tol.of_quantizing(exact, limit, "e4m3")).all()
    # what is beside the spike's group is as without it
    beside = np.arange(WIDTH) // size != CHANNEL // size
    calm = np.float64(restore(store(x.at[:, CHANNEL].set(0), size), size))
    np.testing.assert_array_equal(kept[:, beside], calm[:, beside])

    lost = 8 * tol.of_row_sum(WIDTH)
    wants = {
        "rms_norm": oracle.rms_norm(kept, 1.0, EPS),
        "layer_norm": oracle.layer_norm(kept, 1.0, 0.0, EPS),
        "gated_product": oracle.gated("silu", kept, kept_up),
        "code": exact,
    }
    for name, want in wants.items():
        value, codes, _ = (jax.tree.map(np.float64, a) for a in found[name])
        np.testing.assert_allclose(value, want, atol=lost * np.abs(want).max())
        assert not value[0].any() and not codes[0].any()  # zeros stay zeros
        scale = np.abs(want).max() / 448
        bound = tol.of_quantizing(want, scale, "e4m3") + 2 * lost * np.abs(want).max()
        assert (np.abs(codes - want) <= bound).all()
    bounds = bounds_of(recipe, "float32", exact, weights, gs)
    wanted = exact @ weights, gs @ weights.T, exact.T @ gs
    for keep in ("codes", "input"):
        y, _, grads = found[f"linear, {keep}"]
        assert not y[0].any()
        for mine, want, bound in zip((y, *grads), wanted, bounds, strict=True):
            assert (np.abs(np.float64(mine) - want) <= bound).all()


@pytest.mark.full
def test_exact_results_do_not_depend_on_groups():
    """They are of what is given: groups are of the gradients alone."""
    given = hard(1), drawn(2, (TOKENS, WIDTH)), drawn(3, (WIDTH, WIDTH)), drawn(4, (6, WIDTH))
    first, *others = (
        jitted(functools.partial(every, Recipe(group_size=size)))(*given) for size in (4, 16, 64)
    )
    for other in others:
        for name in ("rms_norm", "layer_norm", "gated_product"):
            near = 8 * tol.of_row_sum(WIDTH) * jnp.abs(first[name][0]).max()
            np.testing.assert_allclose(other[name][0], first[name][0], atol=near)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(other))


@pytest.mark.parametrize("size", rows([4, 64], [4]))
def test_a_block(size):
    """Ragged everywhere; bounded by what passes without a spike in the way."""
    block = layers.Fp8LlamaBlock(44, 100, 2, recipe=Recipe(group_size=size), rngs=nnx.Rngs(0))
    graph, params = nnx.split(block)
    x = drawn(1, (2, 5, 44)).at[..., CHANNEL].set(1e6).at[0, 3].set(0)

    @jitted
    def run(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, pull(jnp.ones_like(y))

    y, grads = run(params, x)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((y, grads)))
    added = jnp.abs(y - x).max()
    assert 0 < added < 100  # of normalised activations, not of the spike
