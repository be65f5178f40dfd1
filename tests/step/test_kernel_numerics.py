"""The arithmetic that GPU kernels do otherwise, as plain JAX: what it may differ by."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowmem import codecs
from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs.affine import Grid
from optax_lowmem._src.optim.step import reference
from tests import tolerances

F32 = jnp.float32


def in_a_kernel(function):
    """As it is traced in one, compiled."""

    def run(*args):
        with numerics.kernel_arithmetic():
            return function(*args)

    return jax.jit(run)


def floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def test_quotient():
    """Every mantissa of two binades, then any exponents; and what has no quotient."""
    divide = in_a_kernel(numerics.quotient)
    y = floats(np.arange(0x3F800000, 0x40800000, dtype=np.uint32))
    np.testing.assert_allclose(divide(np.float32(3), y), 3 / y, rtol=tolerances.KERNEL_QUOTIENT)
    rng = np.random.default_rng(0)
    x, y = (floats(rng.integers(0x00800000, end, 1 << 20)) for end in (0x7F800000, 0x7E800001))
    with np.errstate(over="ignore", under="ignore"):
        exact = x.astype(np.float64) / y
    found, info = np.asarray(divide(x, y)), np.finfo(np.float32)
    inside = (exact > 2 * info.tiny) & (exact < info.max / 2)
    np.testing.assert_allclose(found[inside], exact[inside], rtol=tolerances.KERNEL_QUOTIENT)
    assert np.isinf(found[exact > 2 * info.max.astype(np.float64)]).all()
    assert (found[exact < info.tiny / 2] == 0).all()
    inf, nan = np.inf, np.nan
    x = np.float32([0, 1, -1, 0, 1, inf, inf, nan, 1, -inf])
    y = np.float32([0, 0, 0, 1, inf, inf, 1, 1, nan, 2])
    np.testing.assert_array_equal(divide(x, y), numerics.quotient(jnp.asarray(x), jnp.asarray(y)))


def test_uniform():
    """Rounded, not cut off: never under what it is elsewhere less half a spacing, and up to 1."""
    rng = np.random.default_rng(0)
    bits = (np.arange(1 << 24, dtype=np.uint32) << 8) | rng.integers(0, 256, 1 << 24, np.uint32)
    bits[:2], bits[-2:] = [0, 1], [0xFFFFFFFE, 0xFFFFFFFF]
    found = np.asarray(in_a_kernel(numerics.uniform)(bits))
    plain = np.asarray(numerics.uniform(jnp.asarray(bits)))
    assert np.abs(found - plain).max() <= tolerances.KERNEL_UNIFORM
    assert np.abs(found - bits * 2.0**-32).max() <= 2.0**-25
    assert found.min() == 0 and found.max() == 1 and plain.max() < 1


def test_noise_of_one_never_rounds_up():
    """A `uniform` of 1, which a kernel may give, rounds no value up to the next code."""

    def positions(levels):
        parts = np.float32([0, 0.5, 1 - 2.0**-17])
        return jnp.asarray(np.add.outer(np.arange(levels, dtype=np.float32), parts).ravel())

    companded = [c for c in codecs.CODECS.values() if isinstance(c, codecs.CompandedCodec)]
    assert len(companded) >= 8
    for codec in companded:
        z = positions(min(codec.levels, 127))
        lo = jnp.floor(z)
        rises = in_a_kernel(lambda z, lo, codec=codec: codec.rises(jnp.float32(1), z, lo))
        assert not np.asarray(rises(z, lo)).any(), codec.name
    z, grid = positions(127), Grid(jnp.float32(1), jnp.float32(0))
    found = in_a_kernel(lambda z: codecs.affine().quantize(z, grid, jnp.float32(1)))(z)
    np.testing.assert_array_equal(found, np.floor(z))


def test_shortcuts_of_a_kernel():
    """On what a GPU computes: NaN is 0x7fffffff there, or the canonical one after this."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    bits = bits[~np.isnan(floats(bits))]
    bits = jnp.asarray(np.append(bits, [numerics.NAN_BITS, 0x7FFFFFFF]).astype(np.uint32))
    found = in_a_kernel(numerics.canonical_nan)(bits)
    np.testing.assert_array_equal(found, numerics.canonical_nan(bits))
    assert found[-1] == numerics.NAN_BITS
    for dtype in (jnp.int8, jnp.uint8):
        info = jnp.iinfo(dtype)
        codes = jnp.arange(info.min, info.max + 1, dtype=jnp.int32)
        low = in_a_kernel(lambda codes, dtype=dtype: numerics.low_byte(codes, dtype))(codes)
        assert low.dtype == dtype
        np.testing.assert_array_equal(low, codes)
    x = jnp.arange(0, 127 * 256 + 1, dtype=F32) / 256
    for sign in (x + 1, -x - 1):
        rounded = in_a_kernel(numerics.round_to_signed_byte)(x, sign)
        np.testing.assert_array_equal(rounded, np.copysign(np.rint(x), sign))
    np.testing.assert_array_equal(in_a_kernel(numerics.round_to_byte)(2 * x), np.rint(2 * x))
    variances = numerics.from_bits(bits[bits <= numerics.MAGNITUDE_MASK])[:, None]
    largest = in_a_kernel(lambda x: numerics.absmax_bits(x, signed=False))(variances)
    np.testing.assert_array_equal(largest, numerics.absmax_bits(variances, signed=False))


def test_an_update_is_nan_where_the_weight_is(monkeypatch):
    """A GPU computes the NaN 0x7fffffff and negates it by its sign: rounding must not wrap to 0."""
    flipped = lambda x: numerics.from_bits(numerics.to_bits(x) ^ jnp.uint32(1 << 31))  # noqa: E731
    monkeypatch.setattr(numerics, "negative", flipped)
    update = in_a_kernel(lambda *args: reference.update_towards(*args, jnp.bfloat16))
    assert np.isnan(np.float32(update(jnp.bfloat16(1), floats(0x7FFFFFFF))))
