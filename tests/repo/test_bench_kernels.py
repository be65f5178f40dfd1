"""The benchmark of single GPU kernels: what it records, and its table."""

import json

import jax
import pytest

from benchmarks.suites import kernels


def test_records(tmp_path):
    file = tmp_path / "records.jsonl"
    flags = f"--tiny --backends interpret --repeats 1 --case codes-rows --record {file}"
    kernels.main(flags.split())
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["metric"]) for row in rows] == [
        ("codes-rows/16x64", "device_ms"), ("codes-rows/16x64", "tbps")
    ]  # fmt: skip
    milliseconds, rate = (row["value"] for row in rows)
    moved = 16 * 64 * (2 + 1) + 4 + 4 * 16  # bf16 to codes and a scale a row; the maximum
    assert rate == pytest.approx(moved / milliseconds / 1e9)


def test_a_case_that_is_none():
    """A misspelled name measures nothing and says so."""
    with pytest.raises(SystemExit, match="fp8-norm/8x8: no such kernel; of .*fp8-norm, .*step/"):
        kernels.main("--tiny --backends interpret --case fp8-norm/8x8".split())


@pytest.mark.parametrize("name", kernels.cases(16, 64))
def test_every_case_is_the_same_for_each_backend(name):
    make, given = kernels.cases(16, 64)[name]()
    found = jax.eval_shape(make("interpret"), *given)
    assert kernels.bytes_of(found) > 0


def test_a_step_is_in_place():
    step = kernels.Stepped("flash_adamw/linear4", 16, 64, "xla")
    before = int(step.state.count)
    step.time()
    assert int(step.state.count) == before + step.calls


def row(case, impl, metric, value):
    return {"bench": "kernels", "case": case, "impl": impl, "metric": metric, "value": value,
            "device": "some GPU", "jax": "0.11.2", "commit": "abc"}  # fmt: skip


def test_table():
    """Of what both backends were measured on."""
    rows = [
        row(case, impl, metric, value)
        for case, times in (("a", (0.5, 0.25)), ("b", (0.5,)), ("c", (0.5, 0.52)))
        for impl, ms in zip(("pallas", "triton"), times, strict=False)
        for metric, value in (("device_ms", ms), ("tbps", 1 / ms))
    ]
    _, body, _ = kernels.table(rows)
    assert body == [
        ["`a`", "0.500", "0.250", "0.500, yes", "4.00"],
        ["`c`", "0.500", "0.520", "1.040, **no**", "2.00"],
    ]
