"""Sampled weights and their gradients against float64, formats, and what bitwidths allow."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem import gaussws
from optax_lowmem._src.layers.noise.formats import FORMATS, Scaled
from tests import tolerances as tol
from tests.oracle import gaussws as oracle
from tests.tiers import in_turn, rows

SHAPES = [(32, 32), (64, 96), (33, 40), (5, 7), (2, 40, 70), (2, 3, 8, 33)]
SCALED = [name for name, one in FORMATS.items() if isinstance(one, Scaled)]


def drawn(shape, dtype=jnp.float32, seed=0):
    """Weights whose sizes differ from block to block, and bitwidths."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(0, 2, (*shape[:-2], 1, 1)) + rng.normal(0, 1, shape))
    w = jnp.asarray(rng.normal(0, 0.02, shape) * size, dtype)
    return w, jnp.asarray(rng.uniform(2, 8, oracle.block_shape(shape)), jnp.float32)


draw = functools.partial(jax.jit, static_argnums=(1, 2))(gaussws.draw)
sample = functools.partial(jax.jit, static_argnames=("noise", "compute"))(gaussws.sample)


def f64(x):
    return np.asarray(x, np.float32).astype(np.float64)


@pytest.mark.parametrize(
    "shape, noise",
    rows(
        itertools.product(SHAPES, gaussws.NOISES),
        list(zip(SHAPES[::2], gaussws.NOISES, strict=False)),
    ),
    ids=str,
)
def test_sample(shape, noise):
    w, bits = drawn(shape)
    key = jax.random.key(1)
    r = f64(draw(key, shape, noise))
    found = sample(w, bits, key, noise=noise, compute="float32")
    wanted = oracle.sample(f64(w), f64(bits), r)
    spread = np.abs(wanted) + np.abs(wanted - f64(w))
    assert (np.abs(f64(found) - wanted) <= tol.SAMPLE * spread).all()
    np.testing.assert_array_equal(jax.jit(gaussws.perturb)(w, bits, jnp.float32(r)), found)
    narrow = sample(w, bits, key, noise=noise)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, np.asarray(found).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", rows([jnp.bfloat16, jnp.float16, jnp.float32], [jnp.bfloat16]))
def test_dtypes_and_one_bitwidth(dtype):
    w, _ = drawn((40, 64), dtype)
    whole = jnp.full((2, 2), 5.0)
    for compute in ("bfloat16", "float16", "float32"):
        found = sample(w, 5.0, jax.random.key(0), compute=compute)
        assert found.dtype == jnp.dtype(compute)
        same = sample(w.astype(jnp.float32), whole, jax.random.key(0), compute=compute)
        np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize(
    "noise, shape", in_turn(["gaussws", "diffq"], [(64, 96), (33, 40), (2, 40, 70)]), ids=str
)
def test_gradients(shape, noise):
    """Equations 2 and 3, which the oracle holds against finite differences."""
    w, bits = drawn(shape)
    key, g = jax.random.key(2), drawn(shape, seed=5)[0]

    def pulled(w, bits):
        sampled, pull = jax.vjp(
            lambda w, b: gaussws.sample(w, b, key, noise=noise, compute="float32"), w, bits
        )
        return sampled, pull(g)

    sampled, (of_w, of_bits) = jax.jit(pulled)(w, bits)
    r = f64(draw(key, shape, noise))
    wanted_w, wanted = oracle.gradients(f64(w), f64(bits), r, f64(g))
    np.testing.assert_array_equal(f64(of_w), wanted_w)
    size = oracle.gradients(f64(w), f64(bits), -np.abs(r), np.abs(f64(g)))[1]
    assert (np.abs(f64(of_bits) - wanted) <= tol.BITS_GRADIENT * size).all()
    # against finite differences of the whole computation in float64, block maxima held fixed
    held, eps = oracle.maxima(f64(w)), 1e-6
    index = tuple(s - 1 for s in bits.shape)
    step = np.zeros(bits.shape)
    step[index] = eps
    up, down = (oracle.sample(f64(w), f64(bits) + s, r, held) for s in (step, -step))
    slope = ((up - down) * f64(g)).sum() / (2 * eps)
    assert abs(float(of_bits[index]) - slope) <= (tol.BITS_GRADIENT + 1e-7) * size[index]


def test_gradients_have_the_dtypes_of_what_they_are_of():
    w, bits = drawn((33, 40), jnp.bfloat16)

    def loss(w, bits, scalar):
        one = gaussws.sample(w, bits, jax.random.key(0))
        other = gaussws.sample(w, scalar, jax.random.key(1))
        return jnp.sum(one.astype(jnp.float32) ** 2) + jnp.sum(other.astype(jnp.float32) ** 3)

    of_w, of_bits, of_scalar = jax.jit(jax.grad(loss, (0, 1, 2)))(w, bits, jnp.float32(4))
    assert (of_w.dtype, of_bits.dtype, of_scalar.shape) == (jnp.bfloat16, jnp.float32, ())
    assert np.asarray(of_bits).all() and float(of_scalar) != 0


def test_nothing_of_the_size_of_the_noise_is_kept():
    w, bits = drawn((256, 512))
    pull = jax.eval_shape(lambda w, b: jax.vjp(lambda *a: gaussws.sample(*a, 3), w, b)[1], w, bits)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull)) <= 4 * 128 + 8


def test_transposing():
    """sample(w^T, R^T) = sample(w, R)^T, bit for bit (section 3.2)."""
    w, bits = drawn((70, 33))
    r = gaussws.draw(jax.random.key(0), w.shape)
    found = gaussws.perturb(w.T, bits.T, r.T)
    np.testing.assert_array_equal(found, gaussws.perturb(w, bits, r).T)
    # vectors of 32 along one axis have other maxima when transposed
    block = np.asarray(jnp.abs(w[:32, :32]))
    assert (block.max(axis=1) != block.max(axis=0)).mean() > 0.5


@pytest.mark.full
def test_under_transformations():
    w, bits = drawn((3, 40, 64))
    keys = jax.random.split(jax.random.key(0), 3)
    each = [gaussws.sample(*row) for row in zip(w, bits, keys, strict=True)]
    np.testing.assert_array_equal(jax.vmap(gaussws.sample)(w, bits, keys), jnp.stack(each))
    _, scanned = jax.lax.scan(lambda c, row: (c, gaussws.sample(*row)), 0, (w, bits, keys))
    np.testing.assert_array_equal(scanned, jnp.stack(each))
    grads = jax.vmap(jax.grad(lambda b, w, k: gaussws.sample(w, b, k).sum()))(bits, w, keys)
    alone = jax.grad(lambda b: gaussws.sample(w[1], b, keys[1]).sum())(bits[1])
    np.testing.assert_allclose(grads[1], alone, rtol=1e-5)


def test_what_is_not_finite_shows():
    w, bits = drawn((64, 64))
    w = w.at[0, 0].set(jnp.nan).at[40, 40].set(-jnp.inf)
    for compute in ("bfloat16", "mxfp4"):
        found = np.float32(sample(w, bits, jax.random.key(0), compute=compute))
        assert not np.isfinite(found[:32, :32]).any() and not np.isfinite(found[32:, 32:]).any()
        assert np.isfinite(found[:32, 32:]).all()
    zero = gaussws.sample(jnp.zeros((32, 32)), 4.0, 0)
    assert not np.asarray(zero).any()


# ---- formats -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, name",
    rows(
        itertools.product([(64, 96), (2, 33, 40)], SCALED),
        [((2, 33, 40), name) for name in SCALED[::2]],
    ),
    ids=str,
)
def test_formats(name, shape):
    to, (w, bits) = FORMATS[name], drawn(shape)
    w = w.at[..., 3, 5].set(0.0)
    wanted = oracle.cast(f64(w), to.mantissa, to.binades, to.largest)
    np.testing.assert_array_equal(f64(gaussws.fake_cast(w, name)), wanted)
    key = jax.random.key(0)
    wide = sample(w, bits, key, compute="float32")
    found = sample(w, bits, key, compute=name)
    assert found.dtype == jnp.bfloat16
    wanted = oracle.cast(f64(wide), to.mantissa, to.binades, to.largest)
    np.testing.assert_array_equal(f64(found), wanted)


def test_formats_of_any_bits():
    w, _ = drawn((64, 64))
    for exponent, mantissa in [(2, 1), (3, 4), (4, 3), (5, 10), (1, 2)]:
        ranges, largest = 2**exponent - 1, 2 - 2.0**-mantissa
        wanted = oracle.cast(f64(w), mantissa, ranges, largest)
        np.testing.assert_array_equal(f64(gaussws.fake_cast(w, (exponent, mantissa))), wanted)
    assert (gaussws.fake_cast(w, (2, 1)) == gaussws.fake_cast(w, "mxfp4")).all()
    np.testing.assert_array_equal(
        gaussws.fake_cast(w, "bfloat16"), np.asarray(w).astype(jnp.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("scale", [2.0**-90, 1.0, 2.0**100])
def test_formats_do_not_depend_on_the_scale(scale):
    w, _ = drawn((64, 64))
    for name in SCALED:
        one = f64(gaussws.fake_cast(w, name)) * scale
        np.testing.assert_array_equal(f64(gaussws.fake_cast(w * jnp.float32(scale), name)), one)


def test_casting_twice_is_casting_once():
    w, _ = drawn((64, 64))
    for name in SCALED:
        once = gaussws.fake_cast(w, name)
        np.testing.assert_array_equal(gaussws.fake_cast(once, name), once)


# ---- bitwidths -----------------------------------------------------------------------------------
def test_bounds_of_the_paper():
    """Section 3.3's example, and equation 6 for the other formats."""
    assert gaussws.most_bits("bfloat16") == 9 and gaussws.most_bits("bfloat16", 2.0**-4) == 5
    bounds = {name: gaussws.most_bits(name) for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")}
    assert bounds == {"mxfp8_e4m3": 5, "mxfp8_e5m2": 4, "mxfp4": 3}
    assert gaussws.most_bits("bfloat16", "diffq") < 0


@functools.partial(jax.jit, static_argnums=(1, 2))
def underflow(w, bits, name):
    r = gaussws.draw(jnp.uint32(1), w.shape)
    return gaussws.underflow_share(w, gaussws.perturb(w, float(bits), r), r, name)


def spread_maxima(seed):
    """64 blocks whose maxima lie evenly in [1, 2), weights over some binades below."""
    rng = np.random.default_rng(seed)
    tops = np.repeat(np.repeat(1 + np.arange(64).reshape(8, 8) / 64, 32, 0), 32, 1)
    w = np.exp2(rng.uniform(-4, 0, tops.shape)) * tops * rng.choice([-1, 1], tops.shape)
    w[::32, ::32] = tops[::32, ::32]
    return jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize("name", ["bfloat16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_noise_under_the_bound_does_not_underflow(name):
    w = spread_maxima(0)
    kept = gaussws.most_bits(name, any_maximum=True)
    assert float(underflow(w, kept, name)) == 0
    assert float(underflow(w, kept + 4, name)) > 0.01


def test_the_bound_of_equation_6_needs_a_large_maximum():
    """m + 2: half a step of noise, where a block's maximum is a power of two."""
    assert gaussws.most_bits("mxfp8_e5m2") == 4
    w, r = jnp.ones((32, 32)), jnp.ones((32, 32))
    sampled = gaussws.perturb(w, 4.0, r)
    assert float(sampled[0, 0]) == 1.125  # a tie of 1 and 1.25
    assert float(gaussws.underflow_share(w, sampled, r, "mxfp8_e5m2")) == 1
    w = jnp.full((32, 32), 1.75).at[0, 0].set(1.99)
    assert float(underflow(w, 4, "mxfp8_e5m2")) == 0


def test_near_zero_values_are_annealed():
    """Section 3.5: small values next to a large one vanish with a probability of up to 0.284."""
    w = jnp.full((1024, 1024), 2.0**-20).at[::32, ::32].set(1.0)
    found = gaussws.sample(w, 6.0, jax.random.key(0))
    small = np.asarray(w) < 1
    gone = np.asarray(found != w.astype(jnp.bfloat16))[small]  # the noise alone is left
    share, count = 1 - oracle.PROBABILITIES[0], small.sum()
    assert share == pytest.approx(0.284, abs=5e-4)
    assert abs(gone.mean() - share) < tol.STANDARD_ERRORS * (share * (1 - share) / count) ** 0.5
    left = np.asarray(found, np.float32)[small][gone]
    assert set(np.abs(left).tolist()) == {2.0**-5, 2.0**-4}


def test_table_2():
    assert [gaussws.safe_format(b) for b in (3, 6, 12)] == [(2, 3, 1), (3, 6, 4), (4, 12, 10)]
    for bits in range(3, 20):
        assert gaussws.safe_format(bits) == oracle.safe(bits)
        assert gaussws.safe_format(bits - 0.5) == gaussws.safe_format(bits)
    w, _ = drawn((64, 64))
    for bits in (3, 6, 12):
        _, ranges, mantissa = oracle.safe(bits)
        wanted = oracle.cast(f64(w), mantissa, ranges, 2 - 2.0**-mantissa)
        found = gaussws.fake_cast(w, gaussws.safe_format(bits))
        np.testing.assert_array_equal(f64(found), wanted)


def test_bitwidths_and_their_loss():
    b = jnp.asarray([[1.0, 0.5], [0.0, -0.25]])
    np.testing.assert_allclose(gaussws.bitwidth(b), oracle.bitwidth(np.asarray(b), 6, 4))
    found = {"a": gaussws.bitwidth(b, 8, 2), "b": jnp.full((1, 3), 3.0)}
    value, grads = jax.value_and_grad(lambda t: gaussws.bitwidth_loss(t, 2.0, 0.1))(found)
    wanted = oracle.loss([f64(x) for x in found.values()], 2.0, 0.1)
    assert float(value) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(grads["b"], np.full((1, 3), 0.1 / 7), rtol=1e-6)


def test_table_of_bitwidths():
    bits = {"stack": jnp.asarray([[[3.0, 5.0]], [[1.0, 1.5]]]), "one": jnp.full((2, 2), 8.5)}
    table = gaussws.bits_table(bits)
    assert [row.path for row in table.rows] == ["stack[0]", "stack[1]", "one"]
    first, second, last = table.rows
    assert (first.least, first.mean, first.deviation, first.largest) == (3, 4, 1, 5)
    assert first.safe == (3, 5, 3) and second.safe is None and last.safe == (4, 9, 7)
    assert (first.over, last.over, table.bound) == (0, 1, 8)
    assert "1 of 3 layers have blocks over b_t = 8" in str(table) and "e3m3" in str(table)


def test_safe_cast():
    w, _ = drawn((2, 40, 64))
    tree = {"a": w.astype(jnp.bfloat16), "norm": jnp.ones((64,))}
    bits = {"a": jnp.full((2, 2, 2), 2.0).at[:, 1, 0].set(jnp.asarray([3.0, 5.5]))}
    cast = gaussws.safe_cast(tree, bits)
    assert cast["a"].dtype == jnp.bfloat16 and cast["norm"] is tree["norm"]
    for layer, top in enumerate((3, 6)):
        wanted = gaussws.fake_cast(tree["a"][layer], gaussws.safe_format(top))
        np.testing.assert_array_equal(cast["a"][layer], wanted.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="bitwidths of 'b', which is no leaf"):
        gaussws.safe_cast(tree, {"b": bits["a"]})


# ---- bad input -----------------------------------------------------------------------------------
W = jnp.ones((64, 64))
BAD = {
    "vector": (lambda: gaussws.sample(W[0], 4.0, 0), ValueError, r"shape \(64,\).* a matrix"),
    "empty": (lambda: gaussws.sample(W[:0], 4.0, 0), ValueError, r"shape \(0, 64\)"),
    "blocks": (lambda: gaussws.sample(W, W, 0), ValueError, r"32 x 32 block, \(2, 2\)"),
    "integers": (lambda: gaussws.sample(W.astype(int), 4.0, 0), TypeError, "not int32"),
    "key": (lambda: gaussws.sample(W, 4.0, jnp.ones(3)), TypeError, "jax.random.key or a uint32"),
    "no key": (lambda: gaussws.sample(W, 4.0, None), TypeError, "got None"),
    "noise": (lambda: gaussws.draw(0, (32, 32), "normal"), ValueError, "gaussws, diffq, box-mul"),
    "format": (lambda: gaussws.sample(W, 4.0, 0, compute="fp4"), ValueError, "mxfp4, got 'fp4'"),
    "bits of FP": (lambda: gaussws.fake_cast(W, (9, 1)), ValueError, "got 9, 1"),
    "R": (lambda: gaussws.perturb(W, 4.0, W[:32]), ValueError, r"R has shape \(32, 64\)"),
    "least": (lambda: gaussws.most_bits(7, 0.0), ValueError, r"in \(0, 1\]"),
    "safe": (lambda: gaussws.safe_format(0.5), ValueError, "b_t = 0.5"),
    "loss": (lambda: gaussws.bitwidth_loss({}), ValueError, "no leaf"),
    "state": (lambda: gaussws.bitwidths(()), ValueError, "has no gaussws_noise"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input(bad):
    call, kind, message = bad
    with pytest.raises(kind, match=message):
        call()
