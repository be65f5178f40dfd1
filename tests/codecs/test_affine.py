"""The int8 codec with a zero-point: its bound, its zero, bad groups, and long runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem import codecs
from optax_lowmem._src.arrays import groups, numerics, random
from tests.oracle import adam_mini as oracle

CODEC = codecs.affine()
SIZE = 256


@functools.partial(jax.jit, static_argnames=("size", "codec"))
def round_trip(x, key=None, size=SIZE, codec=CODEC):
    noise = None if key is None else random.uniforms(key, x.shape, size)
    codes, scales = codecs.encode_array(codec, x, size, noise)
    return codes, scales, codecs.decode_array(codec, codes, scales, size)


def some(kind, shape=(16, 512)):
    """Values that span zero, of one sign, far from zero, sparse, tiny and huge."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
    made = {
        "spans zero": x, "positive": np.abs(x), "negative": -np.abs(x), "far": 1 + 1e-3 * np.abs(x),
        "sparse": np.where(rng.random(shape) < 0.99, 0, x), "tiny": 1e-30 * x,
        "huge": 3e38 * np.tanh(x), "constant": np.full(shape, -3.0),
    }  # fmt: skip
    return jnp.asarray(made[kind], jnp.float32)


KINDS = ("spans zero", "positive", "negative", "far", "sparse", "tiny", "huge", "constant")


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_error_bound(kind, stochastic):
    x = some(kind)
    codes, _, y = round_trip(x, jnp.uint32(3) if stochastic else None)
    bound = CODEC.error_bound(groups.to_groups(x, SIZE), stochastic).reshape(x.shape)
    assert (np.abs(np.float64(y) - np.float64(x)) <= bound).all()
    assert (np.asarray(y)[np.asarray(x) == 0] == 0).all(), "zero is exact"
    if kind not in ("far", "constant"):
        assert np.ptp(np.asarray(codes, np.int32)) > 200


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_oracles(kind):
    x = some(kind)
    stored, scales, y = round_trip(x)
    grid = CODEC.units(scales)
    step, zero = np.float64(grid.step), np.float64(grid.zero)
    codes = oracle.codes_of(np.asarray(stored).reshape(16, 2, SIZE), zero).reshape(x.shape)
    wanted = oracle.quantize(np.float64(x).reshape(16, 2, SIZE), step, zero)
    off = np.abs(np.int32(wanted).reshape(x.shape) - codes)
    assert off.max() <= 1 and (off > 0).mean() < 1e-3, "only f32 rounding at ties"
    exact = oracle.dequantize(codes.reshape(wanted.shape), step, zero)
    np.testing.assert_allclose(y, exact.reshape(x.shape), rtol=3e-7)


def test_reference_errs_where_ours_does_not():
    for kind, paper in (("far", 0.5), ("tiny", 0.9)):
        x = some(kind)
        errors = [
            float(jnp.max(jnp.abs(round_trip(x, codec=codec)[2] - x)) / jnp.max(jnp.abs(x)))
            for codec in (CODEC, codecs.affine_paper())
        ]
        assert errors[0] < 1 / 254 and errors[1] > paper, kind


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_not_finite(bad):
    x = some("spans zero").at[3, 7].set(bad)
    y = np.asarray(round_trip(x)[2])
    assert np.isnan(y[3, :SIZE]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all() and np.isfinite(y[3, SIZE:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lanes", [slice(7, 8), slice(0, SIZE)], ids=["one", "all"])
def test_not_finite_in_the_papers_form(bad, lanes):
    """The group's scale is NaN: clipped codes alone would decode to numbers."""
    x = some("spans zero").at[3, lanes].set(bad)
    found = round_trip(x, codec=codecs.affine_paper())[1]
    scales = np.asarray(CODEC.scale.decode(found)[0])
    assert np.isnan(scales[3, 0]) and np.isnan(scales).sum() == 1


def test_zeros():
    zeros = jnp.zeros((4, 64))
    codes, scales, y = round_trip(zeros)
    assert not np.asarray(y).any()
    fresh = codecs.decode_array(CODEC, jnp.zeros_like(codes), jnp.zeros_like(scales), SIZE)
    assert not np.asarray(fresh).any(), "the state of `init`"


@pytest.mark.parametrize("codec", [CODEC, codecs.affine_paper()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_set_to_zero_decode_to_zero(kind, codec):
    """In the group of other values, so that a row of a state can be reset by hand."""
    x = some(kind) if codec.guarded else some(kind) / 2  # whose range is finite
    codes, scales, _ = round_trip(x, codec=codec)
    y = codecs.decode_array(codec, codes.at[3, 5:90].set(0), scales, SIZE)
    assert not np.asarray(y)[3, 5:90].any()


@pytest.mark.parametrize(
    "last, size", [(1, 32), (31, 32), (33, 32), (1000, 256), (256, 256), (7, 1)]
)
def test_partial_groups(last, size):
    x = some("positive", (5, last))
    codes, scales, y = round_trip(x, size=size)
    assert codes.shape == x.shape and scales.shape == groups.scale_shape(x.shape, size)
    for start in range(0, last, size):
        part = x[:, start : start + size]
        np.testing.assert_array_equal(round_trip(part, size=size)[2], y[:, start : start + size])


def test_stochastic_rounding_is_unbiased():
    """Also at both ends of the range: no code is clipped."""
    x = some("spans zero", (1, 256))
    keys = jnp.arange(4096, dtype=jnp.uint32)
    y = jax.jit(jax.vmap(lambda key: round_trip(x, numerics_key(key))[2]))(keys)
    step = float(CODEC.units(round_trip(x)[1]).step[0, 0])
    error = np.abs(np.float64(y).mean(0) - np.float64(x)) / step
    assert error.max() < 5 * 0.5 / np.sqrt(keys.size)  # five standard errors of a coin


def numerics_key(key):
    return random.mix(numerics.to_bits(key.astype(jnp.float32)))
