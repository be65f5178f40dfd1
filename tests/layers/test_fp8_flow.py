"""The FP8 precision flow against the float64 oracle: what is kept, results, gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tolerances as tol
from tests.oracle import fp8_flow as oracle
from tests.oracle import switchback
from tests.tiers import in_turn, rows

pytest.importorskip("flax")

from optax_lowmem.layers import fp8_flow  # noqa: E402
from optax_lowmem.layers.fp8_flow import Recipe  # noqa: E402
from tests.layers.test_switchback import bounds, exact  # noqa: E402
from tests.lowering import kernels_in, lower_for_cuda  # noqa: E402

jitted = jax.jit
EPS = 1e-6
KINDS = ("normal", "sparse", "spike", "sizes")


def drawn(seed, shape, dtype="float32", kind="normal"):
    """Activations: tokens of zeros, a channel that is a million, tokens of every size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))
    if kind == "sparse":
        x[rng.random(shape) < 0.5] = 0
        x[0] = 0
    if kind == "spike":
        x[..., shape[-1] // 3] = 1e6 * rng.choice([-1, 1], shape[:-1])
    if kind == "sizes":
        x *= 10.0 ** rng.uniform(-12, 8, (*shape[:-1], 1))
    return jnp.asarray(x, dtype)


# ---- what is kept --------------------------------------------------------------------------------
store = functools.partial(jitted, static_argnums=1)(fp8_flow.store)
restore = functools.partial(jitted, static_argnums=1)(fp8_flow.restore)


@pytest.mark.parametrize("size,width", [(4, 30), (8, 64), (16, 1), (16, 100), (32, 33), (64, 48)])
def test_storage_is_that_of_the_oracle(size, width):
    ties = 0
    for seed, kind in enumerate(KINDS):
        for dtype in ("float32", "bfloat16"):
            x = drawn(seed, (6, 5, width), dtype, kind)
            found, value = store(x, size), exact(x)[0]
            want = oracle.store(value, size)
            assert found.codes.dtype == jnp.float8_e4m3fn and found.codes.shape == x.shape
            assert found.scales.dtype == jnp.uint16
            assert found.scales.shape == (6, 5, -(-width // size))
            limits = np.asarray(found.scales).astype(np.uint32) << 15
            first = want.limits[..., ::size]
            np.testing.assert_array_equal(limits.view(np.float32), first)
            tie = oracle.near_a_tie(value / want.limits * 448, tol.POSITION)
            codes = np.float64(found.codes)
            np.testing.assert_array_equal(codes[~tie], want.codes[~tie])
            error = np.abs(np.float64(restore(found, size)) - value)
            assert (error <= tol.of_quantizing(value, want.scale, "e4m3")).all()
            ties += tie.mean() / 8
    assert ties < 0.01


def test_bytes_that_are_kept():
    """One a number, and two a group: 12.5 % in groups of 16 (Table 10: 50 % to 3.2 %)."""
    for size, share in ((4, 0.5), (8, 0.25), (16, 0.125), (32, 0.0625), (64, 0.03125)):
        found = jax.eval_shape(lambda x, size=size: fp8_flow.store(x, size), jnp.ones((3, 128)))
        assert sum(a.size * a.dtype.itemsize for a in found) == 3 * 128 * (1 + share)


def test_numbers_that_are_none_show_in_their_group_alone():
    x = drawn(0, (4, 64)).at[1, 20].set(jnp.nan).at[2, 63].set(-jnp.inf)
    back = restore(store(x, 16), 16)
    bad = np.zeros((4, 64), bool)
    bad[1, 16:32] = bad[2, 48:] = True
    np.testing.assert_array_equal(np.isnan(back), bad)


def test_the_ends_of_f32():
    """Groups of subnormals are zeros, the largest numbers are not lost."""
    x = jnp.float32([[1e-40] * 4, [1e-36] * 4, [3e38, -1e38, 0, 8e37], [0, 1e38, 2e38, 3.4e38]])
    back = np.float64(restore(store(x, 4), 4))
    assert not back[0].any()
    assert np.isfinite(back).all() and np.abs(back[1]).max() <= 1e-36 * 17 / 16
    assert (np.abs(back[2:]) >= 0.24 * np.abs(x[2:])).all()  # the largest scale is 2^126


# ---- norms ---------------------------------------------------------------------------------------
def coded_as(codes, y, by):
    """The codes are those of `y`, with one scale, but where f32 is on the other side of a tie."""
    want = switchback.quantize(y, None, "e4m3")
    np.testing.assert_allclose(codes.scales.item(), want.scale.item(), rtol=by)
    tie = oracle.near_a_tie(switchback.position(y, None, "e4m3"), 2 * by)
    np.testing.assert_array_equal(np.float64(codes.codes)[~tie], want.codes[~tie])
    assert tie.mean() < 0.01


@functools.cache  # traces once for all kinds of values
def with_gradients(function, **options):
    def step(arguments, g):
        y, pull = jax.vjp(functools.partial(function, **options), *arguments)
        zeros = jax.tree.map(jnp.zeros_like, y.quantized)
        return y, pull(fp8_flow.Coded(g.astype(y.value.dtype), zeros))

    return jitted(step)


def run(function, *arguments, g, **options):
    """A function's `Coded` and its gradients for `g`."""
    return with_gradients(function, **options)(arguments, g)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [Recipe(), Recipe.paper(group_size=8)], ids=["ours", "paper"])
def test_rms_norm(recipe, kind):
    for shape in ((7, 100), (2, 3, 48)):
        x, g = drawn(1, shape, kind=kind), drawn(2, shape)
        scale = jnp.exp(drawn(3, shape[-1:]) / 4)
        y, (dx, dscale) = run(fp8_flow.rms_norm, x, scale, g=g, recipe=recipe)
        values, w, of_y = exact(x, scale, g)
        kept = np.float64(restore(store(x, recipe.group_size), recipe.group_size))
        lost = tol.of_row_sum(shape[-1])
        want = oracle.rms_norm(values if recipe.exact else kept, w, EPS)
        assert (np.abs(exact(y.value)[0] - want) <= lost * np.abs(want)).all()
        coded_as(y.quantized, want, lost + tol.POSITION)
        of_x, of_scale = oracle.rms_norm_gradients(kept, w, EPS, of_y)
        r = np.abs(oracle.rms_norm(kept, 1.0, EPS)) / np.where(kept, np.abs(kept), np.inf)
        r = np.where(r.any(-1, keepdims=True), r.max(-1, keepdims=True), EPS**-0.5)
        sizes = np.abs(w * of_y)
        terms = r * sizes + np.abs(kept) * r**3 * (sizes * np.abs(kept)).mean(-1, keepdims=True)
        assert (np.abs(exact(dx)[0] - of_x) <= 2 * lost * terms).all()
        terms = np.abs(of_y * kept * r).reshape(-1, shape[-1]).sum(0)
        assert (np.abs(exact(dscale)[0] - of_scale) <= (2 * lost + 7 * tol.U) * terms).all()


@pytest.mark.parametrize("kind", ["normal", "sparse", "spike"])
def test_layer_norm(kind):
    for recipe, width in ((Recipe(), 100), (Recipe.paper(), 48)):
        x, g = drawn(1, (7, width), kind=kind), drawn(2, (7, width))
        scale, bias = jnp.exp(drawn(3, (width,)) / 4), drawn(4, (width,))
        y, (dx, dscale, dbias) = run(fp8_flow.layer_norm, x, scale, bias, g=g, recipe=recipe)
        values, w, b, of_y = exact(x, scale, bias, g)
        kept = np.float64(restore(store(x, 16), 16))
        lost = 4 * tol.of_row_sum(width)  # two sums, and a difference
        source = values if recipe.exact else kept
        want = oracle.layer_norm(source, w, b, EPS)
        std = np.sqrt(source.var(-1, keepdims=True) + EPS)
        near = np.abs(source).max(-1, keepdims=True) / std * w + np.abs(b)
        assert (np.abs(exact(y.value)[0] - want) <= lost * near).all()
        scale = y.quantized.scales.item()
        np.testing.assert_allclose(scale, np.abs(want).max() / 448, rtol=lost * near.max() / scale)
        coded = np.float64(y.quantized.codes) * scale
        bound = tol.of_quantizing(want, scale, "e4m3") + 1.1 * lost * near
        assert (np.abs(coded - want) <= bound).all()
        grads = oracle.layer_norm_gradients(kept, w, EPS, of_y)
        std = np.sqrt(kept.var(-1, keepdims=True) + EPS)
        size = np.abs(kept).max(-1, keepdims=True) / std
        most = np.abs(w * of_y).max(-1, keepdims=True)
        bound = lost * most * (2 + size + 2 * size**2) / std
        assert (np.abs(exact(dx)[0] - grads[0]) <= bound).all()
        assert (np.abs(exact(dscale)[0] - grads[1]) <= lost * (np.abs(of_y) * size).sum(0)).all()
        np.testing.assert_allclose(dbias, grads[2], atol=8 * tol.U * np.abs(of_y).sum(0).max())


def test_a_norm_without_bias():
    x, scale, g = drawn(1, (5, 40)), jnp.ones(40), drawn(2, (5, 40))
    y, grads = run(fp8_flow.layer_norm, x, scale, g=g)
    same, (*others, _) = run(fp8_flow.layer_norm, x, scale, jnp.zeros(40), g=g)
    for a, b in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((same, others)), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- gated products ------------------------------------------------------------------------------
ACTIVATIONS = ["silu", "gelu", "gelu_exact", "relu"]


@pytest.mark.parametrize("name, kept", in_turn(ACTIVATIONS, ["ours", "paper"]))
def test_gated_product(name, kept):
    recipe = {"ours": Recipe(), "paper": Recipe.paper(group_size=32)}[kept]
    for kind in ("normal", "sparse", "spike"):
        gate, up, g = drawn(1, (5, 50), kind=kind), drawn(2, (5, 50)), drawn(3, (5, 50))
        how = {"activation": name, "recipe": recipe}
        h, grads = run(fp8_flow.gated_product, gate, up, g=g, **how)
        of_gate, of_up, of_h = exact(gate, up, g)
        size = recipe.group_size
        stored = [np.float64(restore(store(x, size), size)) for x in (gate, up)]
        source = (of_gate, of_up) if recipe.exact else stored
        want = oracle.gated(name, *source)
        bound = tol.ACTIVATION * np.abs(source[0] * source[1])
        assert (np.abs(exact(h.value)[0] - want) <= bound).all()
        scale = np.abs(want).max() / 448
        np.testing.assert_allclose(h.quantized.scales.item(), scale, rtol=tol.ACTIVATION)
        coded = np.float64(h.quantized.codes) * h.quantized.scales.item()
        assert (np.abs(coded - want) <= tol.of_quantizing(want, scale, "e4m3") + bound).all()
        wanted = oracle.gated_gradients(name, *stored, of_h)
        around = [np.abs(stored[1] * of_h), np.abs(stored[0] * of_h)]
        for found, value, size in zip(grads, wanted, around, strict=True):
            assert (np.abs(exact(found)[0] - value) <= 4 * tol.ACTIVATION * size + 1e-30).all()


def test_an_activation_alone():
    x, g = drawn(1, (5, 50)), drawn(3, (5, 50))
    h, (dx,) = run(lambda x: fp8_flow.gated_product(x, activation="gelu"), x, g=g)
    ones, (same, _) = run(
        lambda x, up: fp8_flow.gated_product(x, up, activation="gelu"), x, jnp.ones_like(x), g=g
    )
    np.testing.assert_array_equal(h.value, ones.value)
    np.testing.assert_allclose(dx, same, atol=tol.ACTIVATION)


# ---- products ------------------------------------------------------------------------------------
RECIPES = {
    "e4m3": Recipe(),
    "e5m2": Recipe(input_gradient="e5m2", weight_gradient="e5m2"),
    "mixed": Recipe(input_gradient="e4m3", weight_gradient="e5m2"),
    "bf16 weight gradients": Recipe(weight_gradient="bf16"),
    "bf16 gradients": Recipe(input_gradient="bf16", weight_gradient="bf16"),
}


@functools.partial(jitted, static_argnums=(0, 4))
def three(recipe, x, w, g, keep="codes", absmax=None):
    linear = functools.partial(fp8_flow.linear, keep=keep, recipe=recipe, kernel_absmax=absmax)
    y, pull = jax.vjp(linear, x, w)
    return y, *pull(g)


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(RECIPES, ["float32", "bfloat16"]),
        [("e4m3", "float32"), ("e5m2", "bfloat16"), ("bf16 gradients", "float32")],
    ),
)
def test_linear(name, dtype):
    """Each product within its bound of the exact one, and the bounds are not idle."""
    recipe, worst = RECIPES[name], np.zeros(3)
    for kind, size in (("normal", (31, 130, 33)), ("spike", (5, 64, 9)), ("sparse", (4, 20, 16))):
        tokens, inputs, outputs = size
        x, g = drawn(1, (tokens, inputs), dtype, kind), drawn(3, (tokens, outputs), dtype)
        w = drawn(2, (inputs, outputs), dtype)
        found = three(recipe, x, w, g)
        assert [a.dtype for a in found] == [dtype] * 3
        values = exact(x, w, g)
        off = bounds_of(recipe, dtype, *values)
        a, b, c = values
        for i, (mine, want) in enumerate(zip(found, (a @ b, c @ b.T, a.T @ c), strict=True)):
            error = np.abs(exact(mine)[0] - want)
            assert (error <= off[i]).all(), (i, (error / off[i]).max())
            worst[i] = max(worst[i], (error / off[i]).max())
    assert worst[0] > 0.1 and worst[1:].min() > 1e-3


def bounds_of(recipe, dtype, x, w, g):
    """Of Y, dX and dW."""
    found = []
    forms = (recipe.input_gradient, recipe.weight_gradient)
    for form in forms:
        gradient = "e4m3" if form == "bf16" else form
        formats = ("e4m3", gradient)
        want = switchback.layer(x, w, g, "tensorwise", formats)
        found.append((want, formats))
    first = bounds(found[0][0], x, w, g, "tensorwise", found[0][1], dtype)
    second = bounds(found[1][0], x, w, g, "tensorwise", found[1][1], dtype)
    none = np.zeros
    if forms[0] == "bf16":
        first["dx"] = tol.of_product(g, w.T, none(g.shape), none(w.T.shape), dtype)
    if forms[1] == "bf16":
        scale = np.abs(x).max() / 448
        of_x = tol.of_quantizing(x.T, scale, "e4m3")
        of_x += 1.1 * tol.HALF_SPACING[dtype] * (np.abs(x.T) + of_x)
        second["dw"] = tol.of_product(x.T, g, of_x, none(g.shape), dtype)
    return first["y"], first["dx"], second["dw"]


def test_results_are_of_the_oracles_codes():
    x, w, g = drawn(11, (6, 40)), drawn(12, (40, 8)), drawn(13, (6, 8))
    values = exact(x, w, g)
    ties = [switchback.near_a_tie(v, None, "e4m3", tol.POSITION).any() for v in values]
    assert not any(ties)
    want = switchback.layer(*values, "tensorwise", ("e4m3", "e4m3"))
    for mine, value in zip(three(Recipe(), x, w, g), (want.y, want.dx, want.dw), strict=True):
        np.testing.assert_allclose(mine, value, atol=64 * tol.U * np.abs(value).max())


def test_what_is_kept_of_an_input_and_cached_maxima_change_nothing():
    x, w, g = drawn(1, (6, 40)), drawn(2, (40, 8)), drawn(3, (6, 8))
    want = three(Recipe(), x, w, g)
    absmax = fp8_flow.weight_absmax(w)
    assert absmax.shape == (1, 1) and absmax.item() == jnp.abs(w).max()
    coded = fp8_flow.code(x)
    for found in (three(Recipe(), x, w, g, "input"), three(Recipe(), x, w, g, absmax=absmax)):
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=8 * tol.U)  # scales of a constant
    np.testing.assert_array_equal(jitted(fp8_flow.linear)(coded, w), want[0])
    # the scale is that which is given; and codes stay in the format where it is too small
    other = three(Recipe(), x, w, g, absmax=1.5 * absmax)
    assert not (other[0] == want[0]).all()
    np.testing.assert_allclose(other[0], want[0], atol=0.2 * np.abs(want[0]).max())
    less = three(Recipe(), x, w, g, absmax=0.5 * absmax)
    assert all(jnp.isfinite(a).all() for a in less)


@pytest.mark.parametrize(
    "dtype,keep,recipe",
    [
        ("float32", "codes", Recipe()),
        ("bfloat16", "input", RECIPES["mixed"]),
        ("bfloat16", "codes", RECIPES["bf16 gradients"]),
    ],
)
def test_a_kernel_quantized_before_changes_no_bit(dtype, keep, recipe):
    x, w, g = drawn(1, (6, 40), dtype), drawn(2, (40, 8), dtype, "spike"), drawn(3, (6, 8), dtype)
    want = three(recipe, x, w, g, keep)

    @jitted
    def step(x, w, g, codes):
        linear = functools.partial(fp8_flow.linear, keep=keep, recipe=recipe, kernel_codes=codes)
        y, pull = jax.vjp(linear, x, w)
        return y, *pull(g)

    codes = jitted(fp8_flow.quantize_weight)(w)
    for found, wanted in zip(step(x, w, g, codes), want, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # both products are of the codes; the gradient still goes to the kernel
    y, dx, dw = step(x, w, g, codes._replace(scale=2 * codes.scale))
    np.testing.assert_array_equal(y, 2 * want[0])
    np.testing.assert_array_equal(dx, want[1] * (1 if recipe.input_gradient == "bf16" else 2))
    np.testing.assert_array_equal(dw, want[2])


def test_a_quantized_kernel():
    """Two bytes per parameter, a scale for each of stacked kernels, and no gradient."""
    w = drawn(2, (2, 3, 20, 8))
    found = jitted(fp8_flow.quantize_weight)(w)
    assert [a.shape for a in found] == [(2, 3, 20, 8), (2, 3, 8, 20), (2, 3, 1, 1)]
    assert [a.dtype.itemsize for a in found] == [1, 1, 4]
    one = jitted(fp8_flow.quantize_weight)(w[1, 2])
    for stacked, alone in zip(found, one, strict=True):
        np.testing.assert_array_equal(stacked[1, 2], alone)
    np.testing.assert_array_equal(one.codes.T, one.transposed)
    of_w = np.float64(one.codes) * one.scale.item()
    bound = tol.of_quantizing(exact(w[1, 2])[0], one.scale.item(), "e4m3")
    assert (np.abs(of_w - w[1, 2]) <= bound).all()

    def loss(w, scale):
        codes = fp8_flow.quantize_weight(w)
        codes = codes._replace(scale=scale * codes.scale)
        y = fp8_flow.linear(jnp.ones((2, 20)), jnp.ones((20, 8)), kernel_codes=codes)
        return (y * codes.scale).sum()  # its own use of the scale has a gradient, of `scale` alone

    of_w, of_scale = jax.grad(loss, (0, 1))(w[1, 2], jnp.float32(1))
    assert not of_w.any()
    y = fp8_flow.linear(jnp.ones((2, 20)), jnp.ones((20, 8)), kernel_codes=one)
    np.testing.assert_allclose(of_scale, y.sum() * one.scale.item(), rtol=8 * tol.U)


@pytest.mark.parametrize("shape", [(64, 256), (3, 64, 256)])
def test_quantizing_a_kernel_lowers_for_gpus(on_a_gpu, shape):
    given = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = lower_for_cuda(functools.partial(fp8_flow.quantize_weight), given)
    assert kernels_in(text) == ["quantize_transposed"]


def test_products_of_zeros_are_zeros():
    x, w, g = drawn(1, (6, 40)), drawn(2, (40, 8)), drawn(3, (6, 8))
    y, dx, dw = three(Recipe(), 0 * x, w, g)
    assert not y.any() and not dw.any() and jnp.isfinite(dx).all() and dx.any()
    y, dx, dw = three(Recipe(), x, w, 0 * g)
    assert y.any() and not dx.any() and not dw.any()


# ---- refusals ------------------------------------------------------------------------------------
def test_second_derivatives_are_refused():
    x, w = drawn(1, (4, 20)), drawn(2, (20, 4))

    def loss(x):
        return fp8_flow.linear(fp8_flow.rms_norm(x, jnp.ones(20)), w).sum()

    with pytest.raises(TypeError, match="no derivative"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    with pytest.raises(TypeError, match="no derivative"):
        jax.grad(lambda x: jax.grad(lambda x: fp8_flow.gated_product(x, x).value.sum())(x).sum())(x)


def with_codes(kernel=jnp.ones((3, 4)), **more):  # noqa: B008 (not written to)
    """A product of a kernel [3, 4] with codes of another."""
    codes = fp8_flow.quantize_weight(kernel)
    return fp8_flow.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), kernel_codes=codes, **more)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: Recipe(group_size=0), "at least 1, got 0"),
        (lambda: Recipe(weight_gradient="int8"), "e4m3, e5m2, bf16, got 'int8'"),
        (lambda: fp8_flow.rms_norm(jnp.ones((2, 3)), jnp.ones(2)), r"scale\[2\] for x\[2, 3\]"),
        (lambda: fp8_flow.linear(jnp.ones((2, 3)), jnp.ones((2, 3))), r"kernel\[2, 3\]"),
        (lambda: fp8_flow.linear(jnp.ones((2, 3)), jnp.ones((3, 3)), keep="x"), "codes, input"),
        (
            lambda: fp8_flow.linear(
                fp8_flow.code(jnp.ones((2, 3))), jnp.ones((3, 3)), keep="input"
            ),
            "is for an array",
        ),
        (lambda: fp8_flow.gated_product(jnp.ones(3), activation="tanh"), "silu, gelu"),
        (lambda: with_codes(jnp.ones((2, 3, 4))), r"codes\[2, 3, 4\] for a kernel\[3, 4\]"),
        (lambda: with_codes(jnp.ones((4, 3))), r"codes\[4, 3\] for a kernel\[3, 4\]: pass quant"),
        (lambda: with_codes(kernel_absmax=jnp.ones((1, 1))), "kernel_absmax beside kernel_codes"),
        (
            lambda: with_codes(recipe=Recipe(storage="bf16")),
            "kernel_codes with storage='bf16', which quantizes nothing: leave it out",
        ),
        (lambda: fp8_flow.gated_product(jnp.ones(3), jnp.ones(4)), r"float32\[4\]"),
        (lambda: fp8_flow.gated_product(jnp.ones(3), jnp.ones(3, jnp.bfloat16)), "up bfloat16"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
