"""The one command of the benchmarks, and every command that documents print."""

import ast
import re
import sys
import types
from pathlib import Path

import pytest

from benchmarks import ROOT, run

COMMAND = re.compile(r"python -m (benchmarks[\w.]*)(?: (\w+))?")
FOLDERS = {"benchmarks": "*.py", "docs": "*.md", "notebooks": "*.ipynb", "tests": "*.py"}
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += [p for folder, ending in FOLDERS.items() for p in (ROOT / folder).rglob(ending)]


def file_of(module):
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def unknown(text):
    """Commands that a text prints and nobody could run."""
    for module, name in COMMAND.findall(text):
        known = file_of(module).exists() and "__main__" in file_of(module).read_text("utf-8")
        if not known or (module == "benchmarks.run" and name not in {*run.SUITES, "SUITE"}):
            yield f"{module} {name}"


def test_documents_print_commands_that_exist():
    found = {path.name: list(unknown(path.read_text("utf-8"))) for path in PAGES
             if path != Path(__file__)}  # fmt: skip
    assert len(found) > 50
    assert not {name: bad for name, bad in found.items() if bad}


@pytest.mark.parametrize("text", ["benchmarks.bench_step --record", "benchmarks.run steps"])
def test_others_are_noticed(text):
    assert list(unknown(f"`python -m {text}`"))


@pytest.mark.parametrize("name", run.SUITES)
def test_suites_have_a_main(name):
    text = file_of(f"benchmarks.suites.{run.SUITES[name]}").read_text("utf-8")
    assert "main" in {node.name for node in ast.parse(text).body if hasattr(node, "name")}


@pytest.mark.parametrize(("returned", "status"), [(3, 3), (None, 0), ({}, 0)])
def test_arguments_and_status(returned, status, monkeypatch):
    def main():
        assert sys.argv == ["python -m benchmarks.run step", "--leaf-set", "tiny"]
        return returned

    monkeypatch.setattr(run.importlib, "import_module", lambda _: types.SimpleNamespace(main=main))
    monkeypatch.setattr(sys, "argv", ["run.py", "step", "--leaf-set", "tiny"])
    assert run.main() == status


def test_without_a_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 2
    assert "switchback" in capsys.readouterr().out
