"""The step benchmark: what it counts, what its loop does, and the tables made of its records."""

import json
import math
import os
import re
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from benchmarks import absent_gpu, records, render
from benchmarks.model_shapes import resnet_50
from benchmarks.peers import cases, device_loop, in_jax, in_torch, processes, report
from benchmarks.suites.step import bench as bench_step
from benchmarks.suites.step import instructions, launches
from benchmarks.suites.step import tables as step_tables
from benchmarks.suites.step import tune as tune_step
from optax_lowmem._src.core.groups import Tile
from optax_lowmem._src.update import tuning
from tests.contract_cases import assert_alike

OPTIMIZERS = ("adamw", "lion", "sgd")


def carry_of(name, optimizer="adamw", leaf_set="tiny"):
    made = in_jax.make(name, leaf_set, optimizer)
    return made, device_loop.Setup(made, leaf_set)()


def test_storage_of_4_bits():
    """Second moments that elements share stay in f32: `init` would warn of their codes."""
    assert in_jax.four_bits("adamw") == lowmem.Storage.four_bit()
    for name in ("flash_adam_mini", "flash_factored_adamw"):
        assert in_jax.four_bits(name).nu is None
        in_jax.make("lowmem.step-4bit", "tiny", name).init(
            {"w": jnp.ones((128, 256), jnp.bfloat16)}
        )


def test_resnet_50():
    leaves = jax.tree.leaves(resnet_50())
    assert (sum(math.prod(a.shape) for a in leaves), len(leaves)) == (25557032, 161)


# ---- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer", "expected"),
    [
        ("lowmem.step", "adamw", 2 + 2 * (2 + 1 + 1 + 1 + 2 / 32 + 4 / 32)),
        ("lowmem.step", "lion", 2 + 2 * (2 + 1 + 1 + 2 / 32)),
        ("optax-f32", "adamw", 4 + 2 * (4 + 8)),
        ("optax-f32", "sgd", 4 + 2 * (4 + 4)),
        ("optax-bf16", "adamw", 2 + 2 * (2 + 4)),
    ],
)
def test_bytes_that_must_move(name, optimizer, expected):
    """Bytes per parameter, by hand."""
    made = in_jax.make(name, "ten-million", optimizer)
    moved = device_loop.moved_bytes(made, device_loop.Setup(made, "ten-million").shapes)
    assert moved / cases.parameters("ten-million") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optax_bf16_keeps_every_moment_in_bf16(optimizer):
    _, (_, state, _) = carry_of("optax-bf16", optimizer)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert moments and all(leaf.dtype == jnp.bfloat16 for leaf in moments)


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_every_optimizer_of_the_table_is_a_case(optimizer):
    """Ours and its counterpart in optax take the case's hyperparameters, and step."""
    for name in ("lowmem.step", "optax-f32"):
        made = in_jax.make(name, "tiny", optimizer)
        shapes = cases.LEAF_SETS["tiny"]()
        params = jax.tree.map(lambda x, t=made.dtype: jax.ShapeDtypeStruct(x.shape, t), shapes)
        state = jax.eval_shape(made.init, params)
        new = jax.eval_shape(made.step, params, state, params)
        assert jax.tree.structure(new) == jax.tree.structure((params, state))


def test_gradients_and_weights_are_random():
    """Different in every leaf, of the scale asked for, centred, and without a zero."""
    _, (params, _, grads) = carry_of("optax-f32")
    for tree, scale in ((params, cases.WEIGHT_SCALE), (grads, cases.GRADIENT_SCALE)):
        values = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
        assert len({float(leaf[0]) for leaf in values}) == len(values)
        everything = np.concatenate(values)
        assert np.std(everything) == pytest.approx(scale, rel=0.05)
        assert abs(np.mean(everything)) < 0.05 * scale and np.all(everything != 0)


# ---- what the loop does --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("lowmem.step", "adamw"), ("lowmem.update", "lion"), ("lowmem.step-xla", "sgd")]
    + [("optax-bf16", optimizer) for optimizer in OPTIMIZERS],
)
def test_the_loop_takes_every_step(name, optimizer):
    """Three steps in one jit are three calls."""
    made, carry = carry_of(name, optimizer)
    params, state, grads = carry
    step = jax.jit(made.step)
    for _ in range(3):
        params, state = step(grads, state, params)
    looped = device_loop.looped(made.step, 3)(carry)
    if not name.startswith("optax"):
        return assert_alike((params, state), looped[:2], steps=3)
    # XLA contracts its multiplications and additions anew
    for one, other in zip(*map(jax.tree.leaves, ((params, state), looped[:2])), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-6)


def test_nothing_of_the_gradient_leaves_the_loop():
    """XLA would compute (1 - b1) g and (1 - b2) g^2 once, and read both of them in every step."""
    made, carry = carry_of("optax-f32")

    def body(_, carry):
        params, state, grads = carry
        return *made.step(grads, state, params), grads

    plain = jax.jit(lambda carry: jax.lax.fori_loop(0, 3, body, carry), donate_argnums=0)
    leaves = device_loop.live_bytes(carry[2])

    def stored(loop):
        return loop.lower(carry).compile().memory_analysis().temp_size_in_bytes

    assert stored(plain) >= leaves, "the control: without a barrier they are stored"
    assert stored(device_loop.looped(made.step, 3)) < leaves / 4


def test_the_copy_touches_every_word():
    x = device_loop._copies(jnp.zeros(1000, jnp.uint32), 7)
    np.testing.assert_array_equal(x, np.full(1000, 1 ^ 2 ^ 3 ^ 4 ^ 5 ^ 6))
    assert all(rate > 0 for rate in device_loop.copy_tbps(1000, 7, 3))


def test_steps_of_a_call():
    """0.6 s of them at the speed of a copy, within limits."""
    assert device_loop.steps_for(int(15e9), 3.0) == 120
    assert device_loop.steps_for(1, 3.0) == device_loop.MAX_STEPS
    assert device_loop.steps_for(int(1e13), 3.0) == 4


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture
def small_copy(monkeypatch):
    monkeypatch.setattr(bench_step, "COPY_ON_CPU", (2**16, 2))


def test_a_run_on_a_cpu(small_copy, tmp_path, capsys, monkeypatch):
    """The records that docs/results/cpu_speed.md is made of."""
    path = tmp_path / "run.jsonl"
    monkeypatch.setitem(cases.LEAF_SETS, "smoke", cases.LEAF_SETS["tiny"])
    words = "--leaf-set smoke --impl lowmem.update optax-f32 --repeats 3 --steps 2 --record"
    assert bench_step.main([*words.split(), str(path)]) == 0
    rows = records.load(path)
    found = [(r["impl"], r["metric"]) for r in rows]
    expected = [("optax-f32", "device_ms"), ("optax-f32", "compile_s")]
    assert found == expected + [("lowmem.update", metric) for _, metric in expected]
    for row in rows:
        base = next(r for r in rows if (r["impl"], r["metric"]) == ("optax-f32", row["metric"]))
        assert row["value"] > 0 and row["case"] == "smoke/adamw"
        assert row["ratio_to_optax"] == pytest.approx(row["value"] / base["value"])
    assert rows[0]["value"] == rows[0]["spread"][0] <= rows[0]["median"]
    assert 0 < rows[0]["call_ms"] and rows[0]["steps"] == 2
    printed = capsys.readouterr().out
    assert "smoke/adamw  lowmem.update" in printed and "copy" in printed


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The protocol of a GPU, the work of its processes done in this one; what they were told."""
    monkeypatch.setattr(bench_step, "on_cpu", lambda: False)
    monkeypatch.setattr(bench_step, "COPY_ON_GPU", (2**16, 2))
    monkeypatch.setattr(device_loop, "MAX_STEPS", 6)
    monkeypatch.setitem(cases.LEAF_SETS, "smoke", cases.LEAF_SETS["tiny"])
    told = []

    def in_a_process(job):
        told.append(job)
        torch = job["implementation"] in in_torch.IMPLEMENTATIONS
        return in_torch.outcome(job) if torch else processes.measure(job)

    monkeypatch.setattr(processes, "in_a_process", in_a_process)
    # never given back
    monkeypatch.setattr(processes.turns, "take", lambda turn, compiling: os.close(compiling))
    return told


def test_a_run_on_a_gpu(as_on_a_gpu, tmp_path):
    """Its protocol: one implementation after the other, medians, steps that fill a call."""
    path = tmp_path / "run.jsonl"
    words = "--leaf-set smoke --impl optax-bf16 torch-fused optax-f32 --repeats 3 --record"
    assert bench_step.main([*words.split(), str(path)]) == 0
    rows = {(r["impl"], r["metric"]): r for r in records.load(path)}
    metrics = ("device_ms", "compile_s", "temp_bytes", "bound_share")
    expected = [(impl, m) for impl in ("optax-f32", "optax-bf16") for m in metrics]
    assert [key for key in rows if key[0] != "torch-fused"] == [("copy", "copy_tbps"), *expected]
    for impl in ("optax-f32", "optax-bf16"):
        ms, share = rows[impl, "device_ms"], rows[impl, "bound_share"]
        assert ms["steps"] == 6 and ms["value"] == ms["median"]
        bound = ms["moved_bytes"] / rows["copy", "copy_tbps"]["value"] / 1e9
        assert share["value"] == pytest.approx(bound / ms["value"])


def test_compile_times_are_of_one_at_a_time(as_on_a_gpu, tmp_path):
    path = tmp_path / "run.jsonl"
    words = "--leaf-set smoke --impl optax-f32 --repeats 1 --jobs 2 --record"
    assert bench_step.main([*words.split(), str(path)]) == 0
    metrics = {row["metric"] for row in records.load(path)}
    assert "device_ms" in metrics and "compile_s" not in metrics


def test_a_tuner_tries_every_cut(as_on_a_gpu, monkeypatch):
    """Each in a process that traces with it, the kernel's name and the case beside it."""
    cut = tuning.Tuning(Tile(512, 2), 4, 1 << 20)
    found = tune_step.trials([cut, tuning.HEURISTIC], ("smoke", "lion"), "xla", 1, 1)
    assert list(found) == [cut, tuning.HEURISTIC] and all(ms > 0 for ms in found.values())
    assert [tuning.parse(job["tuned"]) for job in as_on_a_gpu] == list(found)
    assert {job["implementation"] for job in as_on_a_gpu} == {"lowmem.step-xla"}
    for kernel in ("pallas", "triton"):
        tried = tune_step.cuts(kernel)
        assert len(set(tried)) == len(tried) and tuning.heuristic(kernel, 32) in tried
    with pytest.raises(SystemExit, match="cannot take leaf"):
        tune_step.trials([cut], ("smoke", "lion"), "pallas", 1, 1)


def test_what_cannot_run_is_skipped_with_its_reason(small_copy, capsys, monkeypatch):
    monkeypatch.setattr(in_jax.importlib.util, "find_spec", lambda name: None)
    assert bench_step.main(["--leaf-set", "tiny", "--impl", "flashoptim-jax"]) == 0
    assert "skipped: flashoptim_jax is not installed" in capsys.readouterr().out


def test_what_fails_does_not_stop_the_others(small_copy, capsys, monkeypatch):
    def broken(name, *case):
        if name == "optax-bf16":
            raise RuntimeError("no such kernel\nand more")
        return working(name, *case)

    working = in_jax.make
    monkeypatch.setattr(in_jax, "make", broken)
    words = "--leaf-set tiny --impl optax-bf16 optax-f32 --repeats 1 --steps 1"
    assert bench_step.main(words.split()) == 1
    printed = capsys.readouterr().out
    assert "failed: RuntimeError: no such kernel\n" in printed
    assert "tiny/adamw  optax-f32 " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [("--leaf-set tiny --record", "not recorded"), ("--impl lowmem.step --record", "add it")],
)
def test_records_that_would_mislead_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_step.arguments(words.split())
    assert message in capsys.readouterr().err


def test_an_unknown_implementation_of_the_step_is_unavailable(monkeypatch):
    monkeypatch.setitem(in_jax.STEPS, "lowmem.step-other", "other")
    with pytest.raises(in_jax.Unavailable, match="'other'"):
        in_jax.make("lowmem.step-other", "tiny", "adamw")


# ---- processes -----------------------------------------------------------------------------------


def ask(name, optimizer="adamw"):
    return processes.job(name, ("tiny", optimizer), repeats=1, steps=2, tbps=1.0)


def test_each_is_measured_in_a_process_of_its_own():
    """JAX's gives numbers; torch's has none without torch or a GPU, and says so."""
    jobs = [ask("lowmem.step"), ask("torch-fused", "lion"), ask("torch-fused")]
    ours, no_lion, torch = processes.outcomes(jobs, at_once=3)
    assert len(ours["times"]) == 1 and ours["steps"] == 2
    assert no_lion == {"skipped": "torch has no such lion"}
    reasons = ("torch is not installed", "torch finds no GPU")
    assert torch.get("skipped", "") in reasons or "times" in torch


def test_a_process_that_dies_fails_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(processes, "IN_JAX", ["-c", "import sys; sys.stdin.read(); sys.exit(3)"])
    found = list(processes.outcomes([ask("lowmem.step")] * 3, at_once=2))
    assert found == [{"failed": "its process ended with status 3"}] * 3


CHILD = """
import json, sys, time
from benchmarks.peers import turns
job = json.load(sys.stdin)
time.sleep(0.3 * job["repeats"])
compiled = time.time()
turns.take(job["turn"], job["compiling"])
begun = time.time()
time.sleep(0.2)
print(json.dumps({"compiled": compiled, "begun": begun, "ended": time.time()}))
"""


def test_one_process_at_a_time_has_the_device_once_all_have_compiled(monkeypatch):
    """The first to be ready waits for the last; then one follows another."""
    monkeypatch.setattr(processes, "IN_JAX", ["-c", CHILD])
    jobs = [{**ask("lowmem.step"), "repeats": repeats} for repeats in range(3)]
    found = list(processes.outcomes(jobs, at_once=3))
    one, two, three = sorted(found, key=lambda outcome: outcome["begun"])
    assert max(outcome["compiled"] for outcome in found) <= one["begun"]
    assert one["ended"] <= two["begun"] and two["ended"] <= three["begun"]


def test_the_peak_of_a_step_where_the_device_counts(monkeypatch):
    """Nothing where it does not; else what it says after, and before."""
    made, carry = carry_of("lowmem.step")
    step, _ = device_loop.compile_step(made, carry)
    carry, found = device_loop.take_step(step, carry)
    assert found == {} and not carry[0]["w"].is_deleted()
    counts = iter([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}])
    device = types.SimpleNamespace(memory_stats=lambda: next(counts))
    monkeypatch.setattr(device_loop.jax, "local_devices", lambda: [device])
    assert device_loop.take_step(step, carry)[1] == {"peak_bytes": 7, "setup_peak_bytes": 5}


def test_device_time_of_a_trace():
    """Kernels, copies and fills count; annotations that span them and the launches do not."""
    events = [
        {"cat": "kernel", "name": "adam", "dur": 900.0},
        {"cat": "gpu_memcpy", "name": "Memcpy", "dur": 80.0},
        {"cat": "gpu_memset", "name": "Memset", "dur": 20.0},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step", "dur": 5000.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 70.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert in_torch.device_ms({"traceEvents": events}) == pytest.approx(1.0)
    with pytest.raises(RuntimeError, match="nothing"):
        in_torch.device_ms({"traceEvents": events[3:]})


# ---- tables --------------------------------------------------------------------------------------


def synthetic(impl, ms, share, case="gpt2-124m/adamw", device="NVIDIA H100"):
    common = {"bench": "step", "case": case, "impl": impl, "device": device}
    common |= {"jax": "0.11.2", "commit": "abc", "date": "2026-01-01"}
    return [
        {**common, "metric": "device_ms", "value": ms, "unit": "ms", "spread": [ms, ms + 0.5]},
        {**common, "metric": "bound_share", "value": share, "unit": "1"},
        {**common, "metric": "temp_bytes", "value": 3 * 2**20, "unit": "bytes"},
        {**common, "impl": "copy", "metric": "copy_tbps", "value": 2.94, "unit": "TB/s"},
    ]


ROWS = [
    *synthetic("optax-f32", 9.0, 0.5),  # measured again below
    *synthetic("torch-fused", 1.33, 0.89),
    *synthetic("optax-f32", 1.5, 0.79),
    *synthetic("lowmem.step", 0.75, 0.7),
    *synthetic("lowmem.step", 5.7, 0.9, case="llama-3.2-1b/adamw"),
    *synthetic("lowmem.step", 4.0, 0.9, case="gpt2-124m/lion"),
    *synthetic("lowmem.step", 99.0, 0.1, device="cpu-2-cores"),
]


def test_the_table_of_steps():
    lines = step_tables.gpu_step(ROWS).splitlines()
    assert lines[0] == "| AdamW, ms (of bound, x optax-f32) | gpt2-124m | llama-3.2-1b |"
    assert lines[2:5] == [
        "| lowmem.step | 0.75 (70%, 0.50 x) | 5.70 (90%) |",
        "| optax-f32 | 1.50 (79%, 1.00 x) |  |",
        "| torch-fused | 1.33 (89%, 0.89 x) |  |",
    ]
    assert lines[6] == "| Lion, ms (of bound, x optax-f32) | gpt2-124m |"
    assert lines[-2] == "NVIDIA H100, jax 0.11.2, commit abc."
    assert lines[-1] == "A copy moves 2.94 TB/s, read and written."
    assert "99" not in "".join(lines), "a CPU has its own table"


def test_the_table_of_details():
    text = step_tables.gpu_step_details(ROWS)
    row = "| gpt2-124m/adamw | lowmem.step | 0.75 | 0.75 to 1.25 |  | 70% | 0.50 x | 3 |  |  |"
    assert row in text.splitlines()


def test_the_table_of_targets():
    """Reached, missed and not measured, from each GPU's own records against its own limits."""
    h100 = "NVIDIA H100 80GB HBM3"
    rows = [
        *synthetic("lowmem.step", 5.6, 0.91, case="llama-3.2-1b/adamw", device=h100),
        *synthetic("lowmem.step-triton", 5.0, 0.95, case="llama-3.2-1b/adamw", device=h100),
        *synthetic("flashoptim", 10.0, 0.5, case="llama-3.2-1b/adamw", device=h100),
        *synthetic("lowmem.step", 5.0, 0.7, case="llama-3.2-1b/adamw", device="NVIDIA H200"),
        *synthetic("lowmem.step", 0.1, 0.99, case="llama-3.2-1b/adamw", device="NVIDIA A100"),
    ]
    lines = step_tables.gpu_targets(rows).splitlines()
    found = {line.split(" | ")[0]: line.split(" | ", 1)[1] for line in lines if " | " in line}
    missing = "not measured | not measured"
    assert found["| Llama-3.2-1B, AdamW, a step"] == (
        "≤ 5.80 ms | 5.60 ms, yes | 5.00 ms, yes | ≤ 4.45 ms | 5.00 ms, **no** | not measured |"
    )
    assert found["| times faster than flashoptim"] == (
        "≥ 1.90 x | 1.79 x, **no** | 2.00 x, yes |  |  |  |"
    )
    assert (
        found["| GPT-2 124M, AdamW, a step"] == f"≤ 0.95 ms | {missing} | ≤ 0.52 ms | {missing} |"
    )
    assert found["| temporaries of the step, MB"] == (
        "≤ 1.00 | 3.15, **no** | 3.15, **no** | ≤ 1.00 | 3.15, **no** | not measured |"
    )
    assert "A100" not in "".join(lines)


def test_targets_without_records():
    asked = [limit for _, _, limits, _ in step_tables.targets() for limit in limits]
    count = sum(limit is not None for limit in asked)
    assert step_tables.gpu_targets([]).count("not measured") == 2 * count


@pytest.mark.parametrize("table", [step_tables.gpu_step, step_tables.gpu_step_details])
def test_a_table_without_records(table):
    assert table([]) == render.NOTHING


def test_what_a_gpu_records(tmp_path):
    """Every metric, as the outcomes come: device_ms with its spread, and the share of the bound."""
    path = tmp_path / "run.jsonl"
    made = report.Report(np.median, [2.0, 4.0, 3.0], report.Storage(str(path), on_cpu=False))
    case = ("gpt2-124m", "adamw")
    made.copy(case)
    outcome = {"moved_bytes": 6e9, "temp_bytes": 7, "compile_s": 4.0, "wall_ms": 9.0}
    made.outcome(case, "optax-f32", {**outcome, "times": [5.0, 4.0, 6.0]})
    made.outcome(case, "torch-fused", {**outcome, "times": [2.5]})
    made.outcome(case, "bitsandbytes", {"skipped": "torch is not installed"})
    rows = {(r["impl"], r["metric"]): r for r in records.load(path)}
    assert len(rows) == len(path.read_text().splitlines()) == 9
    assert rows["copy", "copy_tbps"]["value"] == 3.0
    assert rows["optax-f32", "device_ms"]["spread"] == [4.0, 6.0]
    assert rows["optax-f32", "bound_share"]["value"] == pytest.approx(2.0 / 5.0)
    assert rows["torch-fused", "bound_share"]["bound_ms"] == pytest.approx(2.0)
    assert rows["torch-fused", "device_ms"]["ratio_to_optax"] == pytest.approx(0.5)
    assert rows["torch-fused", "device_ms"]["wall_ms"] == 9.0
    assert not made.failed
    json.dumps(made.rows)


def test_instructions_of_a_step(capsys):
    """No more than recorded, but for two of another Triton; rounding to nearest has fewer."""
    pytest.importorskip("triton", reason="Triton is not installed")
    recorded = {
        row["impl"]: row["value"]
        for row in records.select(records.all_records(), bench="instructions")
    }
    steps = {name: instructions.STEPS[name] for name in ("flash_adamw", "codes to nearest")}
    with mock.patch.object(instructions, "STEPS", steps):
        instructions.main([])
    found = dict(
        re.findall(r"^step +(\S.*?) +per_element +([\d.]+)", capsys.readouterr().out, re.M)
    )
    assert found.keys() == steps.keys()
    assert all(float(found[name]) <= recorded[name] + 2 for name in steps)
    assert float(found["codes to nearest"]) + 10 < float(found["flash_adamw"])


def test_the_table_of_instructions():
    """Savings of one thing less are given up to the last such row."""
    shared = {"bench": "instructions", "case": "step", "device": "a GPU", "jax": "1", "commit": "c"}
    rows = [
        shared | {"impl": name, "metric": "per_element", "value": value, "names": {"FMUL": 8}}
        for name, value in (("all", 9.0), (instructions.LEAST, 7.5), ("another", 20.0))
    ]
    _, body, used = step_tables.instructions(rows)
    assert [line[1:3] for line in body] == [["9.0", ""], ["7.5", "1.5"], ["20.0", ""]]
    assert body[0][3] == "FMUL 8" and used == rows


PROGRAM_OF_A_STEP = """HloModule step

%doubled (a: bf16[64]) -> bf16[64] {
  %a = bf16[64]{0} parameter(0)
  ROOT %b = bf16[64]{0} add(%a, %a)
}

ENTRY %main (x: bf16[64]) -> bf16[64] {
  %x = bf16[64]{0} parameter(0)
  %y = bf16[64]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %sum = bf16[64]{0} fusion(%y), kind=kLoop, calls=%doubled
}
"""


def test_launches_of_a_step(monkeypatch, capsys):
    """Of the program of an abstract step whose weights and state may be reused."""
    given = []

    def program(on, step, *args, donated):
        with absent_gpu.as_on_one():
            jax.make_jaxpr(step)(*args)
        given.append((args, donated))
        return PROGRAM_OF_A_STEP

    monkeypatch.setattr(absent_gpu, "mesh", lambda: None)
    monkeypatch.setattr(absent_gpu, "program", program)
    launches.main(["--leaf-set", "tiny", "--optimizer", "adamw", "sgd"])
    for (gradients, state, params), donated in given:
        assert donated == (1, 2) and jax.tree.structure(gradients) == jax.tree.structure(params)
        assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    out = capsys.readouterr().out
    size = cases.parameters("tiny")
    for name in ("adamw", "sgd"):
        assert re.search(rf"tiny/{name} +lowmem.step +launches +2 ", out)
        moved = re.search(rf"tiny/{name} +lowmem.step +moved_bytes_per_param +([\d.]+) B", out)
        assert float(moved[1]) == pytest.approx(2 * 2 * 64 * 2 / size, rel=1e-3)


def test_the_table_of_launches():
    shared = {"bench": "launches", "case": "llama-3.2-1b/lion", "impl": "lowmem.step", "jax": "1"}
    shared |= {"device": "a GPU", "commit": "c"}
    values = {"launches": 53.0, "moved_bytes_per_param": 10.126}
    rows = [shared | {"metric": name, "value": value} for name, value in values.items()]
    _, body, used = step_tables.launches(rows)
    assert body == [["lion", "53", "10.13"]] and used == rows
