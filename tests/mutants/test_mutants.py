"""The table of mutants: each names one place of the package, and tests that everybody runs."""

import ast
import functools

import pytest

from tests.mutants import run

MUTANTS = run.table()
AT_LEAST = 40


@functools.cache
def sources():
    return run.sources()


@functools.cache
def contents(file):
    """The test functions of a file by name, and what it marks all of them with."""
    body = ast.parse((run.REPO / file).read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    assigned = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    return functions, [line for line in assigned if line.startswith("pytestmark")]


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= AT_LEAST
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.find, mutant.replace) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_is_a_bug_of_one_place(mutant):
    path = run.place(mutant, sources())
    text = run.mutated(mutant, sources())
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(sources()[path]))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_tests_are_in_the_default_tier(mutant):
    assert mutant.killed_by
    for test in mutant.killed_by:
        file, _, rest = test.partition("::")
        functions, marks = contents(file)
        name = rest.partition("[")[0]
        assert name in functions, f"there is no {test}"
        marks = [*marks, *map(ast.unparse, functions[name].decorator_list)]
        # rows of a parameter may have marks of their own: run.py leaves those out
        marks = [mark for mark in marks if not mark.startswith("pytest.mark.parametrize")]
        assert not any(f"mark.{tier}" in mark for mark in marks for tier in ("full", "gpu"))
        assert not file.startswith("tests/repo/")


def test_each_version_of_jax_has_one():
    """Its tests are among those that CI runs on this version."""
    listed = (run.PINS / "tests").read_text().split()
    for pins in run.PINS.glob("*.txt"):
        mutants = [mutant for mutant in MUTANTS if pins.stem in mutant.jax]
        assert mutants, pins.stem
        tests = [test for mutant in mutants for test in mutant.killed_by]
        assert all(test in listed or test.split("::")[0] in listed for test in tests)


def test_the_tests_of_versions_exist():
    for test in (run.PINS / "tests").read_text().split():
        file, _, name = test.partition("::")
        assert not name or name in contents(file)[0]
        assert (run.REPO / file).exists()


def test_a_text_that_is_nowhere_or_twice_is_refused():
    texts = {run.REPO / "a.py": "x = 1\ny = 1\n"}
    with pytest.raises(ValueError, match=r"'gone': its text occurs 0 times \(no file\)"):
        run.place(run.Mutant("gone", "z = 1", "z = 2", ()), texts)
    with pytest.raises(ValueError, match=r"'twice': its text occurs 2 times \(a.py\)"):
        run.place(run.Mutant("twice", "= 1", "= 2", ()), texts)
