"""The benchmark of activations: its layers are one layer, what it counts, what it records."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import activation_errors, activation_layers, bench_activations  # noqa: E402
from benchmarks.activation_layers import Shape  # noqa: E402
from tests.contract_cases import QUICK_COMPILE  # noqa: E402

SMALL = Shape(64, 32, 2)


@pytest.fixture(autouse=True)
def as_models_are_written():
    with jax.numpy_rank_promotion("allow"):
        yield


def test_every_layer_computes_the_same():
    """Within what FP8 rounds; Flax's own has other weights, so it is only run."""
    params = activation_layers.weights(SMALL)
    x = activation_errors.drawn((2, 32, 64), 0)
    run = jax.jit(
        lambda params, x: {
            name: activation_layers.make(name, SMALL, "xla")[0](params, x)
            for name in activation_layers.NAMES
            if name != "flax-fp8"
        },
        compiler_options=QUICK_COMPILE,
    )
    found = {name: np.float32(y - x) for name, y in run(params, x).items()}
    size = np.linalg.norm(found["bf16"])
    for name, y in found.items():
        assert np.linalg.norm(y - found["bf16"]) < 0.1 * size
        assert name == "bf16" or (y != found["bf16"]).any()
    layer, variables = activation_layers.make("flax-fp8", SMALL, "xla")
    assert jnp.isfinite(jax.jit(layer, compiler_options=QUICK_COMPILE)(variables, x)).all()


def test_units():
    """The paper's shape, in its units: 9.5 of codes and 0.46 of scales; bf16 keeps 3 x that."""
    case = "h3072-s256-b4"
    assert Shape.parse(case).hidden == 8192
    bf16, fp8 = (bench_activations.kept(case, name)[1] for name in ("bf16", "fp8-flow"))
    assert fp8["value"] == pytest.approx(9.5 + 11 / 3 / 8, abs=1e-4)
    assert bf16["value"] > 20.66  # what the paper counts, less its norms' f32
    assert sum(fp8["operations"].values()) == bench_activations.kept(case, "fp8-flow")[0]["value"]


def test_groups_are_better_than_blocks_of_tokens():
    """Figure 4a."""
    rows = activation_errors.across_tokens(lambda *row: row)
    value = {(case, name): error for case, name, _, error, _ in rows}
    for size in (16, 64, 256):
        assert value[f"elements-{size}", "group"] < value[f"elements-{size}", "block"]


@pytest.mark.full
def test_records(tmp_path):
    file = tmp_path / "records.jsonl"
    flags = "--shapes h64-s32-b2 --norms 64x128 --repeats 1 --impl bf16 fp8-flow flax-fp8"
    bench_activations.main([*flags.split(), "--record", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(row["case"], row["impl"], row["metric"]) for row in rows}
    for name in ("bf16", "fp8-flow", "flax-fp8"):
        for metric in ("device_ms", "forward_ms", "backward_ms", "temp_bytes"):
            assert ("h64-s32-b2", name, metric) in found
    assert ("norm-64x128", "group-scaling", "device_ms") in found
    error = {row["impl"]: row["value"] for row in rows if row["metric"] == "forward_error"}
    assert error["group 16, exact"] < error["group 16"] < error["group 64"] * 1.2
    assert error["linear alone"] < error["group 16"]
