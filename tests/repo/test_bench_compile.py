"""The benchmark of compile times: its cases, what it measures, and the table of its records."""

import jax
import pytest

from benchmarks import tables
from benchmarks.suites.step import call as bench_call
from benchmarks.suites.step import compilation as bench_compile


def test_cases():
    assert bench_compile.shapes("equal-3") == [(64, 64)] * 3
    mixed = bench_compile.shapes("mixed-41")
    assert (len(mixed), len(set(mixed)), mixed[39]) == (41, 40, (344, 64))
    with pytest.raises(ValueError, match="no case 'odd-3'"):
        bench_compile.shapes("odd-3")


def test_steps_are_of_bf16_weights_and_of_the_leaves_of_the_case():
    _, (gradients, _, weights) = bench_compile.prepared("lowmem.step", "mixed-5")
    assert [leaf.shape for leaf in jax.tree.leaves(weights)] == bench_compile.shapes("mixed-5")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((gradients, weights))} == {"bfloat16"}


def test_a_measurement_and_its_table(capsys):
    found = bench_compile.measure("optax.adamw", "equal-1")
    assert found["cpu_ms_per_leaf"] > 0 and found["temp_bytes"] < 1e4
    row = {"bench": "compile", "case": "equal-1", "impl": "optax.adamw", "device": "cpu-2-cores"}
    rows = [
        {**row, "jax": "1", "commit": "c", "metric": metric, "value": value}
        for metric, value in (("cpu_ms_per_leaf", 2.34), ("temp_bytes", 2**20))
    ]
    assert "| equal-1 | optax.adamw | 1 | 2.3 ms | 1.00 MiB |" in tables.TABLES["cpu_compile"](rows)


@pytest.mark.parametrize("name", bench_call.NAMES)
def test_the_host_time_of_a_call(monkeypatch, name):
    """Weights and state go in and come out, gradients only in."""
    monkeypatch.setattr(bench_call, "CALLS", 6)
    found = bench_call.measure(name, "equal-2")
    state = {"optax.adamw": 4 + 1, "lowmem.step": 2 * 5 + 2}.get(name, 5 + 2)
    assert found["host_ms"][0] > 0 and found["arrays"] == (2 * (2 + state) + 2, "")
