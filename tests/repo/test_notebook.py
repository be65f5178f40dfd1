"""The notebooks run from top to bottom in smoke mode, and their assertions hold."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")

REPO = Path(__file__).parents[2]
HEAVY_BYTES = 2048
PICTURES = {"flashoptim": 4, "stable_adamw": 4, "q_adam_mini": 4, "coat_states": 5, "switchback": 6,
            "gaussws": 6, "coat_activations": 4}  # fmt: skip
# What a notebook must assert, by the tag of the cell: names that its assertions have to mention.
ASSERTED = {
    "flashoptim": {
        "assert-fig3": ("bits-24", "5.4e-6", "ulp-24", "1e-6", "ulp-32"),
        "assert-fig4": ("companded, paper", "linear, paper", "companded, ours", "linear, ours"),
        "assert-fig5": ("sqrt, paper", "sqrt, ours", "linear, paper"),
        "assert-closed-loop": ("f32 scale, stochastic (default)", "FP16 scale, nearest (paper)"),
    },
    "stable_adamw": {
        "assert-reproduction": ("ADAMW", "STABLE", "was", "rtol"),
        "assert-prediction": ("0.9", "0.05", "steady_each", "control", "gentle"),
        "assert-detector": ("loss_spikes", "rms_spikes", "predicted"),
        "assert-interventions": ("ADAMW", "STABLE", "CLIPPED", "flash_adamw"),
        "assert-sweeps": ("batch", "rate", "width"),
        "assert-cost": ("0.01",),
    },
    "q_adam_mini": {
        "assert-table3": ("paper.SCALES", "7.8"),
        "assert-table4": ("paper.TABLE_4",),
        "assert-losses": ("1.0035", "ADAMW", "REFERENCE", "CASE_1", "EMBEDDINGS"),
        "assert-norms": ("OURS", "NEAREST", "0.01", "REFERENCE", "middle", "10"),
        "assert-sleepers": ("row", "neuron", "floored", "everywhere"),
        "assert-moments": ("OURS", "REFERENCE"),
        "assert-latency": ("1.1", "paper.ROUNDING"),
    },
    "coat_states": {
        "assert-spans": ("MU", "NU", "medians", "sampled"),
        "assert-expansion": ("bits", "usage"),
        "assert-tables": ("paper.expansions", "gains", "theirs", "paper.BOTH", "worse", "rho"),
        "assert-equal-bytes": ("E4M3_X", "FLASH", "stochastic", "nearest", "once", "FINE_X"),
        "assert-optimizers": ("COAT", "coat_adamw", "FlashOptim", "flash_adamw"),
        "assert-floor": ("lost_share", "largest_step", "nmse"),
        "assert-best": ("package", "trials", "mixed", "flash"),
    },
    "coat_activations": {
        "assert-bytes": ("paper.UNITS", "scales", "DeepSeek-V3", "paper.BF16"),
        "assert-report": ("total_bytes", "2 / 16"),
        "assert-groups": ("2 / size", "sizes[1:]", "0.01"),
        "assert-table10": ("recorded", "group 64", "exact", "0.1"),
        "assert-blocks": ("B x B tokens and channels",),
        "assert-extremes": ("beside", "isfinite"),
        "assert-layers": ("timed", "times > 1", "paper.FASTER"),
        "assert-fit": ("fit_tables.COAT", "2 * most", "== 0"),
        "assert-losses": ("paper.LOSSES", "small.bound", "0.8", "steps"),
    },
    "switchback": {
        "assert-growth": ("paper.EQUAL", "error", "relative", "0.25", "0.35"),
        "assert-clip": ("paper.CLIP_TOKENS", "relative", "weight gradient"),
        "assert-gradients": ("1.1", "0.01"),
        "assert-apply": ("query_ln", "scaled_attention", "scales"),
        "assert-features": ("SCALED", "plain", "scaled"),
        "assert-losses": ("INT8", "FP8", "paper.M", "paper.bound"),
        "assert-large": ("tokens", "INT8", "FP8", "ALL_INT8", "visibly"),
        "assert-remedies": ("from_scaled", "CLIPPED", "KQ_NORM", "paper.FAILS"),
    },
    "gaussws": {
        "assert-probabilities": ("section_3.P0", "0.716", "682.7", "7.1", "NORMAL"),
        "assert-annealing": ("0.284", "derived", "section_3.P1", "nullified"),
        "assert-underflow": ("most_bits", "9", "5", "safe"),
        "assert-losses": ("OD", "ALL", "BASE", "DIFFQ", "bound.follows", "chance"),
        "assert-bits": ("bound.towards", "6", "spread"),
        "assert-histograms": ("counts", "of.sum"),
        "assert-table-2": ("(2, 3, 1)", "(3, 6, 4)", "(4, 12, 10)", "formats"),
        "assert-casts": ("bound.safe", "e3m4", "e2m1", "control"),
        "assert-rates": ("of_rates", "fails", "best"),
    },
}
CELLS = [(name, tag) for name, tags in ASSERTED.items() for tag in tags]


def path_of(name: str) -> Path:
    return REPO / "notebooks" / f"{name}.ipynb"


def read(name: str) -> Any:
    return nbformat.read(path_of(name), as_version=4)


def tagged(book: Any) -> dict[str, Any]:
    """The cells that have a tag, by their tag."""
    return {tag: cell for cell in book.cells for tag in cell.metadata.get("tags", [])}


def test_every_notebook_is_tested():
    assert {path.stem for path in (REPO / "notebooks").glob("*.ipynb")} == set(ASSERTED)


@pytest.mark.parametrize("name", ASSERTED)
def test_stored_without_heavy_outputs(name):
    book = read(name)
    nbformat.validate(book)
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert len(outputs) > 10
    assert not [o for o in outputs if o and len(repr(o).encode()) >= HEAVY_BYTES]


@pytest.mark.parametrize(("name", "tag"), CELLS)
def test_has_its_assertions(name, tag):
    source = tagged(read(name))[tag].source
    assertions = "\n".join(re.findall(r"^ *(?:assert|for) .*$", source, re.MULTILINE))
    assert "assert " in assertions
    assert not [wanted for wanted in ASSERTED[name][tag] if wanted not in assertions]


@pytest.mark.parametrize("name", ASSERTED)
def test_runs_in_smoke_mode(name, monkeypatch):
    monkeypatch.setenv("OPTAX_LOWMEM_SMOKE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    book = read(name)
    resources = {"metadata": {"path": str(path_of(name).parent)}}
    nbclient.NotebookClient(book, timeout=600, resources=resources).execute()
    assert tagged(book).keys() >= ASSERTED[name].keys()
    for tag, cell in tagged(book).items():
        assert cell.execution_count, tag
    drawn = [
        o for c in book.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})
    ]
    assert len(drawn) == PICTURES[name]
