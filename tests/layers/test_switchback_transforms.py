"""Quantized products under JAX's transformations, what they keep, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tolerances as tol
from tests.oracle import switchback as oracle
from tests.tiers import rows

pytest.importorskip("flax")

import optax_lowmem as lowmem  # noqa: E402
from optax_lowmem import layers  # noqa: E402
from optax_lowmem._src.layers.switchback import products  # noqa: E402

rng = np.random.default_rng(0)
X, W, G = (jnp.float32(rng.normal(size=s)) for s in [(5, 33), (33, 7), (5, 7)])


def dot(dot_general, x, w, **options):
    return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), **options)


def make(variant="switchback", format="int8"):
    return functools.partial(dot, layers.switchback_dot_general(variant, format))


def run(matmul, x, w, g):
    y, vjp = jax.vjp(matmul, x, w)
    return y, *vjp(g.astype(y.dtype))


jit = jax.jit
value_and_gradients = jax.jit(run, static_argnums=0)


def assert_same(found, want, rtol=0.0):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.float64(one), np.float64(other), rtol=rtol, atol=rtol * np.abs(other).max()
        )


# one f32 expression in another order: sums of at most 33 terms
REORDERED = 64 * tol.F32_EPS


# ---- gradients -----------------------------------------------------------------------------------
def straight_through(x, to):
    return x + jax.lax.stop_gradient(to - x)


@pytest.mark.parametrize("variant", ["switchback", "switchback_m", "tensorwise"])
def test_gradients_are_straight_through(variant):
    """Those of X^ W^ with d X^ / d X = 1, where G is its own code.

    The weights of these variants have one scale, so both passes have the same W^.
    """
    g = jnp.clip(jnp.round(G * 40), -126, 126).at[:, 0].set(127)
    tensor = variant == "tensorwise"
    of_x, of_w = (
        jnp.float32(oracle.quantize(a, axis, "int8").value)
        for a, axis in ((X, None if tensor else 1), (W, None))
    )

    def simulated(x, w):
        x_hat, w_hat = straight_through(x, of_x), straight_through(w, of_w)
        kept = x if variant == "switchback" else x_hat
        # dW from what is kept: its value takes no part in Y
        return x_hat @ jax.lax.stop_gradient(w_hat) + jax.lax.stop_gradient(kept) @ (
            w_hat - jax.lax.stop_gradient(w_hat)
        )

    found = value_and_gradients(make(variant), X, W, g)
    want = value_and_gradients(simulated, X, W, g)
    assert_same(found, want, REORDERED)
    others = value_and_gradients(lambda x, w: x @ w, X, W, g)
    assert np.abs(found[1] - others[1]).max() > 100 * REORDERED  # of the standard layer


@pytest.mark.parametrize("variant", list(products.VARIANTS))
def test_second_derivatives_are_refused(variant):
    matmul = make(variant)

    def loss(x, w):
        return (matmul(x, w) ** 2).sum()

    def of_g(c):
        return jax.grad(lambda x: c * matmul(x, W).sum())(X).sum()

    def without_backward(w):  # the cotangent of the product is 0
        return jax.grad(lambda x: (jax.lax.stop_gradient(matmul(x, w)) * x[:, :7]).sum())(X).sum()

    for outer, at in (
        (jax.hessian(loss), (X, W)),
        (jax.hessian(loss, 1), (X, W)),
        (jax.jacfwd(jax.grad(loss, 1)), (X, W)),
        (lambda x: jax.jvp(jax.grad(loss), (x, W), (x, W)), (X,)),
        (jax.grad(lambda x: jax.grad(loss, 1)(x, W).sum()), (X,)),
        (jax.grad(of_g), (1.0,)),
        (jax.grad(without_backward), (W,)),
    ):
        with pytest.raises(TypeError, match="have no derivative.*standard"):
            jax.eval_shape(outer, *at)


def test_standard_is_jaxs_own_product():
    matmul = make("standard")
    assert layers.switchback_dot_general("standard") is jax.lax.dot_general
    np.testing.assert_array_equal(matmul(X, W), X @ W)
    hessian = jax.hessian(lambda s: (matmul(s * X, W) ** 2).sum())(1.0)
    np.testing.assert_allclose(hessian, 2 * ((X @ W) ** 2).sum(), rtol=REORDERED)


# ---- transformations -----------------------------------------------------------------------------
@pytest.mark.parametrize("variant", rows(["switchback_m", "llm_int8"], ["llm_int8"]))
def test_leading_axes(variant):
    matmul = make(variant)
    want = value_and_gradients(matmul, X[:4], W, G[:4])
    for shape in [(2, 2), (1, 4, 1)]:
        y, dx, dw = value_and_gradients(
            matmul, X[:4].reshape(*shape, 33), W, G[:4].reshape(*shape, 7)
        )
        assert y.shape == (*shape, 7) and dx.shape == (*shape, 33)
        assert_same((y.reshape(4, 7), dx.reshape(4, 33), dw), want, REORDERED)
    alone = value_and_gradients(matmul, X[0], W, G[0])
    row = value_and_gradients(matmul, X[:1], W, G[:1])
    assert_same(alone, (row[0][0], row[1][0], row[2]), REORDERED)
    for shape in [(0,), (3, 0)]:
        y, dx, dw = value_and_gradients(matmul, jnp.zeros((*shape, 33)), W, jnp.zeros((*shape, 7)))
        assert y.shape == (*shape, 7) and dx.shape == (*shape, 33)
        np.testing.assert_array_equal(dw, jnp.zeros((33, 7)))


@pytest.mark.parametrize("variant", rows(["switchback_m", "tensorwise"], ["tensorwise"]))
def test_vmap_is_a_loop(variant):
    step = jax.jit(functools.partial(run, make(variant)))
    over = functools.partial(run, make(variant))
    xs, ws, gs = (jnp.stack([a, 3 * a[::-1], a * a]) for a in (X, W, G))
    for axes in [(0, 0, 0), (0, None, 0), (None, 0, None)]:
        arguments = [s if axis == 0 else s[0] for s, axis in zip((xs, ws, gs), axes, strict=True)]
        found = jax.jit(jax.vmap(over, axes))(*arguments)
        loop = [
            step(*(a[i] if axis == 0 else a for a, axis in zip(arguments, axes, strict=True)))
            for i in range(3)
        ]
        assert_same(found, jax.tree.map(lambda *rows: jnp.stack(rows), *loop), REORDERED)


@pytest.mark.parametrize("variant", ["switchback_m"])
def test_jit_checkpoint_and_scan(variant):
    matmul = make(variant)
    ws = jnp.stack([W[:, :7], -W[::-1, :7], W[:, :7] ** 2])[:, :7]
    x = X[:, :7]

    def looped(layer, x, ws):
        for w in ws:
            x = layer(x, w)
        return (x**2).sum()

    def scanned(layer, x, ws):
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).sum()

    def layer(x, w):
        return jnp.tanh(matmul(x, w))

    want = jax.value_and_grad(functools.partial(looped, layer), (0, 1))(x, ws)  # op by op
    for run in (looped, scanned):
        for one in (layer, jax.checkpoint(layer)):
            step = jax.value_and_grad(functools.partial(run, one), (0, 1))
            found = jax.jit(step)(x, ws)
            assert_same(found, want, REORDERED)
    assert np.abs(want[1][1]).min() > 0


@pytest.mark.parametrize("variant", ["switchback", "switchback_m", "llm_int8"])
def test_a_scan_keeps_no_second_copy_of_weights(variant):
    layer, ws = make(variant), jnp.ones((3, 8, 8), jnp.bfloat16)

    def run(x, ws):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    report = lowmem.memory.activation_report(run, jnp.ones((16, 8), jnp.bfloat16), ws, weights=1)
    assert report.weight_bytes == ws.nbytes and report.of_weights_bytes == 0


# ---- dtypes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["switchback", "switchback_m", "llm_int8"])
def test_preferred_element_type(variant):
    """The sums are rounded once, to the preferred type; gradients have the inputs' type."""
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    matmul = functools.partial(make(variant), preferred_element_type=jnp.float32)
    y, dx, dw = value_and_gradients(matmul, x, w, G)
    assert y.dtype == jnp.float32 and dx.dtype == dw.dtype == jnp.bfloat16
    want = value_and_gradients(make(variant), x.astype(jnp.float32), w.astype(jnp.float32), G)
    assert_same(y, want[0], REORDERED)
    assert (np.float32(y.astype(jnp.bfloat16)) != y).any()
    assert_same((dx, dw), want[1:], 3 * tol.HALF_SPACING["bfloat16"])


def test_dtypes_and_arguments():
    matmul = make()
    assert matmul(X.astype(jnp.bfloat16), W).dtype == jnp.float32  # as in JAX's own promotion
    assert matmul(X.astype(jnp.float16), W.astype(jnp.float16)).dtype == jnp.float16
    with pytest.raises(TypeError, match="takes floats, got int32"):
        matmul(jnp.ones((2, 33), jnp.int32), jnp.ones((33, 1), jnp.int32))
    with pytest.raises(TypeError, match="takes no algorithm$"):
        matmul(X, W, algorithm="any", other=None)
    for wrong in (dict(variant="int8"), dict(format="int4"), dict(scaling="max")):
        with pytest.raises(ValueError, match="must be one of"):
            layers.switchback_dot_general(**wrong)
    with pytest.raises(ValueError, match="unit"):
        layers.switchback_dot_general(scaling="unit")
    assert layers.switchback_dot_general("llm_int8", "fp8") == layers.switchback_dot_general(
        "llm_int8", "fp8"
    )
    assert layers.switchback_dot_general() != layers.switchback_dot_general("switchback_q")


def test_precision_is_that_of_the_weight_gradient():
    text = jax.jit(
        jax.grad(lambda w: dot(layers.switchback_dot_general(), X, w, precision="highest").sum())
    ).lower(W)
    assert text.as_text().count("precision = [HIGHEST, HIGHEST]") == 1


# ---- general products ----------------------------------------------------------------------------
@pytest.mark.parametrize("variant", rows(["switchback", "llm_int8"], ["switchback"]))
def test_axes_of_a_general_product(variant):
    x = jnp.float32(rng.normal(size=(3, 4, 2, 5)))  # sums over axes 1 and 3
    w = jnp.float32(rng.normal(size=(5, 6, 4)))
    dot_general = layers.switchback_dot_general(variant)

    def general(x, w):
        return dot_general(x, w, (((1, 3), (2, 0)), ((), ())))

    def flat(x, w):
        rows = x.transpose(0, 2, 1, 3).reshape(6, 20)
        return dot(dot_general, rows, w.transpose(2, 0, 1).reshape(20, 6)).reshape(3, 2, 6)

    g = jnp.float32(rng.normal(size=(3, 2, 6)))
    assert_same(
        value_and_gradients(general, x, w, g), value_and_gradients(flat, x, w, g), REORDERED
    )

    batched = jnp.float32(rng.normal(size=(5, 3, 6)))  # batch 3 is axis 0 of x, 1 of w
    numbers = (((3,), (0,)), ((0,), (1,)))
    y = jit(lambda x, w: dot_general(x, w, numbers))(x, batched)
    assert y.shape == jax.eval_shape(lambda: jax.lax.dot_general(x, batched, numbers)).shape
    each = jnp.stack([jit(make(variant))(x[i], batched[:, i]) for i in range(3)])
    assert_same(y, each, REORDERED)
    none = (((), ()), ((), ()))
    off = jit(lambda x, w: dot_general(x, w, none))(X[0], W[0]) - np.outer(X[0], W[0])
    assert np.abs(off).max() < 0.01 * np.abs(X[0]).max() * np.abs(W[0]).max()
    empty = jit(lambda x: dot_general(x, w, (((1, 2), (2, 0)), ((), ()))))
    assert empty(jnp.zeros((0, 4, 5))).shape == (0, 6)


# ---- memory --------------------------------------------------------------------------------------
def test_switchback_m_keeps_codes():
    """At most 0.55 of the bytes that bf16 keeps of X: int8 and a scale in f32 for each row."""
    x, w = (jnp.ones(s, jnp.bfloat16) for s in [(4, 64, 256), (256, 128)])

    def kept(variant):
        vjp = jax.eval_shape(lambda x, w: jax.vjp(make(variant), x, w)[1], x, w)
        arrays = [a for a in jax.tree.leaves(vjp) if a.shape != w.shape]
        total = sum(a.size * a.dtype.itemsize for a in arrays)
        return sorted((str(a.dtype), a.shape) for a in arrays), total

    shapes, mine = kept("switchback_m")
    assert shapes == [("float32", (4, 64, 1)), ("int8", (4, 64, 256))]
    of_bf16 = kept("standard")
    assert of_bf16 == ([("bfloat16", x.shape)], x.nbytes) == kept("switchback")
    assert mine <= 0.55 * of_bf16[1]
