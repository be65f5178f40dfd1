"""Tests of the activation report: what a function keeps for its gradient, by operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

import optax_lowmem as lowmem

report = lowmem.memory.activation_report
BF16, F32 = jnp.bfloat16, jnp.float32


def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = of(128, 64), of(64, 32)


def kinds(found):
    return sorted((one.what, jnp.dtype(one.dtype).name, one.shape) for one in found.activations)


def test_a_product_and_its_activation():
    found = report(lambda x, w: jnp.exp(x @ w), X, W, weights=1)
    assert kinds(found) == [("argument", "bfloat16", (128, 64)), ("exp", "bfloat16", (128, 32))]
    assert found.total_bytes == 2 * 128 * (64 + 32)
    assert (found.weight_bytes, found.of_weights_bytes) == (2 * 64 * 32, 0)
    without = report(lambda x, w: jnp.exp(x @ w), X, W)
    assert without.total_bytes == found.total_bytes + 2 * 64 * 32 and not without.weight_bytes


def test_nothing_is_allocated():
    """A thousand terabytes."""
    x = of(10**9, 10**6)
    assert report(jnp.sin, x).total_bytes == 2 * 10**15


@pytest.mark.parametrize("wrap", [jax.jit, jax.named_call, lambda f: f])
def test_an_array_counts_once(wrap):
    """However often it is used, and through calls."""

    def three(x, a, b, c):
        h = jnp.exp(x)
        inner = wrap(lambda h, w: (h @ w, h @ w))
        return sum(y for w in (a, b, c) for y in inner(h, w))

    found = report(three, X, W, W, W, weights=(1, 2, 3))
    assert kinds(found) == [("exp", "bfloat16", (128, 64))]
    assert found.weight_bytes == 3 * 2 * 64 * 32


def test_views_count_as_what_they_are_of():
    def function(x, w):
        wide = x.astype(F32).reshape(64, 128).T  # of x
        grown = jnp.broadcast_to(w[:1], (64, 32))  # of the slice
        return wide * wide, jnp.exp(grown.astype(F32)), jnp.full((9,), 2.0) * x.sum()

    found = report(function, X, W)
    assert kinds(found) == [("argument", "bfloat16", (128, 64)), ("exp", "float32", (64, 32))]
    both = report(lambda x: (x.T * x.T, x.reshape(-1) * x.reshape(-1)), X)  # of one array
    assert kinds(both) == [("argument", "bfloat16", (128, 64))]
    inside = report(lambda x: jax.jit(lambda y: y.T * y.T)(x), X)  # of what a call is given
    assert kinds(inside) == [("argument", "bfloat16", (128, 64))]
    # a number that is narrower is another one
    narrow = report(lambda x: jnp.sin(x.astype(BF16)), of(8, dtype=F32))
    assert kinds(narrow) == [("cos", "bfloat16", (8,))]


def test_what_is_made_of_weights_alone():
    def function(w, x):
        return x @ jnp.exp(w).astype(BF16)

    found = report(function, of(64, 32, dtype=F32), X, weights=0)
    assert kinds(found) == [("argument", "bfloat16", (128, 64))]
    assert found.of_weights_bytes == (4 + 2) * 64 * 32  # exp, and its cast
    assert found.weight_bytes == 0


def test_a_scan_stacks_what_its_steps_keep():
    """As declared: also a cast, which inside a loop is stored."""

    def scanned(w, x):
        def step(x, w):
            with jax.named_scope("product"):
                y = x @ w.astype(BF16)
            with jax.named_scope("wide"):
                return jnp.sin(y.astype(F32)).astype(BF16), None

        return jax.lax.scan(step, x, w)[0]

    found = report(scanned, of(5, 64, 64, dtype=F32), X, weights=0, unit=2 * 128 * 64)
    assert found.by_operation["wide"] == 5 * 4 * 128 * 64  # the cosine
    assert found.total_bytes == 5 * (2 + 4) * 128 * 64  # and the step's input
    assert found.of_weights_bytes == 5 * 2 * 64 * 64  # in bf16 beside f32


def test_a_layer_computed_anew_keeps_its_input():
    def layer(x, w):
        return jnp.exp(jnp.sin(x @ w))

    kept = report(layer, X, of(64, 64), weights=1).total_bytes
    anew = report(jax.checkpoint(layer), X, of(64, 64), weights=1)
    assert anew.total_bytes == 2 * 128 * 64 < kept
    assert anew.by_operation == {"argument [0]": 2 * 128 * 64}


def test_branches_and_other_arguments():
    def function(x, tokens, key, flag):
        noise = jax.random.normal(key, x.shape, x.dtype)
        y = jax.lax.cond(flag, jnp.sin, jnp.cos, x + noise)
        return y[tokens] * 2

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = report(function, X, of(7, dtype=jnp.int32), key, of(dtype=jnp.bool))
    # the places and, for each branch, what it needs
    assert {one.what for one in found.activations} >= {"cond"}
    assert found.total_bytes >= 2 * 128 * 64


def test_a_custom_gradients_residuals():
    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(
        lambda x: (halved(x), x.astype(jnp.float8_e4m3fn)),
        lambda codes, g: (g * codes.astype(g.dtype),),
    )
    found = report(lambda x: halved(jnp.sin(x)), X)
    assert [jnp.dtype(one.dtype).name for one in found.activations] == ["bfloat16", "float8_e4m3fn"]
    assert found.total_bytes == 3 * 128 * 64


class Module:
    def __call__(self, x):
        return _function(x)


def _function(x):
    return jnp.sin(x)


def test_operations_are_scopes_modules_or_functions():
    assert report(_function, X).by_operation.keys() == {"_function"}
    assert report(lambda x: Module()(x), X).by_operation.keys() == {"Module"}

    def scoped(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jax.named_scope("inner")(jnp.sin)(x))(x)

    assert report(scoped, X).by_operation.keys() == {"outer/inner"}
    many = report(functools.partial(jax.lax.map, scoped), X)
    assert many.by_operation.keys() == {"outer/inner"}


def test_the_printed_table():
    def function(x, w):
        with jax.named_scope("mlp"):
            return jnp.exp(x @ w)

    text = str(report(function, X, W, weights=1, unit=2 * 128 * 64)).splitlines()
    assert text[0].split() == ["MiB", "U"]
    rows = {line[:44].strip(): line[44:].split() for line in text[1:]}
    assert rows["argument [0]"] == ["0.016", "1.000"]
    assert rows["mlp"] == ["0.008", "0.500"] == rows["exp bfloat16[128, 32]"]
    assert rows["total"] == ["0.023", "1.500"]
    assert rows["beside weights"] == ["0.004", "0.250"]
    assert "U" not in str(report(function, X, W)).splitlines()[0]


def test_the_same_as_jax_prints(capsys):
    """Without views: `jax.ad_checkpoint.print_saved_residuals`."""

    def function(x, w):
        for _ in range(3):
            x = jnp.exp(x @ w)
        return x

    arrays = of(16, 64, dtype=F32), of(64, 64, dtype=F32)
    print_saved_residuals(function, *arrays)
    lines = capsys.readouterr().out.splitlines()
    shapes = [line[len("f32[") : line.index("]")].split(",") for line in lines]
    printed = sum(4 * np.prod([int(n) for n in shape]) for shape in shapes)
    found = report(function, *arrays)
    assert found.total_bytes == printed == 4 * (64 * 64 + 4 * 16 * 64)


def test_bad_positions():
    with pytest.raises(ValueError, match=r"weights=\[2\] must be positions of the 2"):
        report(jnp.matmul, X, W, weights=2)
