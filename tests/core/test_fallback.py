"""Tests of a kernel and its fallback, which is traced only where it is lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from optax_lowmem._src.kernels.fallback import with_fallback

X = jnp.arange(6.0).reshape(2, 3) / 8
THREE, FIVE = "3.000000e+00", "5.000000e+00"  # in a program


@pytest.fixture
def traced():
    """Names of the functions that were traced, in order."""
    return []


@pytest.fixture
def either(traced):
    """3 x + y on one platform, 5 x + y elsewhere, of a tree; and the count of rows."""

    def of(factor, name, tree):
        traced.append(name)
        return {"sum": factor * tree["x"] + tree["y"][0], "rows": jnp.int32(len(tree["x"]))}

    kernel, plain = functools.partial(of, 3, "kernel"), functools.partial(of, 5, "plain")

    def on(platform, x, y=X):
        return with_fallback(platform, kernel, plain, {"x": x, "y": (y, None)})

    return on


def test_a_fallback_is_traced_where_it_is_lowered(either, traced):
    program = jax.jit(functools.partial(either, "cuda")).trace(X)
    assert traced == ["kernel"]
    for_cuda = program.lower(lowering_platforms=("cuda",))
    assert traced == ["kernel"] and FIVE not in for_cuda.as_text()
    here = program.lower()
    assert traced == ["kernel", "plain"] and THREE not in here.as_text()
    found = here.compile()(X)
    np.testing.assert_array_equal(found["sum"], 6 * X)
    assert found["rows"] == 2


def test_a_kernel_of_this_platform(either, traced):
    found = jax.jit(functools.partial(either, "cpu"))(X)
    np.testing.assert_array_equal(found["sum"], 4 * X)
    assert traced == ["kernel"]


def test_without_a_trace(either, traced):
    np.testing.assert_array_equal(either("cuda", X)["sum"], 6 * X)
    assert "kernel" not in traced


def test_a_program_for_several_platforms(either, traced):
    made = export.export(jax.jit(functools.partial(either, "cuda")), platforms=("cpu", "cuda"))(X)
    assert traced == ["kernel", "plain"]
    assert all(factor in made.mlir_module() for factor in (THREE, FIVE))
    np.testing.assert_array_equal(made.call(X)["sum"], 6 * X)


@pytest.mark.parametrize("platform, factor", [("cuda", 5), ("cpu", 3)])
def test_transformations(either, platform, factor):
    def rows(x, y):
        return either(platform, x, y)["sum"]

    x, y = jnp.stack([X, 2 * X, 7 * X]), X + 1
    for axes in ((0, None), (1, None), (0, 0)):
        other = y if axes[1] is None else jnp.stack([y] * 3)
        found = jax.jit(jax.vmap(rows, axes))(x.swapaxes(0, axes[0]), other)
        np.testing.assert_array_equal(found, factor * x + y[None])

    def loss(x):
        return jnp.sum(X * rows(x, y) ** 2)

    # the kernel's value, and the fallback's derivative
    want = 2 * X * (factor * X + y) * 5
    for of in (loss, jax.checkpoint(loss), jax.jit(loss)):
        np.testing.assert_array_equal(jax.grad(of)(X), want)
    tangent = jax.jvp(functools.partial(either, platform), (X,), (X,))[1]
    np.testing.assert_array_equal(tangent["sum"], 5 * X)
    assert tangent["rows"].dtype == jax.dtypes.float0

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for check in (True, False):
        parts = jax.shard_map(
            rows, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check
        )
        np.testing.assert_array_equal(jax.jit(parts)(X, y[:1]), factor * X + y[:1])


def test_a_fallback_that_gives_other_arrays():
    def run(x):
        return with_fallback("cuda", jnp.sin, lambda x: x.astype(jnp.bfloat16), x)

    jax.jit(run).trace(X).lower(lowering_platforms=("cuda",))
    with pytest.raises(TypeError, match=r"the fallback returns bfloat16\[2,3\].* float32\[2,3\]"):
        jax.jit(run)(X)
