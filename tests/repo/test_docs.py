"""Docstrings and README: their examples run, and public names say what they take."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem
from benchmarks import records, tables
from tests import levanter_stand_in  # noqa: F401
from tests.repo.pages import README, blocks_of, run_block
from tests.tolerances import COMPOSITION_SHARE

MODULES = [
    optax_lowmem.__name__,
    *(m.name for m in pkgutil.walk_packages(optax_lowmem.__path__, "optax_lowmem.")),
]


def test_modules_were_found():
    assert {"optax_lowmem.memory", "optax_lowmem._src.optim.wrappers.chain"} <= set(MODULES)


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


DIAGNOSTICS = "optax_lowmem._src.training.diagnostics."
OF_DIAGNOSTICS = [name for name in MODULES if name.startswith(DIAGNOSTICS)]


def public():
    """(name, object) of every function and class of the package, and functions of three modules."""
    for name in optax_lowmem.__all__:
        thing = getattr(optax_lowmem, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield name, thing
        elif name in ("codecs", "diagnostics", "sharding"):
            yield from (
                (f"{name}.{inner}", value)
                for inner in thing.__all__
                if inspect.isfunction(value := getattr(thing, inner))
                and value.__module__ in (f"optax_lowmem._src.{name}", *OF_DIAGNOSTICS)
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


COMPOSITION = README.parent / "docs" / "guides" / "composition.md"


def test_chains_of_the_composition_page():
    """Each block after the first has a drop-in, and a chain with its state and its weights."""
    first, *others = blocks_of(COMPOSITION)
    namespace: dict = {}
    run_block(first, namespace)
    params = namespace["params"]
    grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)
    for block in others:
        own, name = {**namespace}, block.name
        run_block(block, own)
        namespace.update({k: v for k, v in own.items() if k not in ("drop_in", "chain")})
        found = []
        for tx in (own["drop_in"], own["chain"]):
            weights, state = optax_lowmem.init(tx, params)
            step = jax.jit(functools.partial(optax_lowmem.step, tx))
            for _ in range(3):
                weights, state = step(grads, state, weights)
            found.append(optax_lowmem.master_params(weights, state))
        for one, other in zip(*map(jax.tree.leaves, found), strict=True):
            moved, gap = np.abs(one - 1).mean(), np.abs(one - other).mean()
            assert moved > 1e-3 and gap < COMPOSITION_SHARE * moved, name
        drop_in, chain = (
            optax_lowmem.memory.report(own[which], params).state_bytes
            for which in ("drop_in", "chain")
        )
        assert abs(chain - drop_in) <= 64, name  # counters, seeds and placeholders


def test_every_optimizer_is_on_the_composition_page():
    heads = re.findall(r"^## (.*)$", COMPOSITION.read_text("utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(heads))) == {*optax_lowmem.OPTIMIZERS, "adam_mini"}


def test_the_names_of_codecs_are_on_their_page():
    def cell(codec):
        arrays = jax.tree.leaves(codec.storage((1, 2048), 32))
        return f"`{codec.name}`, {sum(a.size * a.dtype.itemsize for a in arrays) / 2048:g}"

    rows = [
        f'| `"{name}"` | {cell(first) if first.signed else ""} | {cell(second)} |'
        for name, (first, second) in optax_lowmem.codecs.NAMES.items()
    ]
    page = (README.parent / "docs" / "api" / "codecs.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith('| `"')] == rows


def test_every_table_is_on_a_page():
    pages = [(README.parent / name).read_text("utf-8") for name in tables.PAGES]
    marked = [name for text in pages for name in re.findall(r"<!-- table:(\w*)", text)]
    assert set(marked) == set(tables.TABLES)
    assert len(marked) == sum(len(tables.MARKED.findall(text)) for text in pages)


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_those_of_the_records(name):
    text = (README.parent / name).read_text("utf-8")
    assert tables.MARKED.search(text)
    assert tables.rendered(text, records.all_records()) == text, "run python -m benchmarks.tables"
