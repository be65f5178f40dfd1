"""The pictures of docs/: each is drawn by one command or named here, and none lies about unused."""

import re

import jax
import pytest

pytest.importorskip("matplotlib", reason="the extra `examples` is not installed")

from benchmarks import figures
from benchmarks.style import plt
from tests.repo.pages import PAGES

ELSEWHERE = {"demo"}  # examples/train_gpt.py draws it
PICTURE = re.compile(r"figures/(\w+)\.png")


def shown():
    """Names of the pictures that pages show."""
    return {name for page in PAGES for name in PICTURE.findall(page.read_text("utf-8"))}


def test_pictures_are_those_of_the_pages():
    stored = {path.stem for path in figures.FOLDER.glob("*.png")}
    assert stored == shown() == {*figures.FIGURES} | ELSEWHERE


@pytest.mark.parametrize("name", figures.FIGURES)
def test_is_drawn(name):
    with jax.numpy_rank_promotion("allow"):  # a layer's shapes are traced, and it broadcasts
        drawn = figures.FIGURES[name]()
    assert drawn.get_suptitle()
    plt.close(drawn)


def test_the_command_writes(tmp_path, monkeypatch, capsys):
    name = "llama_8b_memory"
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["figures", name])
    figures.main()
    assert capsys.readouterr().out == f"{tmp_path / name}.png\n"
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
