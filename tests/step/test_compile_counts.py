"""Counts of what a step for a GPU traces and lowers: what its compile time is made of."""

import functools
import sys
from collections import Counter

import jax
import pytest

import optax_lowmem as lowmem
from benchmarks import model_shapes
from optax_lowmem._src.optim.step import gpu as gpu_step
from optax_lowmem._src.optim.step import reference, xla
from tests.lowering import kernels_in, lower_for_cuda

TX = lowmem.flash_adamw(1e-3)


@pytest.fixture
def counts(on_a_gpu, monkeypatch):
    """Counts of traces: of the rule, of the fallback, and copies of the step in kernels."""
    found: Counter[str] = Counter()

    def count(name, owner, attribute):
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def counted(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)

    count("rule", type(TX.engine.rule), "update")
    count("fallback", reference, "fused_update")
    count("copies", gpu_step, "_store")
    static = ("rule", "plan", "two_passes")
    monkeypatch.setattr(xla, "plain", jax.jit(reference.fused_update, static_argnames=static))
    jax.clear_caches()  # of what other tests have traced
    return found


def arguments(params):
    state = jax.eval_shape(TX.init, params)
    return functools.partial(lowmem.step, TX), params, state, params


@pytest.mark.parametrize(
    "model, launches, kernels, copies",
    [(model_shapes.gpt2_124m, 39, 6, 16), (model_shapes.llama_3_2_1b, 50, 5, 11)],
    ids=["gpt2", "llama"],
)
def test_what_a_step_of_a_model_lowers(counts, model, launches, kernels, copies):
    """Equal launches are one kernel; the rule is traced once a kernel at most, no fallback is."""
    text = lower_for_cuda(*arguments(model()))
    assert len(kernels_in(text)) == kernels
    assert sum("@launch" in line and "call" in line for line in text.splitlines()) == launches
    assert counts["copies"] == copies and counts["fallback"] == 0
    # for leaves with codes and for those without; newer JAX keeps the traces of kernels apart
    assert 2 <= counts["rule"] <= kernels


def test_the_fallback_is_traced_once_a_shape(counts):
    """It is traced as a program for the host's CPU is lowered, and not before."""
    shapes = [(64, 64)] * 5 + [(96, 128)] * 5 + [(64,)] * 3
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, "bfloat16") for i, shape in enumerate(shapes)}
    step, *args = arguments(params)
    traced = jax.jit(step).trace(*args)
    before = counts["rule"]
    assert counts["fallback"] == 0 and 2 <= before <= 3
    traced.lower(lowering_platforms=("cpu",))
    assert counts["fallback"] == 3 and counts["rule"] == before + 3


def test_no_module_is_looked_for_while_a_kernel_is_lowered(counts, monkeypatch):
    """MLIR's bindings else look for one of Triton's dialect at each operation, half of the time."""
    looked_for: Counter[str] = Counter()

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            looked_for[name] += 1

    params = {"w": jax.ShapeDtypeStruct((256, 64), "bfloat16")}
    lower_for_cuda(*arguments(params))  # with what is imported once
    jax.clear_caches()
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    lower_for_cuda(*arguments(params))
    assert not looked_for
