"""The benchmark of linear layers: what it times, and what it records."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import records  # noqa: E402
from benchmarks.suites.linear import bench as bench_linear  # noqa: E402
from benchmarks.suites.linear import peers as linear_peers  # noqa: E402
from benchmarks.suites.linear import tables as linear_tables  # noqa: E402


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


@pytest.mark.parametrize("name", linear_peers.NAMES)
def test_peers_compute_the_layer(name):
    if why := linear_peers.missing_reason(name):
        pytest.skip(why)
    x, w, g = bench_linear.operands("32x64x16")
    y, dx, dw, *_ = bench_linear.step_of(name)(x, w, g)
    for found, wanted in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        found, wanted = np.float32(found), np.float32(wanted)
        assert found.shape == wanted.shape
        # of gradients in E5M2 an eighth at most is lost, by chance much less
        assert np.linalg.norm(found - wanted) <= 0.1 * np.linalg.norm(wanted)


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


def made_up(shape, **ms):
    """Records of a shape, as a GPU would give them."""
    one = {"bench": "linear", "case": shape, "device": "a GPU", "unit": "ms"}
    layers = [
        {**one, "impl": name.replace("_", "-"), "metric": "device_ms", "value": value}
        for name, value in ms.items()
    ]
    kept = [
        {**row, "metric": "saved_bytes", "value": 50.0 if "int8" in row["impl"] else 100.0}
        for row in layers
    ]
    return layers + kept


def test_tables_of_layers():
    shapes = next(iter(linear_tables.ASKED))
    rows = made_up(shapes[0], bf16=9.0, switchback_int8=6.0)
    rows += made_up(shapes[1], bf16=9.0, switchback_int8=9.0)
    head, body, _ = linear_tables.layers(rows)
    assert head == ["tokens x in x out", "bf16, ms", "switchback-int8 (x bf16)"]
    assert body == [
        [shapes[0], "9", "6 (1.50 x)"],
        [shapes[1], "9", "9 (1.00 x)"],
        ["kept for backward, x bf16", "1", "0.50"],
    ]
    asked = linear_tables.targets(rows)[1]
    assert [row[1:] for row in asked] == [["switchback-int8", "≥ 1.25 x", "1.20 x", "**no**"]]
    assert linear_tables.layers([])[1] == linear_tables.operations(rows)[1] == []
    assert records.on_gpus([*rows, {**rows[0], "device": "cpu-2-cores"}]) == rows


def test_table_of_operations():
    names = ["forward", "input gradient", *(f"quantize {x}" for x in ("x", "g", "w"))]
    own = {f"int8 {name}": 1.0 for name in [*names, "quantize w transposed"]}
    own["bf16 weight gradient"] = 2.0
    rows = [
        {"bench": "linear", "device": "some GPU", "metric": "operation_ms", "case": "8x4x4",
         "impl": name, "value": value}
        for name, value in own.items()
    ]  # fmt: skip
    assert linear_tables.operations(rows)[1] == [["8x4x4", "int8", "1", "1", "2", "4", "50%"]]
