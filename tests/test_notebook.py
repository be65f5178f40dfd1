"""The notebook runs from top to bottom in smoke mode, and its assertions hold."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")

REPO = Path(__file__).parent.parent
BOOK = REPO / "notebooks" / "flashoptim.ipynb"
HEAVY_BYTES = 2048
# What the notebook must assert, by the tag of the cell: names that its assertions have to mention.
ASSERTED = {
    "assert-fig3": ("bits-24", "5.4e-6", "ulp-24", "1e-6", "ulp-32"),
    "assert-fig4": ("companded, paper", "linear, paper", "companded, ours", "linear, ours"),
    "assert-fig5": ("sqrt, paper", "sqrt, ours", "linear, paper"),
    "assert-closed-loop": ("f32 scale, stochastic (default)", "FP16 scale, nearest (paper)"),
}


def read() -> Any:
    return nbformat.read(BOOK, as_version=4)


def tagged(book: Any) -> dict[str, Any]:
    """The cells that have a tag, by their tag."""
    return {tag: cell for cell in book.cells for tag in cell.metadata.get("tags", [])}


def test_stored_without_heavy_outputs():
    book = read()
    nbformat.validate(book)
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert len(outputs) > 10
    assert not [o for o in outputs if o and len(repr(o).encode()) >= HEAVY_BYTES]


@pytest.mark.parametrize("tag", ASSERTED)
def test_has_its_assertions(tag):
    source = tagged(read())[tag].source
    assertions = "\n".join(re.findall(r"^ *(?:assert|for) .*$", source, re.MULTILINE))
    assert "assert " in assertions
    assert not [name for name in ASSERTED[tag] if name not in assertions]


def test_runs_in_smoke_mode(monkeypatch):
    monkeypatch.setenv("OPTAX_LOWMEM_SMOKE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    book = read()
    resources = {"metadata": {"path": str(BOOK.parent)}}
    nbclient.NotebookClient(book, timeout=600, resources=resources).execute()
    assert tagged(book).keys() >= ASSERTED.keys()
    for tag, cell in tagged(book).items():
        assert cell.execution_count, tag
    drawn = [
        o for c in book.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})
    ]
    assert len(drawn) == 4
