"""The codec and scale oracles against values worked out by hand."""

import numpy as np
import pytest

from . import closed_loop, codecs, scales

F64 = {"atol": 0, "rtol": 1e-14}


def test_softsign_by_hand():
    # scale 2: ratios 1, 1/3, -1/3, 0 compand to 1, 1/2, -1/2, 0; 63.5 is a tie
    x = np.array([[2.0, 2 / 3, -2 / 3, 0.0]])
    assert codecs.encode(codecs.softsign, x)[0].tolist() == [[127, 64, -64, 0]]
    assert codecs.encode(codecs.softsign, x, rounding="flashoptim")[0].tolist() == [
        [127, 64, -63, 0]
    ]
    assert codecs.encode(codecs.softsign, x, rounding="half_even")[0].tolist() == [
        [127, 64, -64, 0]
    ]
    # code 1 is z = 1/127, so 1/253 of the scale; code 127 is the scale
    decoded = codecs.decode(codecs.softsign, np.array([[1, -1, 127, 0]]), np.array([2.0]))
    np.testing.assert_allclose(decoded, [[2 / 253, -2 / 253, 2.0, 0.0]], **F64)


def test_sqrt_and_linear_by_hand():
    v = np.array([[4.0, 1.0, 0.0, 4 * (10.4 / 255) ** 2]])
    codes, scale = codecs.encode(codecs.sqrt, v)
    assert scale.tolist() == [2.0]
    assert codes.tolist() == [[255, 128, 0, 10]]  # 127.5 rounds up
    np.testing.assert_allclose(
        codecs.decode(codecs.sqrt, codes, scale),
        [[4, 4 * (128 / 255) ** 2, 0, 4 * (10 / 255) ** 2]],
        **F64,
    )
    assert codecs.encode(codecs.linear, np.array([[-1.0, 0.5, 0.25]]))[0].tolist() == [
        [-127, 64, 32]
    ]
    assert codecs.encode(codecs.linear_unsigned, np.array([[1.0, 0.5]]))[0].tolist() == [[255, 128]]


def test_sqrt_floor_only_where_positive():
    v = np.array([[1.0, 1e-12, 0.0]])
    assert codecs.encode(codecs.sqrt, v)[0].tolist() == [[255, 0, 0]]
    assert codecs.encode(codecs.sqrt, v, floor=True)[0].tolist() == [[255, 1, 0]]


@pytest.mark.parametrize("name", sorted(codecs.CODECS))
def test_every_code_is_its_own_encoding(name):
    codec = codecs.CODECS[name]
    codes = np.arange(codec.lowest, codec.levels + 1)[None]
    scale = np.array([0.37])
    x = codecs.decode(codec, codes, scale)
    assert (codecs.encode(codec, x, scale)[0] == codes).all()
    noise = np.random.default_rng(0).random(x.shape)
    assert (codecs.encode(codec, x, scale, noise=noise)[0] == codes).all()
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize("name", sorted(codecs.CODECS))
@pytest.mark.parametrize("stored", [1.0, 0.99, 1.02])
def test_neighbours_bracket_and_bounds_hold(name, stored):
    codec = codecs.CODECS[name]
    x = np.linspace(-1 if codec.signed else 0, 1, 20001)[None]
    scale = np.array([stored])
    lo, hi, p_up = codecs.neighbours(codec, x, scale)
    below, above = codecs.decode(codec, lo, scale), codecs.decode(codec, hi, scale)
    inside = np.clip(x, below.min(), above.max())
    assert (
        (below <= inside).all()
        and (inside <= above).all()
        and (p_up >= 0).all()
        and (p_up < 1).all()
    )
    np.testing.assert_allclose(below + p_up * (above - below), inside, atol=1e-15)  # unbiased
    nearest = codecs.decode(codec, codecs.encode(codec, x, scale)[0], scale)
    slack = 1 + 1e-9
    assert (np.abs(nearest - x) <= scales.error_bound(codec, x, scale) * slack + 1e-15).all()
    best = np.minimum(np.abs(below - x), np.abs(above - x))
    assert (best <= scales.error_bound(codec, x, scale, "half_gap") * slack + 1e-15).all()
    worst = np.maximum(np.abs(below - x), np.abs(above - x))
    gap = scales.error_bound(codec, x, scale, "gap")
    assert (worst <= gap * slack + 1e-15).all()
    # the bounds are tight: some element of the sweep comes within 5 % of each
    moved = (gap > 0) & (np.abs(x) <= stored)
    assert (np.abs(nearest - x)[moved] / scales.error_bound(codec, x, scale)[moved]).max() > 0.95
    assert (worst[moved] / gap[moved]).max() > 0.95


def test_stochastic_rounding_is_unbiased_in_value_not_in_code_space():
    v = np.tile(np.array([1.0, 1e-6]), (200_000, 1))
    noise = np.random.default_rng(1).random(v.shape)
    decoded = codecs.decode(codecs.sqrt, *codecs.encode(codecs.sqrt, v, noise=noise))
    # code 1 has probability 1e-6 * 255^2 = 0.065: standard error of the mean 0.85 %
    assert abs(decoded[:, 1].mean() / 1e-6 - 1) < 0.04
    np.testing.assert_allclose(closed_loop.code_space_bias(1e-3), 1000 / 255, rtol=1e-12)


def test_zero_constant_and_nan_groups():
    for codec in codecs.CODECS.values():
        for storage in ("exact", "f32", "fp16", "e8m8"):
            x = np.stack([np.zeros(4), np.full(4, 0.25), np.array([1.0, np.nan, 0, 1])])
            codes, scale = scales.encode_array(codec, x, 4, scale=storage)
            back = scales.decode_array(codec, codes, scale, 4)
            assert (back[0] == 0).all() and (back[1] == 0.25).all() and np.isnan(back[2]).all()


@pytest.mark.parametrize("last", [1, 31, 32, 33, 1000])
def test_partial_last_group(last):
    x = np.random.default_rng(2).normal(size=(3, last))
    groups = codecs.group_view(x, 32)
    assert groups.shape == (3, -(-last // 32), 32)
    assert (codecs.ungroup(groups, last) == x).all()
    codes, scale = scales.encode_array(codecs.softsign, x)
    assert codes.shape == x.shape and scale.shape == (3, -(-last // 32))
    tail = x[:, (last - 1) // 32 * 32 :]
    np.testing.assert_array_equal(scale[:, -1], np.abs(tail).max(-1).astype(np.float32))


def test_e8m8_scales():
    # 1 + 1/512 is half way between 1 and 1 + 1/256 and goes up; 1 + 1/1024 goes down
    x = np.array([1.0, 1 + 1 / 512, 1 + 1 / 1024, 0.0, 1e-300, 1e300, 2.0**-126])
    want = [1.0, 1 + 1 / 256, 1.0, 2.0**-126, 2.0**-126, 2.0**126, 2.0**-126]
    assert scales.round_scale(x, "e8m8").tolist() == want
    assert np.isnan(scales.round_scale(np.array([np.nan]), "e8m8")).all()
    assert scales.e8m8_encode(np.array([1.0])).tolist() == [0x3F80 << 1]
    fp16 = scales.round_scale(np.array([1e-8, 6e-8, 65519.0, 65520.0]), "fp16")
    assert fp16.tolist() == [0.0, 2.0**-24, 65504.0, np.inf]
    noise = np.random.default_rng(3).random(100_000)
    up = scales.round_scale(np.full(100_000, 1 + 1 / 1024), "e8m8", noise)
    assert set(up) == {1.0, 1 + 1 / 256} and abs((up > 1).mean() - 0.25) < 0.01


@pytest.mark.parametrize("power", [-30, 60])
def test_codes_do_not_depend_on_a_power_of_two(power):
    x = np.random.default_rng(4).normal(size=(8, 64)) * 1e-3
    for name in ("softsign", "linear"):
        plain, scaled = (
            scales.encode_array(codecs.CODECS[name], y, scale="e8m8")[0]
            for y in (x, x * 2.0**power)
        )
        assert (plain == scaled).all()
