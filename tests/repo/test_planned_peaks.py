"""The planner against recorded plans of the compiler, and the peaks of recorded runs."""

import json

import pytest

from benchmarks import records
from benchmarks.suites.plan import CASES, MODELS, planned
from optax_lowmem import plan
from optax_lowmem._src.training.memory import command
from tests import tolerances as tol

ROWS = records.newest(records.all_records(), bench="plan")


@pytest.mark.parametrize("name", CASES)
def test_the_compilers_plan(name):
    rows = [row for row in ROWS if row["case"] == name and row["metric"] != "planned_bytes"]
    assert any(row["metric"] == "compiled_bytes" for row in rows)
    for row in rows:
        size = planned(CASES[name], row["kept"])
        assert size == pytest.approx(row["value"], rel=tol.PLANNED), row["metric"]


def test_most_cases_are_late():
    assert 2 * sum(case.late for case in CASES.values()) >= len(CASES) == 11


def test_recorded_runs_of_8b_with_the_state_in_host_memory():
    """Steps of 8 and 256 rows of 2,048 tokens, in micro-batches, with the memory of 24 GB."""
    rows = records.select(records.newest(records.all_records(), bench="train"), metric="peak_bytes")
    cases = "offload=pinned_host allocator=cuda_async"
    rows = [row for row in rows if cases in row["case"] and row["case"].startswith("llama-8b")]
    sizes = plan.decoder(MODELS["8B"])
    modes = plan.plan_decoder(sizes, "flash_adamw", 0, 2048, accumulate=True).modes
    (mode,) = (mode for mode in modes if mode.name == "offload")
    peaks = {r["flags"]["batch"] // r["flags"]["accumulate"]: r["value"] for r in rows}
    assert peaks.keys() == {1, 2}
    for at_once, peak in peaks.items():
        assert mode.total_bytes(at_once) == pytest.approx(peak, rel=tol.PLANNED)


@pytest.mark.parametrize("model", ["8B", "14B"])
def test_recorded_runs_with_weights_in_host_memory(model):
    """Steps with the memory of cards of 8, 16 and 24 GB, in micro-batches of one and two rows.

    Steps of several passes, whose sums of gradients pass through the GPU, are not planned.
    """
    rows = records.select(records.newest(records.all_records(), bench="train"), metric="peak_bytes")
    begins = f"llama-{model.lower()} "
    rows = [
        row for row in rows
        if row["case"].startswith(begins) and "offload=weights" in row["case"]
        and row["flags"]["batch"] * row["flags"]["sequence"] <= 65_536
    ]  # fmt: skip
    modes = plan.plan_decoder(plan.decoder(MODELS[model]), "flash_adamw", 0, 2048, accumulate=True)
    (mode,) = (mode for mode in modes.modes if mode.name == "stream")
    assert rows
    for row in rows:
        at_once = row["flags"]["batch"] // row["flags"]["accumulate"]
        assert mode.total_bytes(at_once) == pytest.approx(row["value"], rel=tol.PLANNED)


@pytest.mark.parametrize(("mode", "flag"), [("resident", ""), ("release", "release=True ")])
def test_a_recorded_run_of_8b(mode, flag):
    """8B in bf16, one row of 2,048 tokens, each layer recomputed."""
    case = f"llama-8b clip=0.0 {flag}steps=12/flash_adamw"
    rows = records.select(records.all_records(), case=case, metric="peak_bytes")
    sizes = plan.decoder(MODELS["8B"])
    (found,) = (m for m in plan.plan_decoder(sizes, "flash_adamw", 0, 2048).modes if m.name == mode)
    assert rows
    for row in rows:
        assert found.total_bytes(1) == pytest.approx(row["value"], rel=tol.PLANNED)


def test_recorded_speeds(tmp_path, capsys):
    """Those that the command prints."""
    train = "llama-8b clip=0.0 release=True batch=8 steps="
    cases = {
        ("Llama-3.1-8B", "release"): (f"{train}12/flash_adamw", "lowmem"),
        ("Llama-3.1-8B", "offload"): (
            f"{train}50 accumulate=4 offload=pinned_host allocator=cuda_async/flash_adamw", "lowmem"
        ),
        ("SmolLM2-135M", "resident"): ("smollm2, 500 steps of 8 x 1024 tokens", "flash_adamw"),
        ("SmolLM2-135M", "lora"): ("smollm2, 500 steps of 8 x 1024 tokens", "lora"),
    }  # fmt: skip
    rows = records.select(records.all_records(), metric="tokens_per_s", device="NVIDIA H200")
    shown = {
        (model, mode): speed
        for model, speeds in command.MEASURED.values()
        for mode, (speed, _) in speeds.items()
    }
    assert shown.keys() == cases.keys()
    for key, (case, impl) in cases.items():
        assert shown[key] in {round(r["value"]) for r in records.select(rows, case=case, impl=impl)}
    (tmp_path / "config.json").write_text(json.dumps(MODELS["8B"]))
    plan.main(["--params", str(tmp_path), "--gpu", "RTX 4090"])
    printed = capsys.readouterr().out
    assert "computed for RTX 4090: at most 1,798 tokens/s" in printed
    assert "in 4 micro-batches, 22.2 GiB free): 8,815 tokens/s, of the 10,776 computed" in printed
