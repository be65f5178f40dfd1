"""The hash behind stochastic rounding: uniform, uncorrelated, and the same wherever it runs."""

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import random
from tests import tolerances as tol
from tests.tiers import rows

BINS = 256


def chi_square(u):
    """Standard deviations of the chi-square statistic of 256 equal bins from its mean."""
    counts = np.bincount(np.int64(u.ravel() * BINS), minlength=BINS)
    expected = u.size / BINS
    return (((counts - expected) ** 2).sum() / expected - (BINS - 1)) / np.sqrt(2 * (BINS - 1))


@functools.partial(jax.jit, static_argnums=(1, 2))
def over_keys(keys, shape, group_size):
    return jax.vmap(lambda key: random.uniforms(random.mix(key), shape, group_size))(keys)


def over_steps(steps, shape, group_size=32, seed=0, path="w", slot="mu"):
    def one(step):
        key = random.leaf_key(jnp.uint32(seed), step, path)
        return random.uniforms(key, shape, group_size, slot)

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(steps, dtype=jnp.uint32)))


UNIFORM = [(65536,), (256, 256), (8, 16, 512), (4096, 1), (64, 1000)]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s[0] < 65 else pytest.mark.full) for s in UNIFORM]
)
def test_uniform_over_an_array(shape):
    for key in range(4):
        u = np.asarray(random.uniforms(random.mix(jnp.uint32(key)), shape, 32))
        assert u.shape == shape and u.dtype == np.float32
        assert u.min() >= 0 and u.max() < 1
        assert abs(chi_square(u)) < tol.STANDARD_ERRORS + 1
        if shape[-1] >= 32:  # R + C has the mean error of its rows and lanes, not of its elements
            assert abs(u.mean() - 0.5) < 5 * 0.29 / np.sqrt(32)


@pytest.mark.parametrize("make", [over_keys, None], ids=["keys", "steps"])
def test_every_element_is_uniform_over_keys_and_steps(make):
    keys = 65536
    u = over_steps(keys, (2, 40)) if make is None else np.asarray(
        over_keys(jnp.arange(keys, dtype=jnp.uint32), (2, 40), 32)
    )  # fmt: skip
    worth = np.array([chi_square(u[:, i, j]) for i in range(2) for j in range(40)])
    assert np.abs(worth).max() < 5 and abs(worth.mean()) < 4 / np.sqrt(worth.size)
    # lower bits too: a uniform times 2^12, without its integer part
    fine = (np.float64(u) * 4096) % 1
    assert max(abs(chi_square(fine[:, i, 33])) for i in range(2)) < 5


def correlations(u):
    """Of the columns of (keys, elements), times sqrt(keys): standard normal if independent."""
    z = (u - 0.5) * np.sqrt(12)
    return z.T @ z / np.sqrt(len(z))


def test_pairs_of_elements_are_uncorrelated_over_keys():
    """Same group, same lane of two groups, same row, other rows: all pairs of 4 x 48 elements."""
    u = np.asarray(over_keys(jnp.arange(16384, dtype=jnp.uint32), (4, 48), 16))
    r = correlations(u.reshape(len(u), -1))
    off = r[np.triu_indices(len(r), 1)]
    assert np.abs(off).max() < 5.2  # of 18336 pairs: 4e-3 to exceed
    assert abs(off.std() - 1) < 0.03 and abs(off.mean()) < 4 / np.sqrt(off.size)
    np.testing.assert_allclose(np.diag(r) / np.sqrt(len(u)), 1, atol=0.03)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_consecutive_steps_are_uncorrelated(lag):
    u = over_steps(16384, (4, 48)).reshape(16384, -1)
    z = (u - 0.5) * np.sqrt(12)
    r = (z[lag:] * z[:-lag]).sum(0) / np.sqrt(len(z) - lag)
    assert np.abs(r).max() < 4.5 and abs(r.mean()) < 4 / np.sqrt(r.size)


def test_every_leaf_slot_step_and_seed_has_bits_of_its_own():
    variants = [dict(), dict(path="v"), dict(slot="nu"), dict(seed=1), dict(seed=2**31)]
    streams = [over_steps(4096, (64,), **kind) for kind in variants]
    streams.append(np.roll(streams[0], 1, axis=0))  # the next step
    flat = [stream.ravel() for stream in streams]
    for i, one in enumerate(flat):
        for other in flat[:i]:
            assert (one == other).mean() < 1e-4
            assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(one.size) < 5
    keys = {int(random.leaf_key(jnp.uint32(s), jnp.uint32(t), p))
            for s in range(4) for t in range(64) for p in "abcd"}  # fmt: skip
    assert len(keys) == 4 * 64 * 4


def mixed(x):
    """lowbias32, on Python integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def drawn(seed, step, path, shape, group_size, slot):
    """The uniforms of a leaf [rows, n], by hand; other numbers would change stored runs."""
    names = zlib.crc32(path.encode())
    key = mixed(mixed((mixed(seed ^ names) + step) % 2**32) ^ names)
    odd = [zlib.crc32(f"axis {axis}".encode()) | 1 for axis in range(2)]
    found = np.zeros(shape)
    for row, column in np.ndindex(*shape):
        group, lane = divmod(column, group_size)
        r = mixed((key + row * odd[0] + group * odd[1]) % 2**32)
        c = mixed((mixed(key ^ 0x5BD1E995) + lane * 0x9E3779B9) % 2**32)
        bits = (r + c) * (zlib.crc32(slot.encode()) | 1) % 2**32
        found[row, column] = (bits >> 8) * 2.0**-24
    return found


def test_bits_are_those_of_the_formula():
    """Of seed, step, path, slot, row, group and lane: a run goes on with the bits it began with."""
    for given in [(0, 1, "w", "mu"), (0, 2, "w", "mu"), (7, 1, "w", "nu"), (0, 1, "layer/v", "mu")]:
        seed, step, path, slot = given
        key = random.leaf_key(jnp.uint32(seed), jnp.uint32(step), path)
        ours = random.uniforms(key, (3, 8), 4, slot)
        np.testing.assert_allclose(ours, drawn(seed, step, path, (3, 8), 4, slot), atol=2.0**-23)


def test_bits_depend_on_coordinates_only():
    key = jnp.uint32(9)
    whole = np.asarray(jax.jit(random.uniforms, static_argnums=(1, 2))(key, (6, 5, 100), 32))
    np.testing.assert_array_equal(whole, random.uniforms(key, (6, 5, 100), 32))  # eager
    part = np.asarray(random.uniforms(key, (3, 5, 64), 32))
    np.testing.assert_array_equal(part, whole[:3, :, :64])


def test_a_part_along_any_axis_draws_what_the_whole_has_there():
    key = jnp.uint32(9)
    whole = np.asarray(random.uniforms(key, (6, 5, 96), 32))
    for start in ((2, 0, 0), (0, 3, 0), (0, 0, 2), (1, 2, 1)):
        keys = random.part_keys(key, *map(jnp.int32, start))
        part = random.uniforms(keys, (2, 2, 32), 32)
        a, b, c = start
        np.testing.assert_array_equal(part, whole[a : a + 2, b : b + 2, 32 * c : 32 * c + 32])


def test_rounding_bits_keeps_the_mean_and_the_exact():
    x = np.float32([1.0, 1 + 2**-8, 1 + 2**-10, -1.003, 3e-5, 0.0, 2**-130, np.inf, np.nan])
    keys = jnp.arange(16384, dtype=jnp.uint32)
    rounded = np.asarray(jax.vmap(lambda k: random.round_bits(x, random.mix(k), 16))(keys))
    low = np.nextafter(np.float32(0), np.float32(1))
    assert not (rounded[:, :7].view(np.uint32) & 0xFFFF).any() and low > 0
    for i in range(5):
        values = np.float64(rounded[:, i])
        spread = np.unique(values)
        assert len(spread) <= 2
        gap = np.ptp(spread)
        assert abs(values.mean() - x[i]) <= 4 * gap / 2 / np.sqrt(len(keys))
    assert (rounded[:, 5] == 0).all() and np.isposinf(rounded[:, 7]).all()
    assert np.isnan(rounded[:, 8]).all()


# -- sharding --------------------------------------------------------------------------------------
SPECS = [P("a", "b"), P("b", "a"), P(None, ("a", "b")), P(("a", "b"), None), P()]


def mesh():
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sharded_bits_are_the_same(spec):
    sharding = NamedSharding(mesh(), spec)
    draw = functools.partial(random.uniforms, shape=(16, 512), group_size=32)
    sharded = jax.jit(draw, out_shardings=sharding)(jnp.uint32(3))
    assert sharded.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(sharded, draw(jnp.uint32(3)))


@pytest.mark.parametrize(
    "spec, dtype",
    rows(
        itertools.product(SPECS, [jnp.float32, jnp.bfloat16]),
        [(SPECS[0], jnp.bfloat16), (SPECS[3], jnp.float32)],
    ),
)
def test_sharded_steps_are_the_same(spec, dtype):
    with jax.default_device(jax.devices("cpu")[0]):
        check_sharded_steps(spec, dtype)


def check_sharded_steps(spec, dtype):
    tx = lowmem.flash_adamw(1e-2, weight_decay=0.1)
    w, g = (np.random.default_rng(i).normal(size=(16, 512)).astype(np.float32) for i in (1, 2))

    @jax.jit
    def three(params, state, grads):
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = lowmem.init(tx, {"w": jnp.asarray(w)}, dtype)
    want = three(params, state, {"w": jnp.asarray(g)})
    sharding = NamedSharding(mesh(), spec)
    shard = functools.partial(jax.device_put, device=sharding)
    params, state = lowmem.init(tx, {"w": shard(jnp.asarray(w))}, dtype)
    assert state.mu["w"].sharding.is_equivalent_to(sharding, 2)
    got = three(params, state, {"w": shard(jnp.asarray(g))})
    assert np.asarray(want[1].mu["w"]).any()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_an_element_has_the_bits_that_its_leaf_has_there():
    """Wherever it lies in its group."""
    key, places, size = jnp.uint32(12345), jnp.arange(70), 32
    whole = random.leaf_bits(key, (70,), size, "mu")

    @jax.jit
    @jax.vmap
    def of_element(place):
        own = random.element_keys(key[None], place, size)[0]
        return random.leaf_bits(own, (1,), size, "mu")[0]

    np.testing.assert_array_equal(of_element(places), whole)
