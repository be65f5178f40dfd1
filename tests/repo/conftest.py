"""Fixtures of the tests of examples/: modules, a folder of a model, tokenizers and their data."""

import importlib
import json

import jax
import pytest

from tests.repo.chats import CHARACTERS, CHATML, PLAIN, SIZE, bytewise, characters
from tests.repo.pages import ROOT
from tests.repo.tiny_model import make_folder


@pytest.fixture
def example(monkeypatch):
    """Imports a module of examples/."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with jax.numpy_rank_promotion("allow"):
        yield importlib.import_module


@pytest.fixture
def finetune(example):
    return example("finetune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a model, with a tokenizer and a chat."""
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def texts(example):
    return example("_llama.texts")


@pytest.fixture
def make(texts, tmp_path):
    """Writes the folder of a tokenizer and a template, and returns its Texts."""

    def folder(template=PLAIN, tokenizer=None, size=48, stops=None, **config):
        if stops is None and "eos_token" not in config:
            stops = CHARACTERS.index("$")
        tokenizer = tokenizer or characters()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return texts.Texts(tmp_path, size)

    return folder


@pytest.fixture
def chatml(make):
    return make(CHATML, bytewise(), SIZE, eos_token="<|im_end|>")


@pytest.fixture
def read(tmp_path):
    """Reads rows, lines or the bytes of a file."""

    def data(texts, rows, length=1000):
        if not isinstance(rows, bytes):
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            rows = "\n".join(lines).encode()
        (tmp_path / "data.jsonl").write_bytes(rows)
        return texts.read(tmp_path / "data.jsonl", length)

    return data
