"""The share of annotations in the library that say nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "optax_lowmem" / "_src"
MOST = 0.05  # of the annotated arguments that may be `Any`: lower it where types get clearer


def annotations(text: str) -> Iterator[str]:
    """Those of the arguments of every function of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = node.args
            every = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
            yield from (ast.unparse(a.annotation) for a in every if a and a.annotation)


def is_any(annotation: str) -> bool:
    return annotation.replace("typing.", "") in {"Any", "Any | None", "Optional[Any]"}


def test_few_arguments_are_any():
    files = {path: list(annotations(path.read_text("utf-8"))) for path in SOURCES.rglob("*.py")}
    known = sum(map(len, files.values()))
    counts = {path.name: sum(map(is_any, found)) for path, found in files.items()}
    worst = sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert known > 3000
    assert sum(counts.values()) <= MOST * known, f"most in {worst}: optax.Params, object, a TypeVar"


def test_any_is_noticed():
    text = "def f(a: Any, b: dict[str, Any], *c: int, d: Any | None = None, **e: Any): ...\n"
    assert list(map(is_any, annotations(text))) == [True, False, True, False, True]
