"""Passes over the tensors of a Llama's layer in FP8, in the program that a GPU runs."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax")

from benchmarks.suites.activations import bench, layers, passes  # noqa: E402
from optax_lowmem._src.core import platform  # noqa: E402
from tests import tolerances as tol  # noqa: E402

CASE = layers.Shape.parse("h2048-s2048-b4")
# what benchmarks/results has of this layer compiled without a GPU: MiB, launches
FORWARD, BOTH = (1838, 55), (5158, 99)


@pytest.mark.gpu
@pytest.mark.skipif(bool(platform.not_hopper_reason()), reason="the product kernel is Hopper's")
@pytest.mark.skipif(not platform.has_mosaic_gpu(), reason="the product kernel needs Mosaic GPU")
@pytest.mark.parametrize("which,most", [("forward", FORWARD), ("both", BOTH)])
def test_no_pass_more(which, most):
    """One that comes back is 8 MiB at least, a read of the smallest weight; only compiled."""
    layer, params = layers.make_abstract("fp8-flow", CASE, "cudnn")
    x = jax.ShapeDtypeStruct((CASE.batch, CASE.length, CASE.width), jnp.bfloat16)
    function, args = layer, (params, x)
    if which == "both":
        function, args = bench.backward(layer), (params, x, x)
    compiled = jax.jit(function).lower(*args).compile(compiler_options=passes.OPTIONS)
    moved, launches = passes.count(compiled.as_text())
    assert sum(moved.values()) / 2**20 < most[0] + tol.PASS_MIB
    assert launches <= most[1] + tol.LAUNCHES
