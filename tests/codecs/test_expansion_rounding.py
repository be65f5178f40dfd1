"""Stochastic rounding between powers of 8-bit floats: how far its odds are from P."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import expansion, float8
from tests import tolerances as tol
from tests.tiers import rows

CODECS = {"e4m3": float8.e4m3(), "e5m2": float8.e5m2()}


def numbers(codec, binade=0):
    """(n, u, log2 of n + u in units of the smallest normal number): all n up to 2 N, 64 u."""
    count = 1 << codec.mantissa
    n = np.arange(1 if binade == 0 else count, 2 * count)[:, None]
    u = (np.arange(64) + 0.5)[None] / 64
    return n, u, np.log2((n + u) / count) + binade


def exact(n, u, root):
    """P(up) between n^r and (n + 1)^r."""
    if root == 0:
        return np.log1p(u / n) / np.log1p(1 / n)
    return np.expm1(root * np.log1p(u / n)) / np.expm1(root * np.log1p(1 / n))


def codes(codec, octaves, noise, root):
    """In the order of n, from 0 for its own code to 1 for the next."""
    noise = jnp.asarray(noise, jnp.float32)
    return np.asarray(rounded(codec, jnp.asarray(octaves, jnp.float32), noise, jnp.float32(root)))


@functools.partial(jax.jit, static_argnames="codec")
def rounded(codec, octaves, noise, root):
    return codec.round_octaves(octaves, noise, codec.odds(root))


@pytest.mark.parametrize("binade", [0, 1, 7])
@pytest.mark.parametrize("kind", CODECS)
def test_odds(kind, binade):
    """Noise just under P - bound rounds up, and just over P + bound does not."""
    codec = CODECS[kind]
    n, u, octaves = numbers(codec, binade)
    normal = 1 << codec.mantissa
    code = n + binade * normal
    least = 0.0
    for most, of_one, of_subnormal, of_normal in tol.ODDS[kind]:
        for root in (0, *np.linspace(least, most, 30)[1:]):
            bound = np.where(n == 1, of_one, np.where(n < normal, of_subnormal, of_normal))
            bound = bound + tol.ODDS_POSITION * max(1, root)
            share = exact(n, u, root)
            up = codes(codec, octaves, share - bound, root) - code
            down = codes(codec, octaves, share + bound, root) - code
            assert (up == 1)[share > bound].all()
            assert (down == 0)[share + bound < 1].all()
            assert np.isin(up, (0, 1)).all() and np.isin(down, (0, 1)).all()
        least = most


@pytest.mark.parametrize("kind", CODECS)
def test_a_number_stays_itself_and_noise_of_one_never_lifts(kind):
    """Whatever the noise; and at any u with the 1 that noise may be in a kernel."""
    codec = CODECS[kind]
    whole = np.arange(1, codec.levels + 1)
    t = np.float64(codec.expand(jnp.asarray(whole, jnp.float32)))
    octaves = np.log2(t) + codec.top_octaves
    n, u, between = numbers(codec)
    for root in (1e-3, 0.5, 1, 2, 7, 14):
        # a number itself is 2^-16 of a code off at most, to either side
        for noise in (2.0**-10, 0.5, 1 - 2.0**-10):
            assert (codes(codec, octaves, noise, root) == whole).all()
        assert (codes(codec, between, 1.0, root) == n).all()
        top = codes(codec, octaves[-1:] + np.float32([0, 1e-6, 1, 50]), 0.0, root)
        assert (top == codec.levels).all()


def test_nothing_is_under_code_one():
    codec = CODECS["e4m3"]
    for noise in (None, 0.0, 0.5):
        noise = None if noise is None else jnp.float32(noise)
        found = codec.round_octaves(jnp.float32([-3.1, -20, -np.inf]), noise, codec.odds(0.5))
        np.testing.assert_array_equal(found, 1)


# -- logarithms and powers of two as single instructions of a GPU ------------------------------
def off(function, least):
    """With errors of either sign, up to 2^-22 of the result or of `least`."""

    def apply(x):
        y = function(x)
        return y + jnp.sin(37 * y + 1000 * x) * jnp.maximum(jnp.abs(y), least) * 2.0**-22

    return apply


EXACT = numerics.Approximations()
APPROXIMATE = numerics.Approximations(log2=off(EXACT.log2, 1.0), exp2=off(EXACT.exp2, 0.0))


@functools.partial(jax.jit, static_argnames=("codec", "in_kernel"))
def round_trip(codec, x, noise, in_kernel):
    arithmetic = numerics.kernel_arithmetic(APPROXIMATE)
    with arithmetic if in_kernel else contextlib.nullcontext():
        stored = codec.encode(x, noise)
        return *stored, codec.decode(*stored)


BUILT = [expansion.expanded_e4m3, expansion.expanded_dynamic]


@pytest.mark.parametrize(
    "how, spread",
    rows(
        itertools.product(itertools.product(BUILT, [False, True]), [0.01, 1.0, 5.0]),
        [((BUILT[0], True), 1.0)],
    ),
)
def test_a_kernels_approximations_move_codes_by_one_and_rarely(how, spread):
    build, stochastic = how
    codec = build()
    x = np.random.default_rng(0).normal(size=(64, 32, 128))
    x = jnp.asarray(np.sign(x) * np.exp(spread * x), jnp.float32)
    noise = random.uniforms(jnp.uint32(1), x.shape, 128) if stochastic else None
    wanted, found = (round_trip(codec, x, noise, in_kernel) for in_kernel in (False, True))
    same = found[1] == wanted[1]
    assert (~same).mean() < tol.APPROXIMATE_WORDS
    off = np.abs(np.int32(found[0]) - np.int32(wanted[0]))
    assert off.max() <= 1
    assert (off > 0)[same].mean() < tol.APPROXIMATE_CODES
    assert (np.abs(found[2] - x) <= codec.error_bound(x, stochastic)).all()
