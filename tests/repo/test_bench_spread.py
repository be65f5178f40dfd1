"""Spread of paired runs, and what so many decide: tables, with and without records."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax.nnx")

from benchmarks import curves  # noqa: E402
from benchmarks.claims import NOT, SAME, UNDECIDED  # noqa: E402
from benchmarks.claims.equivalence import pairs_needed  # noqa: E402
from benchmarks.suites.pairs import spread  # noqa: E402
from benchmarks.suites.pairs.budgets import CASE, FOUR_BITS  # noqa: E402
from benchmarks.suites.pairs.differences import early  # noqa: E402
from benchmarks.suites.pairs.presets import VARIANTS  # noqa: E402

# percent over a loss of 1 of each seed: with the baseline's, 0.01, 0.6 and 0.2 come apart
BASE_LOSSES = (-1.0, 0.0, 1.0)
KEPT = {
    "flash_adamw": (-0.99, -0.01, 1.0),
    "adamw-lower": (-1.6, 0.0, 1.6),
    "adamw-factored": (0.8, 2.0, 3.2),
}


def rows_of(found, case=CASE, device="a GPU"):
    flags = {"parameters": 1, "steps": 1}
    about = {"bench": "pairs", "case": case, "metric": "val_loss", "device": device, "jax": "1",
             "commit": "c", "flags": flags}  # fmt: skip
    return [
        about | {"impl": name, "seed": seed, "value": 1 + one / 100}
        for name, each in found.items()
        for seed, one in enumerate(each)
    ]


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_losses():
    """The baseline is on another GPU; the last line pools what comes apart."""
    rows = rows_of({"adamw": BASE_LOSSES}) + rows_of(KEPT, device="another GPU")
    rows += rows_of({"lion": (0.0, 0.0)}, f"{spread.PRESET}/lion")
    rows += rows_of({"lion": (0.1, 0.0)}, f"{spread.PRESET}/lion", "another GPU")
    again, near, lower, factored, pooled, seeds, *_ = cells(spread.TABLES["pair_losses"](rows))
    assert again[0].startswith(VARIANTS["lion"].says) and again[1] == "2"
    assert [row[0] for row in (near, lower, factored)] == [VARIANTS[name].says for name in KEPT]
    assert [row[3] for row in (near, lower, factored)] == [SAME, UNDECIDED, NOT]
    # 0.6, 0.2 and the root of the mean of 0.36 and 0.04
    assert [row[4] for row in (lower, factored, pooled)] == ["0.60 %", "0.20 %", "0.45 %"]
    for row, deviation in ((lower, 0.6), (pooled, 0.2**0.5)):
        wanted = [str(pairs_needed(deviation, FOUR_BITS, power)) for power in spread.POWERS]
        assert row[5].split(" / ") == wanted
    assert seeds[4] == "1.41 %"


def test_two_seeds():
    """The difference of two independent losses has twice the variance."""
    found = spread.of_two_seeds(rows_of({"adamw": BASE_LOSSES}))
    assert found.deviation == pytest.approx(2**0.5) and found.freedom == 2


def test_what_has_no_records_is_left_out():
    rows = rows_of({"adamw": (0.0, 0.0), "adamw-lower": (0.1,)})  # one pair has no spread
    assert "--record" in spread.TABLES["pair_losses"](rows)
    assert len(spread.pairs(rows + rows_of({"adamw-higher": (0.1, 0.2)}))) == 1


def test_early(tmp_path, monkeypatch):
    """The mean of a window's points, each over the mean of the baselines there."""
    step = np.array([100, 200, 300, 900, 1000])

    def run(*train):
        found = {"val_step": np.array([0, 1000]), "val_loss": np.ones(2), "step": step}
        return found | {"train_loss": np.array(train)}

    runs = {
        "adamw seed 0": run(9, 5, 4, 2, 1),
        "adamw seed 1": run(11, 7, 4, 2, 1),
        "flash_adamw seed 0": run(10, 5, 4, 2.02, 5),
        "flash_adamw seed 1": run(11, 7, 4.04, 2.02, 5),
        "flash_adamw-linear seed 0": run(9, 5, 40, 20, 10),
        "flash_adamw-linear seed 1": run(9, 5, 40, 20, 10),
    }
    stored = curves.Curves({}, runs)
    assert early(stored, "adamw", "flash_adamw", (100, 200)) == pytest.approx([5, 0])
    assert early(stored, "adamw", "flash_adamw", (300, 900)) == pytest.approx([0.5, 1])
    stored.save(tmp_path / "curves.npz")
    monkeypatch.setattr(spread, "CURVES", tmp_path / "curves.npz")
    rows = rows_of({name: (0.0, 0.0) for name in ("adamw", "flash_adamw", "flash_adamw-linear")})
    ours, linear, *_ = cells(spread.TABLES["early_losses"](rows))
    assert ours[:2] == ["flash_adamw", "2"] and ours[2].startswith("+2.50 %")
    assert ours[3].startswith("+0.75 %") and ours[4] == "0.35 %"
    assert linear[3:] == ["diverged", ""]


def test_the_guide_says_what_its_table_has():
    text = (Path(__file__).parents[2] / "docs/guides/choosing.md").read_text()
    (pooled,) = re.findall(r"^\| the \d+ that .*, pooled .* (\d+) / (\d+) \|$", text, re.M)
    said = re.search(r"these are (\d+) pairs for a power of 80 % and (\d+) for 90 %", text)
    assert said.groups() == pooled
