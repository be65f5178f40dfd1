"""Every codec of the table against the float64 oracle, its own error bound, and bad groups."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays import random
from tests import tolerances as tol
from tests.oracle import codecs as oracle
from tests.oracle import scales as oracle_scales
from tests.oracle.table import ORACLES, named
from tests.tiers import in_turn, rows

# test_affine.py and test_coat_codecs.py have the others
CODECS = sorted(named(oracle.Codec))
GUARDED = [name for name in CODECS if codecs.CODECS[name].guarded]
FLOORED = [name for name in GUARDED if not codecs.CODECS[name].signed]
F32_MAX = float(jnp.finfo(jnp.float32).max)
STORED = {"f32": "f32", "e8m8": "e8m8_up", "f16": "fp16"}


def oracle_of(codec):
    """The oracle codec of a row of the table, and how `encode_array` of the oracle imitates it."""
    return ORACLES[codec.name], dict(
        scale=STORED[codec.scale.name],
        codes_by="stored" if codec.guarded else "exact",
        rounding="half_away" if codec.guarded else "flashoptim",
        floor=codec.guarded and not codec.signed,
    )


def values(codec, rng, shape, size):
    """Normal values with log-normal scales inside a group, and some zeros."""
    x = size * np.exp(rng.normal(size=shape)) * rng.normal(size=shape)
    x[rng.uniform(size=shape) < 0.02] = 0
    return np.float32(x if codec.signed else np.abs(x))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def encode_array(codec, x, group_size=32, stochastic=False):
    """A code per element, and scales."""
    noise = random.uniforms(jnp.uint32(5), x.shape, group_size) if stochastic else None
    stored, scales = codecs.encode_array(codec, x, group_size, noise)
    return codec.unpack(stored, x.shape[-1]), scales


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode_array(codec, codes, scales, group_size=32):
    return codecs.decode_array(codec, codec.pack(codes), scales, group_size, codes.shape[-1])


@functools.partial(jax.jit, static_argnums=(0, 2))
def error_bound(codec, groups, stochastic):
    return codec.error_bound(groups, stochastic)


def check_codes(codec, x, codes, scales, group_size=32):
    """Codes of x rounded to nearest, against the oracle's."""
    twin, how = oracle_of(codec)
    want, stored = oracle_scales.encode_array(twin, x, group_size, **how)
    groups = oracle.group_view(np.float64(x), group_size)
    used = stored if codec.guarded else oracle.exact_scale(twin, groups)
    z = oracle.ungroup(oracle.companded(twin, groups, used), x.shape[-1])
    off = np.abs(np.int32(codes) - np.int32(want))
    from_tie = np.abs(np.abs(z) % 1 - 0.5)
    assert off.max(initial=0) <= 1
    assert not off[from_tie > tol.CODE_POSITION].any()
    decoded = codec.scale.decode(scales)
    live = np.asarray(decoded) > 0  # the oracle stores 2^-126 for an empty group
    np.testing.assert_allclose(decoded[live], stored[live], rtol=tol.SCALE)


def test_every_codec_has_an_oracle():
    """One without it would be in none of the tests that go over a table of oracles."""
    assert list(ORACLES) == list(codecs.CODECS)


@pytest.mark.parametrize("name", CODECS)
def test_codes_and_decoded_values_match_the_oracle(name):
    codec, rng = codecs.CODECS[name], np.random.default_rng(1)
    twin, _ = oracle_of(codec)
    for size in [1e-30, 1e-10, 1e-3, 1.0, 1e10, 1e30] if codec.guarded else [1e-2, 1.0, 1e2]:
        x = values(codec, rng, (16, 256), size)
        codes, scales = encode_array(codec, x)
        check_codes(codec, x, codes, scales)
        assert not np.asarray(codes)[x == 0].any()
        back = np.asarray(decode_array(codec, codes, scales))
        want = oracle_scales.decode_array(twin, np.asarray(codes), codec.scale.decode(scales))
        np.testing.assert_allclose(back, want, rtol=tol.DECODE)
        assert not back[np.asarray(codes) == 0].any()


@pytest.mark.parametrize(
    "name, stochastic",
    rows(
        itertools.product(CODECS, [False, True]),
        list(zip(CODECS, itertools.cycle([False, True, True, False]), strict=False))[::2],
    ),
)
def test_round_trip_is_within_its_error_bound(name, stochastic):
    codec, rng = codecs.CODECS[name], np.random.default_rng(2)
    for size in [1e-30, 1e-3, 1e30] if codec.guarded else [1e-2, 1e2]:
        x = values(codec, rng, (64, 256), size)
        back = decode_array(codec, *encode_array(codec, x, 32, stochastic))
        error = np.abs(np.float64(back) - x).reshape(64, 8, 32)
        bound = np.float64(error_bound(codec, x.reshape(64, 8, 32), stochastic))
        assert (error <= bound).all()
        assert (error > 0.9 * bound)[error > 0].any()  # and the bound is not idle
        twin, how = oracle_of(codec)
        groups = np.float64(x).reshape(64, 8, 32)
        kind = "gap" if stochastic else "nearest"
        exact = oracle_scales.error_bound(
            twin, groups, oracle.exact_scale(twin, groups), kind, how["floor"]
        )
        # half (or all) of the interval above z, against the interval that z lies in: at most the
        # next, wider interval, and what the stored scale loses
        slack = 3 * codec.scale.relative_error * np.abs(groups) + 1e-5 * np.abs(groups)
        below = exact > 1e-6 * np.abs(groups)  # not the group maximum, which has no interval
        assert (bound <= 3.1 * exact + slack)[below].all()


@pytest.mark.parametrize("name", ["normal-int4", "log-uint4"])
def test_a_value_of_a_code_never_rises(name):
    """P(up) is 0 there, and a uniform may be 0."""
    codec = codecs.CODECS[name]
    codes = jnp.arange(-codec.levels * codec.signed, codec.levels + 1).astype(codec.dtype)[None]
    x = codec.decode(codes, codec.scale.encode(jnp.uint32([127 << 23])))
    found, _ = codec.encode(x, jnp.zeros_like(x))
    assert (found == codes).all()


@pytest.mark.parametrize(
    "name, stochastic",
    rows(
        itertools.product((n for n, one in codecs.CODECS.items() if one.guarded), [False, True]),
        list(zip(codecs.CODECS, itertools.cycle([False, True, True, False]), strict=False))[::3],
    ),
)
def test_the_error_bound_holds_for_all_of_f32(name, stochastic):
    """Group maxima from the least normal number to the largest, more of them at both ends."""
    codec, rng = codecs.CODECS[name], np.random.default_rng(0)
    ends = [(-37.92, -30), (-30, 37), (37, np.log10(F32_MAX))]
    tops = 10 ** np.concatenate([np.linspace(*end, 200) for end in ends])
    x = values(codec, rng, (len(tops), 32), 1)
    x = np.clip(x / np.abs(x).max(-1, keepdims=True) * np.float64(tops)[:, None], -F32_MAX, F32_MAX)
    x = np.float32(np.where(np.abs(x) < 2.0**-126, 0, x))
    back = np.float64(decode_array(codec, *encode_array(codec, x, 32, stochastic)))
    assert np.isfinite(back).all()
    bound = np.float64(error_bound(codec, x[:, None], stochastic))[:, 0]
    assert (np.abs(back - x) <= bound).all()
    assert (bound <= 1.1 * np.float64(np.abs(x).max(-1, keepdims=True)) + 1e-35).all()


@pytest.mark.parametrize("name, top", in_turn(GUARDED, [2.0**-126, 2.0**-120, 2.0**126, 2.0**127]))
def test_extreme_magnitudes(name, top):
    codec = codecs.CODECS[name]
    share = np.array([1, 1, 0.5, 0.25, 0.75, 0, 0, 1] * 4)
    x = np.float32(top * share)
    x[np.abs(x) < 2.0**-126] = 0  # subnormals count as 0
    back = np.float64(decode_array(codec, *encode_array(codec, x)))
    rooted = name.startswith("sqrt")  # whose scale is a root, far from the ends of f32
    want = x if rooted else np.minimum(x, 2.0**126)
    capped = jnp.float32(want).reshape(1, 32)
    bound = np.float64(error_bound(codec, capped, False))[0]
    assert (np.abs(back - want) <= bound).all()
    codes = np.asarray(encode_array(codec, x)[0])
    assert not codes[x == 0].any() and not back[x == 0].any()
    assert (codes[x == top] == codec.levels).all()
    quarter = codes[x == top / 4]
    share = 1 / 4 if top <= 2.0**126 or rooted else 1 / 2  # of the largest scale
    twin, _ = oracle_of(codec)
    position = codec.levels * twin.compress(np.sqrt(share) if rooted else share)
    assert (np.abs(quarter - position) <= 1).all()


@pytest.mark.parametrize("name", rows(CODECS, list(CODECS)[::2]))
def test_zero_and_constant_groups(name):
    codec = codecs.CODECS[name]
    twin, _ = oracle_of(codec)
    below = float(oracle.decode(twin, np.array([codec.levels - 1]), np.float64(1))[0])
    constant = [0.0, 1.0, 0.1, 3e-3, 1 / 3] + ([1e-30, 7e29] if codec.guarded else [])
    x = np.repeat(np.float32(constant)[:, None], 32, 1)
    for stochastic in (False, True):
        codes, scales = encode_array(codec, x, 32, stochastic)
        back = np.float64(decode_array(codec, codes, scales))
        assert not np.asarray(codes)[0].any() and not back[0].any()
        assert np.isfinite(back).all()
        lost = (2 if name.startswith("sqrt") else 1) * codec.scale.relative_error + 4e-7
        step = 1 - below if stochastic else 0.0  # of E8M8 scales above the value
        np.testing.assert_allclose(back, x, rtol=lost + step)
    codes, _ = encode_array(codec, x)
    assert (np.asarray(codes)[1:] == codec.levels).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("name", GUARDED)
def test_a_non_finite_value_shows_in_its_whole_group_only(name, bad):
    codec = codecs.CODECS[name]
    x = values(codec, np.random.default_rng(3), (3, 100), 1.0)
    broken = x.copy()
    broken[1, 40] = bad
    if codec.signed:
        broken[2, 97] = -bad  # in a partial group
    for stochastic in (False, True):
        back = np.asarray(decode_array(codec, *encode_array(codec, broken, 32, stochastic)))
        clean = np.asarray(decode_array(codec, *encode_array(codec, x, 32, stochastic)))
        hit = np.zeros(x.shape, bool)
        hit[1, 32:64] = True
        hit[2, 96:] = codec.signed
        assert np.isnan(back[hit]).all()
        np.testing.assert_array_equal(back[~hit], clean[~hit])


LASTS = [1, 31, 32, 33, 1000, 50257]
FAST_TAILS = [(n, (1, 1000)[i % 2], 32) for i, n in enumerate(CODECS)]
NARROW = [n for n in CODECS if codecs.CODECS[n].bits < 8]  # for even groups only
PLAIN = ("linear-int8", "linear-uint8")
FAST_TAILS += [(n, *tail) for n in PLAIN for tail in [(32, 1), (33, 7), (1000, 128)]]
FAST_TAILS += [("linear-int4", 33, 2)]
FAST_TAILS += [(n, 50257, 32) for n in ("softsign-int8", "sqrt-uint8")]
ALL_TAILS = [(n, last, g) for n in CODECS for last in LASTS for g in (1, 7, 32, 128)]
ALL_TAILS = [row for row in ALL_TAILS if row[0] not in NARROW or row[2] % 2 == 0]


def check_tail(name, last, group_size):
    codec, rng = codecs.CODECS[name], np.random.default_rng(last)
    rank = 1 + (last + group_size) % 4
    x = values(codec, rng, ((2, 3, 2)[: rank - 1] if last < 5000 else ()) + (last,), 0.1)
    codes, scales = encode_array(codec, x, group_size)
    assert codes.shape == x.shape and codes.dtype == codec.dtype
    assert scales.shape == (*x.shape[:-1], -(-last // group_size))
    assert scales.dtype == codec.scale.dtype
    check_codes(codec, x, codes, scales, group_size)
    back = np.float64(decode_array(codec, codes, scales, group_size))
    assert back.shape == x.shape
    bound = error_bound(codec, np.float32(oracle.group_view(x, group_size)), False)
    assert (np.abs(back - x) <= oracle.ungroup(np.float64(bound), last)).all()


@pytest.mark.parametrize("name,last,group_size", rows(FAST_TAILS, FAST_TAILS[::4]))
def test_partial_groups(name, last, group_size):
    check_tail(name, last, group_size)


@pytest.mark.full
@pytest.mark.parametrize("name,last,group_size", sorted(set(ALL_TAILS) - set(FAST_TAILS)))
def test_partial_groups_in_full(name, last, group_size):
    check_tail(name, last, group_size)


@functools.partial(jax.jit, static_argnums=(0, 2))
def codes_over_keys(codec, groups, keys):
    def one(key):
        return codec.encode(groups, random.uniforms(random.mix(key), groups.shape, 32))[0]

    return jax.vmap(one)(jnp.arange(keys, dtype=jnp.uint32))


@pytest.mark.parametrize("name", rows(CODECS, list(CODECS)[::2]))
def test_stochastic_rounding_is_unbiased_between_decoded_neighbours(name):
    """Two codes only, the upper in the share that makes the mean of the decoded values x.

    The decoded mean is off by (share - P) times the gap, so this is E[decode(encode(x))] = x with
    the standard error of a Bernoulli variable.
    """
    codec, rng, keys = codecs.CODECS[name], np.random.default_rng(4), 65536
    twin, how = oracle_of(codec)
    x = values(codec, rng, (12, 32), 0.1)
    if not codec.guarded:  # maxima that FP16 holds: the paper's codes and scale disagree otherwise
        x[:, 0] = 4.0 ** np.ceil(np.log2(np.abs(x).max(1)) / 2)
    scale = np.float64(codec.scale.decode(codec.encode(x)[1]))
    codes = np.asarray(codes_over_keys(codec, x, keys))
    lo, hi, up = oracle.neighbours(twin, x, scale)
    z = oracle.companded(twin, np.float64(x), scale)
    inner = np.abs(x) < oracle.decode(twin, np.full_like(lo, codec.levels), scale)
    inner &= np.abs(z - np.rint(z)) > tol.CODE_POSITION  # else x is a decoded value
    if how["floor"]:
        assert (codes[:, (lo == 0) & (x > 0)] >= 1).all()
        inner &= lo > 0
    assert inner.mean() > (0.8 if codec.bits == 8 else 0.4)  # few codes, many values in the lowest
    assert ((codes == lo) | (codes == hi))[:, inner].all()
    share = (codes == hi).mean(0)
    error = np.sqrt(up * (1 - up) / keys)
    assert (np.abs(share - up) <= tol.STANDARD_ERRORS_OF_MANY * error + 1 / keys)[inner].all()
    # over all elements together: a common bias 15 times smaller would show
    worth = ((share - up) / np.maximum(error, 1 / keys))[inner]
    assert abs(worth.mean()) * np.sqrt(worth.size) < tol.STANDARD_ERRORS


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", FLOORED)
def test_variance_floor(name, stochastic):
    """A code of at least 1 exactly where v > 0; a subnormal is 0."""
    codec = codecs.CODECS[name]
    v = np.float32([1, 2**-126, 1e-37, 1e-30, 1e-12, 1e-6, 0.0, -0.0, 1e-39, 1e-45] + [0.5] * 22)
    for size in (1, 1e-3, 1e30):
        x = v.copy()
        x[0] = size
        codes, _ = encode_array(codec, x, 32, stochastic)
        np.testing.assert_array_equal(np.asarray(codes) >= 1, x >= 2.0**-126)
    paper = codecs.CODECS.get(name + "-paper")  # 4 bits are of no paper
    assert paper is None or not np.asarray(encode_array(paper, v)[0])[1:5].any()


# -- storage -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", codecs.CODECS)
def test_storage_says_what_encode_gives(name):
    codec = codecs.CODECS[name]
    for shape in [(7,), (2, 3, 32)]:
        encode = functools.partial(codecs.encode_array, codec, group_size=4)
        stored = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))
        assert codec.storage(shape, 4).is_like(codecs.StoredSlot(*stored))
        per_element = stored[0].dtype.itemsize * np.prod(stored[0].shape) / max(1, np.prod(shape))
        assert per_element <= codec.bits / 8 * (shape[-1] + 1) / shape[-1]


@functools.partial(jax.jit, static_argnums=0)
def packed(codec, codes):
    stored = codec.pack(codes)
    return stored, codec.unpack(stored, codes.shape[-1])


@pytest.mark.parametrize("name", NARROW)
def test_narrow_codes_share_bytes(name):
    """Every code in every place; neighbours share a byte, the first in its lowest bits."""
    codec = codecs.CODECS[name]
    every = np.arange(-codec.levels if codec.signed else 0, codec.levels + 1, dtype=codec.dtype)
    for length in (1, 32, 31):
        codes = np.random.default_rng(length).choice(every, (3, length))
        codes[0] = np.resize(every, length)
        stored, again = map(np.asarray, packed(codec, codes))
        assert stored.dtype == np.uint8 and stored.shape == (3, -(-length // 2))
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(stored & 15, codes[:, ::2] & 15)
        np.testing.assert_array_equal(stored[:, : length // 2] >> 4, codes[:, 1::2] & 15)
        assert length % 2 == 0 or not (stored[:, -1] >> 4).any()
    assert not np.asarray(codec.unpack(np.zeros((2, 3), np.uint8), 5)).any(), "the state of `init`"


@pytest.mark.parametrize("name, stochastic", in_turn(NARROW, [False, True]))
def test_largest_errors_of_four_bits(name, stochastic):
    """Values all over a group of 64: within what the docstrings state, and near it."""
    codec = codecs.CODECS[name]
    x = np.float32(np.linspace(0, 1, 64 * 512).reshape(64, 512).T)  # each group from 0 to 1
    codes, scales = encode_array(codec, x, 64, stochastic)
    error = np.abs(np.float64(decode_array(codec, codes, scales, 64)) - x)
    largest = tol.LARGEST_ERROR_OF_4_BITS[name][stochastic]
    share = error / x.max(1, keepdims=True)
    assert 0.9 * largest < share.max() <= largest * tol.SCALE_OVER_MAXIMUM


def test_maps_of_one_sign():
    with pytest.raises(ValueError, match="non-negative values only: use lowmem.codecs.normal4"):
        dataclasses.replace(codecs.log4(), signed=True)
    with pytest.raises(ValueError, match="signed values only: use lowmem.codecs.log4"):
        dataclasses.replace(codecs.normal4(), signed=False)


def test_what_bytes_of_two_codes_refuse():
    codec, x = codecs.linear4(), jnp.ones((2, 32))
    with pytest.raises(ValueError, match="2 codes per byte.*multiple of 2, got 7"):
        codecs.encode_array(codec, x, 7)
    with pytest.raises(ValueError, match="2 codes per byte.*multiple of 2, got 7"):
        lowmem.Storage(mu=codec, group_size=7)
    tx = lowmem.compress_state(optax.sgd(0.1, 0.9), trace=codec, group_size=7)
    with pytest.raises(ValueError, match="2 codes per byte.*multiple of 2, got 7"):
        tx.init({"w": x})
    stored = codecs.encode_array(codec, x, 32)
    with pytest.raises(ValueError, match="16 bytes do not determine the length.*pass length="):
        codecs.decode_array(codec, *stored, 32)


@pytest.mark.parametrize("name", rows(codecs.CODECS, list(codecs.CODECS)[::4]))
def test_what_arrays_of_codes_refuse(name):
    codec = codecs.CODECS[name]
    x = jnp.linspace(0, 1, 128).reshape(2, 64)
    codes, scales = codecs.encode_array(codec, x, 32)
    half = x.astype(jnp.bfloat16)
    for one, other in zip(
        codecs.encode_array(codec, half, 32),
        codecs.encode_array(codec, half.astype(jnp.float32), 32),
        strict=True,
    ):
        assert (jax.tree.leaves(one)[0] == jax.tree.leaves(other)[0]).all()
    for wrong in (x[0, 0], x[:, :0]):
        with pytest.raises(ValueError, match="has no groups: its last axis must have elements"):
            codecs.encode_array(codec, wrong, 32)
    with pytest.raises(TypeError, match="f32 or 16-bit values, got int32"):
        codecs.encode_array(codec, x.astype(jnp.int32), 32)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        codecs.encode_array(codec, x, 0)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        codecs.decode_array(codec, codes, scales, 0, 64)
    for wrong in ((scales, codes), (codes, scales[:, :1])):
        with pytest.raises(ValueError, match=f"{codec.name} in groups of 32 stores .*pass the"):
            codecs.decode_array(codec, *wrong, 32, 64)
