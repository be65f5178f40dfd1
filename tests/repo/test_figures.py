"""The pictures of docs/: each is drawn by one command or named here, and none lies about unused."""

import re

import jax
import pytest

pytest.importorskip("matplotlib", reason="the extra `examples` is not installed")

from benchmarks import figures
from tests.repo.pages import PAGES

ELSEWHERE = {"demo"}  # examples/train_gpt.py draws it
PICTURE = re.compile(r"figures/(\w+)\.png")
WIDE = 11  # characters per inch of a headline; benchmarks/style.py breaks it there


def shown():
    """Names of the pictures that pages show."""
    return {name for page in PAGES for name in PICTURE.findall(page.read_text("utf-8"))}


def test_pictures_are_those_of_the_pages():
    stored = {path.stem for path in figures.FOLDER.glob("*.png")}
    assert stored == shown() == {*figures.FIGURES} | ELSEWHERE


@pytest.mark.parametrize("name", figures.FIGURES)
def test_has_a_message(name):
    """A sentence over the picture, with what the functions that draw it assert of the records."""
    with jax.numpy_rank_promotion("allow"):  # a layer's shapes are traced, and it broadcasts
        figure = figures.FIGURES[name]()
    message = figure.get_suptitle()
    assert len(message.split()) >= 5, message
    assert max(map(len, message.split("\n"))) <= WIDE * figure.get_figwidth()
    assert figure.get_figwidth() <= 8.5  # 9 points are readable at 600 pixels
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    assert all(text.get_fontsize() >= 7 for text in texts)


def test_the_command_writes(tmp_path, monkeypatch, capsys):
    name = "llama_8b_memory"
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["figures", name])
    figures.main()
    assert capsys.readouterr().out == f"{tmp_path / name}.png\n"
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
