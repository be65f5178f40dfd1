"""Docstrings and README: their examples run, and public names say what they take."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import optax_lowmem
from benchmarks import records, tables

README = Path(__file__).parents[2] / "README.md"
MODULES = [
    optax_lowmem.__name__,
    *(m.name for m in pkgutil.walk_packages(optax_lowmem.__path__, "optax_lowmem.")),
]


def test_modules_were_found():
    assert {"optax_lowmem.memory", "optax_lowmem._src.wrappers.chain"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    module = importlib.import_module(name)
    globals_ = {**vars(module)}
    assert doctest.testmod(module, globs=globals_, verbose=False).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    examples = [
        e for n in MODULES for t in finder.find(importlib.import_module(n)) for e in t.examples
    ]
    assert len(examples) >= 20


def public():
    """(name, object) of every function and class of the package, and functions of two modules."""
    for name in optax_lowmem.__all__:
        thing = getattr(optax_lowmem, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield name, thing
        elif name in ("codecs", "sharding"):
            yield from (
                (f"{name}.{inner}", value)
                for inner in thing.__all__
                if inspect.isfunction(value := getattr(thing, inner))
                and value.__module__ == f"optax_lowmem._src.{name}"
            )


PUBLIC = dict(public())
every_public = pytest.mark.parametrize("name", PUBLIC)
# helpers whose example stands in what they help
WITHOUT_EXAMPLE = {"memory.state_fields", "codecs.encode_array", "codecs.decode_array"}


@every_public
def test_public_names_have_an_example(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text.strip(), "no docstring"
    if name not in WITHOUT_EXAMPLE:
        assert "Example:" in text and ">>>" in text


@every_public
def test_arguments_are_described(name):
    """Each parameter has its line under Args (Attributes, for a dataclass)."""
    thing = PUBLIC[name]
    parameters = [p for p in inspect.signature(thing).parameters if p != "self"]
    text = inspect.getdoc(thing)
    if not parameters or name in WITHOUT_EXAMPLE:
        return
    heading = "Attributes:" if inspect.isclass(thing) else "Args:"
    assert heading in text
    section = text.split(heading, 1)[1]
    missing = [p for p in parameters if not re.search(rf"^\s+\*{{0,2}}{p}:", section, re.MULTILINE)]
    assert not missing


def test_code_of_the_readme(tmp_path, monkeypatch):
    """Its python blocks, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    namespace: dict = {}
    for index, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {index}", "exec"), namespace)  # noqa: S102


def test_every_page_with_a_table_is_rendered():
    pages = [README, *(README.parent / "docs").rglob("*.md")]
    marked = [p for p in pages if "<!-- table:" in p.read_text("utf-8")]
    assert {str(p.relative_to(README.parent)) for p in marked} == set(tables.PAGES)


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_those_of_the_records(name):
    text = (README.parent / name).read_text("utf-8")
    assert tables.MARKED.search(text)
    assert tables.rendered(text, records.all_records()) == text, "run python -m benchmarks.tables"
