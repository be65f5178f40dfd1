"""Passes over the tensors of a Llama's layer in FP8, in the program that a GPU runs."""

import jax
import pytest

pytest.importorskip("flax")

from benchmarks import absent_gpu  # noqa: E402
from benchmarks.suites.activations import bytes, layers  # noqa: E402
from optax_lowmem._src.kernels import platform  # noqa: E402
from tests import tolerances as tol  # noqa: E402

CASE = layers.Shape.parse("h2048-s2048-b4")
# what benchmarks/results has of this layer compiled without a GPU: MiB, MiB of attention, launches
FORWARD, BOTH = (1838, 128, 55), (5158, 385, 99)
WHICH = pytest.mark.parametrize("which,most", [("forward", FORWARD), ("both", BOTH)])
NEEDS_MOSAIC = pytest.mark.skipif(
    not platform.has_mosaic_gpu(), reason="the product kernel needs Mosaic GPU"
)


def function_and_arguments(which):
    layer, params, x = bytes.abstract("fp8-flow", CASE, "cudnn")
    return (layer, params, x) if which == "forward" else (layers.backward(layer), params, x, x)


@pytest.mark.gpu
@NEEDS_MOSAIC
@WHICH
def test_no_pass_more(which, most):
    """One that comes back is 8 MiB at least, a read of the smallest weight.

    Compiled for an H100 that is not there, as the records are, on whatever GPU this is.
    """
    moved, launches = bytes.count(bytes.program(absent_gpu.mesh(), *function_and_arguments(which)))
    assert sum(moved.values()) / 2**20 < most[0] + tol.PASS_MIB
    assert launches <= most[2] + tol.LAUNCHES


@pytest.mark.gpu
@pytest.mark.skipif(bool(platform.not_hopper_reason()), reason="the product kernel is Hopper's")
@NEEDS_MOSAIC
@WHICH
def test_no_pass_of_an_activation_more_here(which, most):
    """In the program of this GPU: one that comes back is 32 MiB; only compiled.

    Without attention, for which stands another kernel where there is no cuDNN.
    """
    function, *args = function_and_arguments(which)
    compiled = jax.jit(function).lower(*args).compile(compiler_options=absent_gpu.OPTIONS)
    moved, _ = bytes.count(compiled.as_text())
    here = sum(moved.values()) - moved["attention"]
    assert here / 2**20 < most[0] - most[1] + tol.PASS_HERE_MIB
