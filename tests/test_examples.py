"""The main job, `examples/train_gpt.py`, as a user runs it: in a process of its own."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/train_gpt.py", "--out", str(out), *flags]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def check_curves(runs: dict) -> None:
    for run in runs.values():
        one = run["by_seed"][0]
        (first_step, first), *_, (last_step, last) = one["val_curve"]
        assert (first_step, last_step) == (0, 60)
        assert 4.5 < first < 8  # at random: log(256) = 5.5 and what the untrained logits add
        assert 1.5 < last < 3.0  # letter frequencies alone give about 3.3
        assert last == run["val_loss"]
        assert len(one["train_loss"]) == 60
        assert one["step_ms"] > 0


def check_agreement(runs: dict) -> None:
    plain, ours = (runs[impl]["by_seed"][0]["val_curve"] for impl in ("optax-f32", "lowmem"))
    assert plain != ours
    # The start differs by the rounding to bf16 alone.
    assert abs(plain[0][1] - ours[0][1]) < 0.02
    assert abs(plain[-1][1] - ours[-1][1]) < 0.03


def check_memory(runs: dict) -> None:
    plain, ours = (runs[impl]["bytes_per_param"] for impl in ("optax-f32", "lowmem"))
    assert plain["total"] == pytest.approx(16, abs=1e-3)
    # Weights 2, gradients 2, correction 1, mu 1 + 2/32, nu 1 + 4/32; the norms stay f32.
    assert ours["total"] == pytest.approx(7.1875, abs=0.03)
    for sizes in (plain, ours):
        assert sum(sizes.values()) == pytest.approx(2 * sizes["total"])


def check_picture(file: Path) -> None:
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def check_records(file: Path, runs: dict) -> None:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    fields = {"bench", "case", "impl", "metric", "value", "unit", "device", "jax", "commit", "date"}
    assert all(fields <= record.keys() for record in records)
    assert {record["case"] for record in records} == {"smoke/adamw"}
    losses = {r["impl"]: r["value"] for r in records if r["metric"] == "val_loss"}
    assert losses == {impl: run["val_loss"] for impl, run in runs.items()}


def test_trains_both_and_reports(tmp_path):
    """One test for one run: a fixture would train again in every worker."""
    records = tmp_path / "records.jsonl"
    done = run_example(tmp_path, "--preset", "smoke", "--record", str(records))
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "train_gpt.json").read_text())["runs"]
    check_curves(runs)
    check_agreement(runs)
    check_memory(runs)
    check_picture(tmp_path / "train_gpt.png")
    check_records(records, runs)
    for row in ("validation loss", "step, ms", "correction", "nu_scale", "gradients", "total"):
        assert row in done.stdout


def test_any_optimizer_seeds_and_own_text(tmp_path):
    """A wrapped optax optimizer, two seeds, BPE, one run alone, on a folder of the user's."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"number {index} and a few words more\n" * 40)
    (text / "picture.bin").write_bytes(bytes(range(256)) * 20)
    flags = "--preset smoke --optimizer adan --only lowmem --seeds 2 --steps 12 --tokenizer bpe"
    done = run_example(tmp_path, *flags.split(), "--vocab", "300", "--data", str(text))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "train_gpt.json").read_text())
    assert result["data"]["files"] == 40
    assert result["data"]["vocab"] == 320
    assert list(result["runs"]) == ["lowmem"]
    first, second = result["runs"]["lowmem"]["by_seed"]
    assert first["val_loss"] != second["val_loss"]
    assert first["val_loss"] < first["val_curve"][0][1] - 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "no/such/text"), "no such file or folder"),
        (("--data", "examples/_gpt/__init__.py"), "too little text"),
        (("--steps", "0"), "must be at least 1"),
    ],
)
def test_says_what_is_wrong(tmp_path, flags, message):
    done = run_example(tmp_path, "--preset", "smoke", *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
