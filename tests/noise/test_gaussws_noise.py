"""GaussWS' R: equation 8 exactly, independent, and the same wherever and whenever it is made."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_lowmem import gaussws
from optax_lowmem._src.arrays import random
from optax_lowmem._src.layers.noise import kernels
from optax_lowmem._src.layers.noise.distributions import GAUSSWS, pack
from tests import tolerances as tol
from tests.oracle.gaussws import PROBABILITIES

VALUES = np.array(sorted(PROBABILITIES))
EXPECTED = np.array([PROBABILITIES[int(v)] for v in VALUES])
SHAPE = (128, 256)


def decoded(words):
    """int8 R of packed words in NumPy, [8, ...]: sign and magnitude of each four bits."""
    fours = np.stack([(np.asarray(words) >> np.uint32(4 * k)) & np.uint32(15) for k in range(8)])
    magnitude, sign = (fours & 7).astype(np.int8), (fours >> 3).astype(np.int8)
    return magnitude * (1 - 2 * sign)


def counts(r):
    found = np.bincount(r.ravel().astype(np.int64) + 2, minlength=5)
    assert found.size == 5
    return found


def excess(found, expected):
    """Standard deviations of a chi-square statistic from its mean."""
    expected = expected * found.sum() / expected.sum()
    freedom = found.size - 1
    return (((found - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def words_of(key, shape):
    """R of an array [m, n] as words [ceil(m / 8), n], each of eight rows."""
    return pack(*kernels.words_of(key, shape, GAUSSWS.draws))


@functools.partial(jax.jit, static_argnums=2)
def packed(seed, steps, shape, path="w"):
    """Words of several steps."""
    keys = jax.vmap(lambda step: random.leaf_key(seed, step, path))(steps)
    return jax.vmap(lambda key: words_of(key, shape))(keys)


def drawn(steps, seed=0, shape=SHAPE, first=0):
    """int8 R of some steps, [8, steps, ceil(m / 8), n]."""
    return decoded(packed(jnp.uint32(seed), jnp.arange(first, first + steps), shape))


def test_probabilities_of_all_bits():
    """Every value of the twelve bits of an element, at each of the eight places of a word."""
    bits = np.arange(4096, dtype=np.uint32)
    x, y, z = ((bits >> np.uint32(4 * i)) & np.uint32(15) for i in range(3))
    for k in range(8):
        shifted = [jnp.asarray(b << np.uint32(4 * k)) for b in (x, y, z)]
        others = [jnp.asarray(b << np.uint32(4 * k) | ~np.uint32(15 << 4 * k)) for b in (x, y, z)]
        for words in (shifted, others):  # what the other seven have does not matter
            found = counts(decoded(pack(*words))[k])
            np.testing.assert_array_equal(found, EXPECTED * 4096)


def test_unpacked_as_by_hand():
    words = packed(jnp.uint32(1), jnp.arange(1), (64, 40))[0]
    r = decoded(words).transpose(1, 0, 2).reshape(64, 40)
    key = gaussws.noise_key(1, 0, "w")
    np.testing.assert_array_equal(gaussws.draw(key, (64, 40)), r)
    np.testing.assert_array_equal(gaussws.draw(key, (61, 40)), r[:61])


def test_distribution():
    total = sum(counts(drawn(32, first=32 * i)) for i in range(100))
    assert total.sum() >= 10**8
    assert abs(excess(total, EXPECTED)) < tol.STANDARD_ERRORS
    # the test would notice 1 % of P(1), and a true rounded normal
    for wrong in (9 / 64 * 1.01, 0.1573):
        other = EXPECTED + np.array([0, 1, -2, 1, 0]) * (wrong - 9 / 64)
        assert excess(total, other) > 50


def independent(a, b):
    """Standard deviations of the chi-square statistic of two R's table from independence."""
    table = np.zeros((5, 5))
    np.add.at(table, (a.ravel().astype(int) + 2, b.ravel().astype(int) + 2), 1)
    three = np.add.reduceat(np.add.reduceat(table, [0, 2, 3], 0), [0, 2, 3], 1)  # -, 0, +
    wanted = three.sum(1, keepdims=True) * three.sum(0, keepdims=True) / three.sum()
    return (((three - wanted) ** 2 / wanted).sum() - 4) / np.sqrt(8)


def test_words_bits_and_steps_are_independent():
    """Neighbours in every direction: places in a word, words along both axes, steps."""
    r = drawn(64)  # [8, steps, rows of words, columns]
    worth = [independent(r[i], r[j]) for i, j in itertools.combinations(range(8), 2)]
    for lag in (1, 2, 3, 8, 31, 32):
        worth.append(independent(r[..., lag:], r[..., :-lag]))
    for lag in (1, 2, 4):
        worth.append(independent(r[:, :, lag:], r[:, :, :-lag]))
        worth.append(independent(r[:, lag:], r[:, :-lag]))
    worth.append(independent(r[1:, :, :, 1:], r[:-1, :, :, :-1]))
    assert len(worth) > 35 and max(worth) < tol.STANDARD_ERRORS + 1, max(worth)


def test_words_are_whole():
    """Each bit of the magnitudes and signs of a word against the parity of all others."""
    words = np.asarray(packed(jnp.uint32(5), jnp.arange(32), SHAPE))
    r = decoded(words)
    parity = np.bitwise_xor.reduce(r & 1, axis=0)
    # of eight independent bits with P(1) = 9/32 the parity is 1 with (1 - (1 - 2 p)^8) / 2
    share = (1 - (1 - 2 * 9 / 32) ** 8) / 2
    error = np.sqrt(share * (1 - share) / parity.size)
    assert abs(parity.mean() - share) < tol.STANDARD_ERRORS * error


@pytest.mark.parametrize(
    "change", [{"path": "v"}, {"seed": 1}, {"seed": 2**31}, {"path": "layers/1/w"}], ids=str
)
def test_layers_and_seeds_are_independent(change):
    own = {"seed": 0, "path": "w"} | change
    one = decoded(packed(jnp.uint32(0), jnp.arange(32), SHAPE))
    key = functools.partial(random.leaf_key, jnp.uint32(own["seed"]))
    keys = [key(jnp.uint32(step), own["path"]) for step in range(32)]
    other = decoded(jax.vmap(lambda k: words_of(k, SHAPE))(jnp.stack(keys)))
    assert independent(one, other) < tol.STANDARD_ERRORS
    assert (one == other).mean() < 0.6  # sum of P^2 is 0.552


def test_overlapping_counters_make_other_words():
    """Keys whose counters are those of another leaf, shifted by a row."""
    keys = random.word_keys(random.leaf_key(jnp.uint32(0), jnp.uint32(0), "w"))
    shifted = (keys[0] + jnp.uint32(1) * random.odd(0), random.word_keys(jnp.uint32(7))[1])
    places = [jax.lax.broadcasted_iota(jnp.uint32, (64, 64), axis) for axis in (0, 1)]
    one, own, other = (
        random.draw_words(k, places, 3) for k in (keys, (shifted[0], keys[1]), shifted)
    )
    for a, b, c in zip(one, own, other, strict=True):
        np.testing.assert_array_equal(a[1:], b[:-1])  # the trap
        assert (a[1:] == c[:-1]).mean() == 0


# ---- the same everywhere -------------------------------------------------------------------------
def test_layers_of_a_stack_and_parts():
    key = gaussws.noise_key(0, 3, "w")
    whole = np.asarray(gaussws.draw(key, (3, 64, 96)))
    assert independent(whole[0], whole[1]) < tol.STANDARD_ERRORS
    np.testing.assert_array_equal(gaussws.draw(key, (2, 40, 50)), whole[:2, :40, :50])
    starts = (jnp.uint32(1), jnp.uint32(32 // 8), jnp.uint32(64))
    part = kernels.noise_of_plain(random.part_keys(key, *starts), (2, 32, 32), GAUSSWS)
    np.testing.assert_array_equal(part, whole[1:, 32:, 64:])


@pytest.mark.parametrize("noise", gaussws.NOISES)
def test_jitted_and_eager(noise):
    key = gaussws.noise_key(0, 3, "w")
    draw = functools.partial(gaussws.draw, shape=(40, 33), noise=noise)
    np.testing.assert_array_equal(jax.jit(draw)(key), draw(key))


@pytest.mark.parametrize(
    "spec", [P("a", "b"), P("b", "a"), P(None, ("a", "b")), P(("a", "b"))], ids=str
)
def test_sharded(spec):
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    draw = functools.partial(gaussws.draw, shape=(256, 512))
    sharded = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))
    text = sharded.lower(jnp.uint32(3)).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    np.testing.assert_array_equal(sharded(jnp.uint32(3)), draw(jnp.uint32(3)))


def test_backward_has_the_forward_r():
    """R of a block, element by element, from the gradient of its b_t alone; and from the sum."""
    w, key = jnp.full((32, 64), 0.5), jax.random.key(3)
    bits = jnp.full((1, 2), 2.0)  # max |w| 2^(1 - b_t) = 1/4

    def pulled(one_hot):
        _, pull = jax.vjp(lambda b: gaussws.sample(w, b, key, compute="float32"), bits)
        return pull(one_hot)[0]

    hots = jnp.eye(32 * 64).reshape(-1, 32, 64)
    back = jax.jit(lambda: jax.lax.map(pulled, hots, batch_size=64))().sum((1, 2))
    forward = (gaussws.sample(w, bits, key, compute="float32") - w) * 4
    assert np.unique(forward).size == 5
    np.testing.assert_array_equal(back.reshape(32, 64), forward * jnp.float32(-np.log(2)) / 4)
    np.testing.assert_array_equal(forward, gaussws.draw(key, (32, 64)))


# ---- baselines -----------------------------------------------------------------------------------
def test_uniform():
    r = np.asarray(gaussws.draw(jnp.uint32(1), (1024, 1024), "diffq"))
    inner = np.arange(1, 8) / 16
    inner = inner + 2.0 ** (np.floor(np.log2(inner)) - 8)  # half way to the next bf16 number
    edges = np.array([-0.501, *-inner[::-1], *inner, 0.501])
    inside = np.histogram(r, edges)[0]
    assert abs(excess(inside, np.diff(np.clip(edges, -0.5, 0.5)))) < tol.STANDARD_ERRORS
    assert np.abs(r).max() <= 0.5 and abs(r.var() - 1 / 12) < 1e-3
    np.testing.assert_array_equal(r, np.float32(r.astype(jnp.bfloat16)))


def test_true_rounded_normal():
    r = np.asarray(gaussws.draw(jnp.uint32(1), (1024, 1024), "box-muller"))
    edges = np.array([-np.inf, -3, -1, 1, 3, np.inf])  # of N, where round(N / 2) changes
    below = np.array([0.0, 0.0013499, 0.1586553, 0.8413447, 0.9986501, 1.0])
    assert edges.size == below.size
    found = np.bincount(np.clip(r.astype(int), -2, 2).ravel() + 2, minlength=5)
    assert abs(excess(found, np.diff(below))) < tol.STANDARD_ERRORS
    assert independent(np.clip(r[:, :-1], -2, 2), np.clip(r[:, 1:], -2, 2)) < 5
    assert independent(np.clip(r[:-1], -2, 2), np.clip(r[1:], -2, 2)) < 5
