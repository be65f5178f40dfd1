"""The short programs of examples/gallery."""

import importlib

import jax
import pytest

from tests.repo.pages import DOCS, ROOT

GALLERY = ROOT / "examples/gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("[!_]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_learns(name, monkeypatch):
    monkeypatch.syspath_prepend(str(GALLERY))
    with jax.numpy_rank_promotion("allow"):
        first, last = importlib.import_module(name).main()
    assert last < first / 2 or last < -0.5  # a loss, or the negative share of rewarded choices


def test_are_short_and_listed():
    page = (DOCS / "tutorials/gallery.md").read_text("utf-8")
    assert len(NAMES) >= 10
    for name in NAMES:
        assert len((GALLERY / f"{name}.py").read_text("utf-8").splitlines()) <= 65, name
        assert f"gallery/{name}.py)" in page, name


def test_bytes_of_pi0(monkeypatch):
    monkeypatch.syspath_prepend(str(GALLERY))
    openpi = importlib.import_module("openpi")
    page = (DOCS / "tutorials/gallery.md").read_text("utf-8")
    for name, frozen in ("everything", ""), ("all but Gemma", openpi.GEMMA):
        row = "| {} | {:.1f} GiB | {:.1f} GiB |".format(name, *openpi.planned(frozen))
        assert row in page
