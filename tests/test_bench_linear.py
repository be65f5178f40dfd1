"""The benchmark of linear layers: what it times, and what it records."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import bench_linear  # noqa: E402


def test_saved_bytes():
    """X in bf16; or in codes with a scale a row, which is what SwitchBackM is for."""
    kept = {
        name: bench_linear.saved_bytes(bench_linear.LAYERS[name], "1024x512x256")
        for name in ("bf16", "switchback-int8", "switchback_m-int8", "switchback_m-fp8")
    }
    assert kept["bf16"] == kept["switchback-int8"] == 2 * 1024 * 512
    assert kept["switchback_m-int8"] == kept["switchback_m-fp8"] == 1024 * (512 + 4)
    assert kept["switchback_m-int8"] <= 0.55 * kept["bf16"]


def test_what_is_timed_is_the_layer():
    x, w, g = bench_linear.operands("16x8x4")
    y, dx, dw = bench_linear.linear(bench_linear.LAYERS["bf16"])(x, w, g)
    for found, wanted in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        np.testing.assert_allclose(jnp.float32(found), jnp.float32(wanted), rtol=0.02, atol=0.05)


@pytest.mark.full
def test_records(tmp_path):
    file = tmp_path / "records.jsonl"
    flags = f"--shapes 64x32x64 --alone --repeats 1 --impl bf16 switchback-int8 --record {file}"
    bench_linear.main(flags.split())
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(row["impl"], row["metric"]) for row in rows}
    assert {("bf16", "device_ms"), ("switchback-int8", "saved_bytes")} <= found
    assert ("int8 quantize w transposed", "operation_ms") in found
    assert all(row["value"] > 0 and row["case"] == "64x32x64" for row in rows)
