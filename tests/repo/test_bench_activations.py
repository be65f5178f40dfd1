"""The benchmark of activations: its layers are one layer, what it counts, what it records."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import absent_gpu  # noqa: E402
from benchmarks.suites.activations import bench as bench_activations  # noqa: E402
from benchmarks.suites.activations import bytes as activation_bytes  # noqa: E402
from benchmarks.suites.activations import errors as activation_errors  # noqa: E402
from benchmarks.suites.activations import layers as activation_layers  # noqa: E402
from benchmarks.suites.activations import passes as activation_passes  # noqa: E402
from benchmarks.suites.activations.layers import Shape  # noqa: E402
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
            if name not in ("flax-fp8", activation_layers.CACHED)
        },
        compiler_options=QUICK_COMPILE,
    )
    found = {name: np.float32(y - x) for name, y in run(params, x).items()}
    size = np.linalg.norm(found["bf16"])
    for name, y in found.items():
        assert np.linalg.norm(y - found["bf16"]) < 0.1 * size
        # the flow without codes has the very bits
        assert (y != found["bf16"]).any() == (name not in ("bf16", "bf16-lean"))
    layer, params = activation_layers.make(activation_layers.CACHED, SMALL, "xla")
    cached = np.float32(jax.jit(layer, compiler_options=QUICK_COMPILE)(params, x) - x)
    assert np.linalg.norm(cached - found["fp8-flow"]) < 0.01 * size
    layer, variables = activation_layers.make("flax-fp8", SMALL, "xla")
    assert jnp.isfinite(jax.jit(layer, compiler_options=QUICK_COMPILE)(variables, x)).all()


@pytest.mark.parametrize("kind,codes", [("cudnn", 10 + 3 / 192), ("xla", 9.5)])
def test_units(kind, codes):
    """The paper's shape, in its units: codes, and 0.46 of scales; cuDNN keeps two arrays more."""
    row = bench_activations.kept(bench_activations.PAPER, "fp8-flow", kind)[1]
    assert row["value"] == pytest.approx(codes + 11 / 3 / 8, abs=1e-4)
    assert sum(row["columns"].values()) == pytest.approx(row["value"])
    assert set(row["columns"]) == set(activation_bytes.COLUMNS)


def test_units_of_bf16():
    """Units of bf16 are the paper's, less f32 norms, plus JAX's extra, for any size of layer."""
    bf16 = bench_activations.kept(bench_activations.PAPER, "bf16")[1]
    assert 20.66 < bf16["value"] < 30
    double = bench_activations.kept("h3072-s4096-b4", "bf16")[1]
    assert double["value"] == pytest.approx(bf16["value"], abs=1e-4)


@pytest.mark.parametrize(
    "operation,column",
    [("before_attention/norm", "RMSNorm"), ("attention/rotary", "RoPE"), ("mlp/linear", "Linear"),
     ("attention", "FlashAttn"), ("mlp/activation", "Act Func"), ("argument [1]", "Residual")],
)  # fmt: skip
def test_columns(operation, column):
    assert activation_bytes.column(operation) == column


def test_byte_records():
    rows = bench_activations.byte_rows("h64-s32-b2", ["bf16", "fp8-flow", "flax-fp8"])
    assert {row["impl"] for row in rows} == {"bf16", "fp8-flow", "fp8-flow, xla attention"}


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
        for metric in ("device_ms", "forward_ms", "backward_ms"):
            assert ("h64-s32-b2", name, metric) in found
    assert ("norm-64x128", "group-scaling", "device_ms") in found
    error = {row["impl"]: row["value"] for row in rows if row["metric"] == "forward_error"}
    assert error["group 16, exact"] < error["group 16"] < error["group 64"] * 1.2
    assert error["linear alone"] < error["group 16"]
    share = {row["impl"]: row["value"] for row in rows if row["metric"] == "scale_share"}
    assert share["group 16"] == 0.125
    assert ("h64-s32-b2", "fp8-flow", "saved_units") in found


PROGRAM = """HloModule step

%doubled (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  ROOT %b = bf16[64,64]{1,0} add(%a, %a)
}

ENTRY %main (x: bf16[64,64], w: f8e4m3fn[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %w = f8e4m3fn[64,64]{1,0} parameter(1)
  %codes = (f8e4m3fn[64,64]{1,0}, f32[1]{0}) custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="norm/fp8_quantize_both"}
  %of_x = f8e4m3fn[64,64]{1,0} get-tuple-element(%codes), index=0
  %y = (bf16[64,64]{1,0}, s8[4096]{0}) custom-call(%of_x, %w), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="linear/dot_general"}
  %first = bf16[64,64]{1,0} get-tuple-element(%y), index=0
  ROOT %sum = bf16[64,64]{1,0} fusion(%first), kind=kLoop, calls=%doubled, metadata={op_name="add"}
}
"""  # noqa: E501 - as XLA writes it


def test_passes_of_a_program():
    """Operands and results of each kernel, without the room that cuBLAS works in."""
    moved, launches = activation_passes.count(PROGRAM)
    code, wide = 64 * 64, 2 * 64 * 64
    assert launches == 3
    assert moved == {
        "products": 2 * code + wide,
        "attention": 0,
        "maxima and codes": wide + code + 4,
        "norms, gates, rotary, sums": 2 * wide,
    }


def test_layers_are_traced_for_a_gpu_that_is_not_there():
    """With an attention that is not XLA's, and the kernels, in every layer."""
    shape = Shape.parse("h256-s128-b2")
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)
    for name in activation_passes.LAYERS:
        layer, params = activation_passes.layer_and_parameters(name, shape)
        with absent_gpu.as_on_one(), activation_passes.with_attention():
            traced = jax.make_jaxpr(bench_activations.backward(layer))(params, x, x)
        assert "attention_backward" in str(traced)
        assert ("fp8_store_normed" in str(traced)) == name.startswith("fp8-flow")
