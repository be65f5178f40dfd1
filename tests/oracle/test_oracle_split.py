"""The weight-split oracles by hand, and over every weight and correction."""

import ml_dtypes
import numpy as np
import pytest

from . import split


def every_bf16() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("fmt", sorted(split.FORMATS))
def test_ulp_is_the_spacing_above(fmt):
    dtype = split.FORMATS[fmt].dtype
    top = int(np.asarray(np.inf).astype(dtype).view(np.uint16))
    p = np.arange(top, dtype=np.uint16).view(dtype)  # 0 to the largest finite number
    value = p.astype(np.float64)
    np.testing.assert_array_equal(
        np.exp2(split.ulp_exponent(p, fmt)[:-1].astype(np.float64)), np.diff(value)
    )
    np.testing.assert_array_equal(split.ulp_exponent(-p, fmt), split.ulp_exponent(p, fmt))


def test_ulp_split_by_hand():
    # 1 + 2^-9 is a quarter ULP (2^-7) above 1: half of the interval, 63.5 rounds away from zero
    p, rho = split.split_ulp(
        np.array([1 + 2.0**-9, -1 - 2.0**-9, 1 + 2.0**-8, 0.0, np.inf, 3.4e38])
    )
    assert p.astype(np.float32).tolist() == [
        1,
        -1,
        1,
        0,
        np.inf,
        np.float32(3.4e38).astype(ml_dtypes.bfloat16),
    ]
    assert rho.tolist()[:5] == [64, -64, 127, 0, 0]
    np.testing.assert_array_equal(
        split.join_ulp(p[:3], rho[:3]),
        np.float32([1 + 2**-8 * 64 / 127, -1 - 2**-8 * 64 / 127, 1 + 2**-8]),
    )
    # below a power of two the interval is half as wide: 1 - 2^-10 rounds to 1, error -2^-10 of 2^-8
    p, rho = split.split_ulp(np.float32([1 - 2.0**-10]))
    assert (float(p[0]), int(rho[0])) == (1.0, -32)
    # fp16 subnormals: 3.25 * 2^-24, an error of half the half ULP
    p, rho = split.split_ulp(np.float32([3.25 * 2.0**-24]), "float16")
    assert (float(p[0]), int(rho[0])) == (3 * 2.0**-24, 64)


@pytest.mark.parametrize("bits", [24, 32])
def test_bits_split_exhaustive_over_weights_and_corrections(bits):
    rng = np.random.default_rng(5)
    low = bits - 16
    for c in range(-128, 128) if bits == 24 else rng.integers(-32768, 32768, 64):
        p = every_bf16()
        p = p[np.isfinite(p.astype(np.float32)) & ((p.astype(np.float32) != 0) | (c >= 0))]
        w = split.join_bits(p, np.full(p.shape, c), bits)
        p2, c2 = split.split_bits(w, bits)
        assert (p2.view(np.uint16) == p.view(np.uint16)).all() and (c2 == c).all()
    # 1 + 2^-8 is half an ULP above 1 and goes up, with the lowest correction
    p, c = split.split_bits(np.float32([1 + 2.0**-8, -1 - 2.0**-8, -0.0, np.inf, np.nan]), bits)
    assert p.view(np.uint16).tolist() == [0x3F81, 0xBF81, 0x8000, 0x7F80, 0x7FC0]
    assert c.tolist() == [-(1 << (low - 1)), -(1 << (low - 1)), 0, 0, 0]
    assert split.join_bits(p[2:3], c[2:3], bits).view(np.uint32).tolist() == [0x80000000]
    assert split.join_bits(p[2:3], np.array([-3]), bits).view(np.uint32).tolist() == [0x80000000]
    cuda_nan = np.array([0x7FFFFFFF, 0xFFC00001], np.uint32).view(np.float32)
    assert split.split_bits(cuda_nan, bits)[0].view(np.uint16).tolist() == [0x7FC0, 0x7FC0]


def test_split_errors():
    b = np.random.default_rng(6).integers(0, 2**32, 400_000, dtype=np.uint32)
    w = b.view(np.float32)
    w = w[np.isfinite(w)]
    assert (
        split.join_bits(*split.split_bits(w, 32), 32).view(np.uint32) == w.view(np.uint32)
    ).all()
    w = w[(np.abs(w) >= 2.0**-126) & (np.abs(w) < 3.3e38)]
    bits24, ulp24 = (split.relative_error(s, w) for s in ("bits24", "ulp24"))
    assert bits24.max() <= 2.0**-16 and abs(bits24.mean() / 5.29e-6 - 1) < 0.01
    # half a step of 1/127 half ULP, relative to the smallest number of a binade: 2^-8 / 254
    assert ulp24.max() <= 2.0**-8 / 254 * 1.01 and abs(ulp24.mean() / 5.35e-6 - 1) < 0.01
    assert 0.997 < (split.relative_error("ulp32", w) == 0).mean() < 0.999
    assert np.mean(split.split_bits(w)[0] != w.astype(ml_dtypes.bfloat16)) < 0.003


def test_figure_3_order():
    normal = range(-10, 11)
    for fmt in split.FORMATS:
        none, kahan, small, large = (
            split.error_by_exponent(s, fmt, normal, 4096)
            for s in ("none", "float", "ulp24", "ulp32")
        )
        assert (small < none / 200).all() and (large < small).all() and (large <= kahan).all()
    assert (split.error_by_exponent("ulp32", "float16", normal, 4096) == 0).all()
    assert (split.error_by_exponent("bits32", "bfloat16", range(-127, 127), 512) == 0).all()


def test_24_bit_ties_go_to_even():
    ties = np.array([0x3F800080, 0x3F800180, 0x3F8001A0, 0x3F807F80], np.uint32).view(np.float32)
    rebuilt = split.join_bits(*split.split_bits(ties))
    assert rebuilt.view(np.uint32).tolist() == [0x3F800000, 0x3F800200, 0x3F800200, 0x3F808000]
