"""Quantized products against the NumPy oracle: codes, sums, all three products, bad inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem._src.layers import quantized_matmul
from optax_lowmem._src.layers.quantized_matmul import E4M3, E5M2, INT8, LONGEST_SUM, Quantized
from tests import tolerances as tol
from tests.oracle import switchback as oracle
from tests.tiers import in_turn, rows

pytest.importorskip("flax")

from optax_lowmem import layers  # noqa: E402

VARIANTS = oracle.VARIANTS
DTYPES = ("float32", "bfloat16", "float16")
# name -> (formats of the oracle, what maxima become there)
FORMATS = {
    ("int8", "format"): (("int8", "int8"), (None, None)),
    ("fp8", "format"): (("e4m3", "e4m3"), (None, None)),
    ("fp8-e5m2", "format"): (("e4m3", "e5m2"), (None, None)),
    ("fp8", "unit"): (("e4m3", "e4m3"), (1.0, 1.0)),
    ("fp8-e5m2", "unit"): (("e4m3", "e5m2"), (1.0, 1.0)),
}
# (tokens, inputs, outputs)
SIZES = [(1, 1, 1), (1, 33, 3), (3, 1, 31), (31, 130, 33), (130, 3, 1), (33, 31, 130)]
LAST = (((1,), (0,)), ((), ()))


def arrays(seed, tokens, inputs, outputs, dtype="float32", sizes=(1.0, 1.0, 1.0)):
    """X, W and G with log-normal rows, as f32 values of a dtype."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, inputs), (inputs, outputs), (tokens, outputs)
    return tuple(
        jnp.asarray(size * np.exp(rng.normal(size=(s[0], 1))) * rng.normal(size=s), dtype)
        for s, size in zip(shapes, sizes, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0)
def products(dot_general, x, w, g):
    """Y, dX and dW of a linear layer."""
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    y, vjp = jax.vjp(lambda x, w: dot_general(x, w, axes), x, w)
    return y, *vjp(g)


@functools.partial(jax.jit, static_argnums=0)
def many_products(dot_general, cases):
    """Of several linear layers, in one program."""
    return [products(dot_general, *case) for case in cases]


def exact(*xs):
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in xs]


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize(x, axes, to):
    return quantized_matmul.quantize(x, axes, to)


def test_the_variants_are_those_of_the_oracle():
    from optax_lowmem._src.layers.switchback.products import VARIANTS as known

    assert set(known) == set(VARIANTS)


# ---- one operand ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "to,dtype",
    [(to, "float32") for to in (INT8, E4M3, E5M2, E4M3.at_unit(), E5M2.at_unit())]
    + [(INT8, "bfloat16"), (E5M2, "bfloat16")],
)
def test_codes_are_the_oracles(to, dtype):
    fmt = to.name.removesuffix("-unit")
    ties = 0
    for seed, (tokens, inputs, outputs) in enumerate(SIZES[2:4]):
        x = arrays(seed, tokens, inputs, outputs, dtype)[0]
        (value,) = exact(x)
        for axis in (0, 1, None):
            codes, scales = quantize(x, axis, to)
            assert codes.dtype == to.dtype and codes.shape == x.shape
            want = oracle.quantize(value, axis, fmt, to.largest)
            tie = oracle.near_a_tie(value, axis, fmt, tol.POSITION, to.largest)
            found = np.asarray(codes, np.float64)
            np.testing.assert_array_equal(found[~tie], want.codes[~tie])
            assert scales.shape == want.scale.shape and scales.dtype == jnp.float32
            np.testing.assert_allclose(scales, want.scale, rtol=tol.POSITION)
            error = np.abs(found * np.asarray(scales, np.float64) - value)
            assert (error <= tol.of_quantizing(value, want.scale, fmt)).all()
            ties += tie.sum()
    # of 12,000; bf16 numbers meet them exactly
    assert ties <= {"float32": 1, "bfloat16": 60}[dtype]


def test_ties_go_to_even():
    x = jnp.float32([[127, 0.5, 1.5, 2.5, -0.5, -3.5]])
    assert quantize(x, 1, INT8).codes.tolist() == [[127, 0, 2, 2, 0, -4]]
    x = jnp.float32([[448, 17, 19, -21, 2.0**-10, 3 * 2.0**-10]])  # 16, 18, 20, 22; 2^-9 is least
    found = quantize(x, 1, E4M3).codes
    assert np.float64(found).tolist() == [[448, 16, 20, -20, 0, 2.0**-8]]


@pytest.mark.parametrize("fmt,to", [("e4m3", E4M3), ("e5m2", E5M2)])
def test_scaling_to_1_is_the_papers_simulation(fmt, to):
    """float8cast(x / absmax(x)), times absmax(x)."""
    x = arrays(7, 16, 130, 1)[0]
    codes, scales = quantize(x, 1, to.at_unit())
    absmax = np.abs(x).max(1, keepdims=True)
    np.testing.assert_array_equal(scales, absmax)
    want = (np.float64(x) / absmax).astype(oracle.DTYPE[fmt])
    tie = oracle.near_a_tie(x, 1, fmt, tol.POSITION, 1.0)
    assert not tie.any()
    np.testing.assert_array_equal(np.asarray(codes), want)


def test_the_longest_sum_is_that_of_int32():
    most = 127**2 * LONGEST_SUM
    assert LONGEST_SUM == 133_144 and most < 2**31 <= most + 127**2

    @jax.jit
    def total(codes):
        one = jnp.ones((1, 1), jnp.float32)
        return quantized_matmul.multiply(
            Quantized(codes, one), Quantized(-codes, one), 1, jnp.dtype("float32")
        )

    assert total(jnp.full((1, LONGEST_SUM), 127, jnp.int8)) == np.float32(-most)
    with pytest.raises(ValueError, match="133,145 int8 products"):
        total(jnp.full((1, LONGEST_SUM + 1), 127, jnp.int8))
    x, w = jnp.ones((1, LONGEST_SUM + 1)), jnp.ones((1, 1))
    with pytest.raises(ValueError, match="use float8"):
        jax.eval_shape(lambda: layers.switchback_dot_general()(x, x.T, LAST))
    jax.eval_shape(lambda: layers.switchback_dot_general("switchback", "fp8")(x, x.T, LAST))

    def loss(w, variant):
        return layers.switchback_dot_general(variant)(x.T, w, LAST).sum()

    with pytest.raises(ValueError, match="133,145 int8 products"):  # a sum over tokens
        jax.eval_shape(lambda: jax.grad(loss)(w, "llm_int8"))
    jax.eval_shape(lambda: jax.grad(loss)(w, "switchback"))  # in the inputs' precision


# ---- three products ------------------------------------------------------------------------------
def check_exact(variant, dtype, arguments):
    """int8: the same codes, their sums in integers, the scales in f32, rounded to the dtype."""
    found = products(layers.switchback_dot_general(variant), *arguments)
    want = oracle.layer(*exact(*arguments), variant)
    for name, mine in zip(("y", "dx", "dw"), found, strict=True):
        assert mine.dtype == dtype
        a, b = want.operands[name]
        if not isinstance(a, oracle.Operand):  # dW of SwitchBack
            continue
        rounded = tol.SCALED_SUM + tol.HALF_SPACING[dtype]
        value = getattr(want, name)
        least = tol.SUBNORMAL[dtype]
        np.testing.assert_allclose(*exact(mine), value, rtol=rounded, atol=least)
        assert np.abs(a.codes @ b.codes).max() < 2**31


@pytest.mark.parametrize("variant", rows(VARIANTS, ["switchback", "llm_int8"]))
def test_int8_products_are_the_integers_of_the_oracle(variant):
    """Of seeds without a tie: one code off by one would be off by far more than the rounding."""
    for seed, size in enumerate(SIZES[2:5]):
        seed = next(s for s in range(10 * seed, 10 * seed + 10) if not has_ties(s, size))
        check_exact(variant, "float32", arrays(seed, *size))


def whole(rng, rows, columns, dtype):
    """Halves of integers times a power of two, of maximum 127 in each row and column."""
    x = rng.integers(-120, 121, (rows, columns)) / 2
    x[0], x[:, 0] = 127, -127
    return jnp.asarray(x * 2.0 ** rng.integers(-9, -4), dtype)


@pytest.mark.parametrize("variant, dtype", in_turn(VARIANTS, DTYPES))
def test_int8_products_are_exact_at_ties_too(variant, dtype):
    rng = np.random.default_rng(3)
    tokens, inputs, outputs = SIZES[3]
    shapes = (tokens, inputs), (inputs, outputs), (tokens, outputs)
    check_exact(variant, dtype, [whole(rng, *shape, dtype) for shape in shapes])


def has_ties(seed, size):
    return any(
        oracle.near_a_tie(x, axis, "int8", tol.POSITION).any()
        for x in exact(*arrays(seed, *size))
        for axis in (0, 1, None)
    )


def bounds(want, x, w, g, variant, formats, dtype):
    """Compute error bounds for the elements of y, dx and dw against the exact products."""
    off = {}
    for name, (a, b) in {"y": (x, w), "dx": (g, w.T), "dw": (x.T, g)}.items():
        errors = []
        for value, operand, fmt in zip(
            (a, b), want.operands[name], kinds(name, formats), strict=True
        ):
            if isinstance(operand, oracle.Operand):
                errors.append(tol.of_quantizing(value, operand.scale, fmt))
            elif name == "dw" and variant == "switchback_m" and value is a:
                saved = tol.of_quantizing(value, want.operands["y"][0].scale.T, fmt)
                errors.append(saved + 1.1 * tol.HALF_SPACING[dtype] * (np.abs(value) + saved))
            else:
                errors.append(np.zeros_like(value))
        off[name] = tol.of_product(a, b, *errors, dtype)
    return off


def kinds(name, formats):
    forward, gradient = formats
    return {"y": (forward, forward), "dx": (gradient, forward), "dw": (forward, gradient)}[name]


def check_bounds(variant, format, scaling, dtype, seed, size, sizes=(1.0, 1.0, 1.0)):
    """The largest error of each product, of its bound."""
    return check_many_bounds(variant, format, scaling, dtype, [(seed, size, sizes)])[0]


def check_many_bounds(variant, format, scaling, dtype, cases):
    """`check_bounds` of each (seed, size, sizes)."""
    arguments = [arrays(seed, *size, dtype, sizes) for seed, size, sizes in cases]
    dot_general = layers.switchback_dot_general(variant, format, scaling=scaling)
    found = many_products(dot_general, arguments)
    how = variant, *FORMATS[format, scaling], dtype
    return [shares_of(*how, *pair) for pair in zip(arguments, found, strict=True)]


def shares_of(variant, formats, largest, dtype, arguments, found):
    x, w, g = exact(*arguments)
    want = oracle.layer(x, w, g, variant, formats, largest)
    shares = []
    for name, mine in zip(("y", "dx", "dw"), found, strict=True):
        true = {"y": x @ w, "dx": g @ w.T, "dw": x.T @ g}[name]
        off = np.abs(exact(mine)[0] - true)
        bound = bounds(want, x, w, g, variant, formats, dtype)[name]
        assert (off <= bound).all(), (name, (off / bound).max())
        shares.append((off / bound).max())
    return shares


QUICK = [(v, f, "format") for v in VARIANTS for f in ("int8", "fp8-e5m2")]
QUICK += [("switchback", *how) for how in FORMATS if ("switchback", *how) not in QUICK]

# each variant with one of two formats, and one variant with all
OFTEN = [
    (v, "fp8-e5m2" if v in ("llm_int8", "switchback_q") else "int8", "format") for v in VARIANTS
]


@pytest.mark.parametrize("variant,format,scaling", rows(QUICK, OFTEN + QUICK[-1:]))
def test_products_are_within_their_bounds(variant, format, scaling):
    worst = np.zeros(3)
    for seed, size in enumerate(SIZES[2:4]):
        shares = check_bounds(variant, format, scaling, "float32", seed, size)
        worst = np.maximum(worst, shares)
    assert worst[:2].min() > 0.1  # and the bounds are not idle
    if variant not in ("switchback", "switchback_q"):
        assert worst[2] > 0.1
    check_bounds(variant, format, scaling, "bfloat16", 1, SIZES[1])


def test_magnitudes():
    """Rows, weights and gradients of every size whose products f32 holds; bf16 and f16 likewise."""
    rng = np.random.default_rng(0)
    variant = "llm_int8"
    for format, scaling in (("int8", "format"), ("fp8-e5m2", "unit")):
        for dtype in DTYPES[:2]:
            for _ in range(8):
                sizes = 10.0 ** rng.uniform((-25, -5, -25), (30, 1, 1))
                check_bounds(variant, format, scaling, dtype, 3, (3, 31, 33), sizes)
        check_bounds(variant, format, scaling, "float16", 3, (3, 31, 33), (1e2, 1e-2, 1e-2))


@pytest.mark.full
@pytest.mark.parametrize("format,scaling", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_full(variant, format, scaling, dtype):
    rng, cases = np.random.default_rng(1), []
    for seed in range(4):
        size = tuple(int(n) for n in rng.choice([1, 2, 3, 31, 32, 33, 64, 130, 257], 3))
        cases.append((seed, size, 10.0 ** rng.uniform(-3, 1, 3)))
    check_many_bounds(variant, format, scaling, dtype, cases)


# ---- zeros, numbers that are none, and the ends of the range -------------------------------------
@pytest.mark.parametrize(
    "variant,format", [(v, "int8") for v in VARIANTS] + [("llm_int8", "fp8-e5m2")]
)
def test_zeros_are_exact(variant, format):
    dot_general = layers.switchback_dot_general(variant, format)
    x, w, g = arrays(2, 5, 9, 7)
    y, dx, dw = products(dot_general, x.at[1].set(0), w.at[:, 2].set(0), g.at[3].set(0))
    assert not y[1].any() and not y[:, 2].any() and not dx[3].any()
    assert jnp.isfinite(jnp.concatenate([y.ravel(), dx.ravel(), dw.ravel()])).all()
    for zeros in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
        found = products(dot_general, *(a * (1 - z) for a, z in zip((x, w, g), zeros, strict=True)))
        for product, which in zip(found, ((0, 1), (2, 1), (0, 2)), strict=True):
            assert jnp.isfinite(product).all()
            assert product.any() != any(zeros[i] for i in which)


@pytest.mark.parametrize(
    "format,bad",
    rows(
        [("int8", np.nan), ("int8", -np.inf), ("fp8", np.inf), ("fp8-e5m2", np.inf)],
        [("int8", -np.inf), ("fp8", np.inf)],
    ),
)
def test_a_bad_row_shows_in_its_own_outputs(format, bad):
    x, w, g = arrays(2, 5, 9, 7)
    for variant in VARIANTS:
        dot_general = layers.switchback_dot_general(variant, format)
        clean = products(dot_general, x, w, g)
        for dtype in ("float32",) if format != "int8" else ("float32", "bfloat16"):
            rounded = [a.astype(dtype) for a in (x.at[1, 4].set(bad), w, g.at[2, 3].set(bad))]
            y, dx, dw = products(dot_general, *rounded)
            everywhere = variant == "tensorwise"
            for product, row in ((y, 1), (dx, 2)):
                assert not jnp.isfinite(product[row]).any()
                others = np.delete(np.asarray(product, np.float32), row, 0)
                assert np.isfinite(others).all() != everywhere
                assert np.isfinite(others).any() != everywhere
            if dtype == "float32" and not everywhere:
                np.testing.assert_array_equal(np.delete(y, 1, 0), np.delete(clean[0], 1, 0))
            assert not jnp.isfinite(dw).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_weight_shows(bad):
    x, w, g = arrays(2, 5, 9, 7)
    for variant in VARIANTS:
        y, dx, _ = products(layers.switchback_dot_general(variant), x, w.at[3, 2].set(bad), g)
        by_column = variant in ("switchback_q", "llm_int8")
        assert not jnp.isfinite(y[:, 2]).any() and not jnp.isfinite(dx[:, 3]).any()
        assert jnp.isfinite(jnp.delete(y, 2, 1)).all() == by_column
        assert jnp.isfinite(jnp.delete(dx, 3, 1)).all() == by_column


@pytest.mark.parametrize("format,scaling", rows(FORMATS, list(FORMATS)[::4]))
def test_the_ends_of_f32(format, scaling):
    formats, largest = FORMATS[format, scaling]
    _, w, _ = arrays(4, 1, 33, 7, sizes=(1, 1e-3, 1))
    rows = np.random.default_rng(5).uniform(-1, 1, (5, 33))
    rows[:, 0] = 1
    for dtype, tops in (
        ("float32", [1e-38, 1e-30, 1e30, 1e38, 3.4e38]),
        ("bfloat16", [1e-38, 1e-30, 1e30, 1e38, float(jnp.finfo(jnp.bfloat16).max)]),
        ("float16", [6e-8, 1e-4, 1.0, 1e4, 65504.0]),
    ):
        x = jnp.asarray(rows * np.float64(tops)[:, None], dtype)
        dot_general = layers.switchback_dot_general("switchback_q", format, scaling=scaling)
        y = products(dot_general, x, w.astype(dtype), jnp.zeros((5, 7), dtype))[0]
        value, weights = exact(x, w.astype(dtype))
        of_layer = value, weights, np.zeros((5, 7)), "switchback_q", formats, largest
        a, b = oracle.layer(*of_layer).operands["y"]
        smallest = np.maximum(a.scale, tol.LEAST_MAXIMUM / (largest[0] or 448))
        errors = tol.of_quantizing(value, smallest, formats[0])
        of_w = tol.of_quantizing(weights, b.scale, formats[0])
        bound = tol.of_product(value, weights, errors, of_w, dtype)
        assert (np.abs(exact(y)[0] - value @ weights) <= bound).all()
        assert np.asarray(y)[2:].any(1).all()  # not lost
