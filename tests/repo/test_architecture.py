"""The shape of the repository: direction of imports, lean import, the public names."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import optax_lowmem

TESTS = Path(__file__).parents[1]
REPO = TESTS.parent
PACKAGE = REPO / "optax_lowmem"

# What each part of the package may import of the others (docs/architecture.md has the reasons).
# A new part fails `test_every_part_has_a_place` until it has a line here.
BELOW_TRANSFORMS = ("_core", "codecs", "kernels")
BELOW_TOP = (*BELOW_TRANSFORMS, "gaussws", "transforms", "optimizers")
MAY_IMPORT = {
    "_core": (),
    "codecs": ("_core",),
    "kernels": ("_core", "codecs"),
    "blocks": ("_core",),
    "gaussws": (*BELOW_TRANSFORMS, "blocks"),
    "transforms": (*BELOW_TRANSFORMS, "gaussws"),
    "optimizers": (*BELOW_TRANSFORMS, "transforms", "blocks"),
    "layers": (*BELOW_TRANSFORMS, "gaussws"),
    "checkpoint": BELOW_TOP,
    "diagnostics": BELOW_TOP,
    "flax": BELOW_TOP,
    "memory": BELOW_TOP,
    "release": BELOW_TOP,
    "sharding": BELOW_TOP,
}


def sources(*folders: str) -> list[Path]:
    """The Python files below these folders of the repository."""
    return sorted(p for folder in folders for p in (REPO / folder).rglob("*.py"))


def all_sources() -> list[Path]:
    return sources("optax_lowmem", "tests", "examples", "benchmarks")


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_of(path: Path) -> list[str]:
    """The dotted name of a module of the package, and of a package for its __init__.py."""
    parts = list(path.relative_to(REPO).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, inside functions too.

    `from a import b` gives a.b, which is right for a module b and harmless for another name.
    """
    own = module_of(path)
    parent = own if path.name == "__init__.py" else own[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                (node.lineno, arg.value)
                for arg in node.args[:1]
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def parts_of_package() -> set[str]:
    """The subpackages and modules directly inside the package."""
    found = {module_of(path)[1] for path in sources("optax_lowmem") if len(module_of(path)) > 1}
    assert {"_core", "codecs"} <= found, "the package was not found"
    return found


def upward_imports(path: Path) -> list[str]:
    """The imports of one file that its part may not have."""
    own = module_of(path)
    if len(own) == 1:  # the package's own __init__ re-exports everything
        return []
    allowed = {own[1], *MAY_IMPORT.get(own[1], ())}
    bad = []
    for line, target in imports(path):
        names = target.split(".")
        if names[0] == "optax_lowmem" and (len(names) == 1 or names[1] not in allowed):
            bad.append(f"{name_of(path)}:{line} imports {target}; {own[1]} may not")
    return bad


def test_every_part_has_a_place():
    """A part missing from MAY_IMPORT would escape the check of directions."""
    assert parts_of_package() <= MAY_IMPORT.keys(), "say in MAY_IMPORT what the new part may import"


def test_imports_go_one_way():
    assert not [bad for path in sources("optax_lowmem") for bad in upward_imports(path)]


@pytest.mark.parametrize(
    "text",
    [
        "import optax_lowmem",
        "from optax_lowmem import transforms",
        "from optax_lowmem import flash_adamw",
        "from .. import kernels",
        "from ..transforms import chain",
        "def f():\n    from optax_lowmem.optimizers.adam import flash_adamw",
        "import importlib\nimportlib.import_module('optax_lowmem.kernels')",
    ],
)
def test_upward_imports_are_noticed(text, tmp_path, monkeypatch):
    """Each way to import upwards from codecs, so that the check above is known to see it."""
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    path = tmp_path / "optax_lowmem" / "codecs" / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import _core\nfrom . import base\nimport jax\n" + text)
    assert len(upward_imports(path)) == 1


def test_import_is_lean():
    """In a fresh interpreter that finds this copy of the package first, installed or not."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "lean_import.py")],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def is_private(dotted: str) -> bool:
    """Return whether a name of JAX and its family lies in a private module, such as jax._src."""
    root, *rest = dotted.split(".")
    return root in {"jax", "jaxlib", "optax", "flax"} and any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )


def private_uses(path: Path) -> Iterator[str]:
    for line, target in imports(path):
        if is_private(target):
            yield f"{name_of(path)}:{line} imports {target}"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and is_private(ast.unparse(node)):
            yield f"{name_of(path)}:{node.lineno} uses {ast.unparse(node)}"


def test_no_private_modules_of_jax():
    """They change without notice; tests may look inside, what users run may not."""
    shipped = sources("optax_lowmem", "examples", "benchmarks")
    assert not [use for path in shipped for use in private_uses(path)]
    books = sorted((REPO / "notebooks").glob("*.ipynb"))
    assert not [b.name for b in books if "jax._src" in b.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    "text",
    ["import jax._src.core", "from jax import _src", "import jax\njax._src.dtypes.dtype(0)"],
)
def test_private_modules_are_noticed(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    path = tmp_path / "probe.py"
    path.write_text("import jax.numpy\nprint(jax.__version__)\n" + text)
    assert list(private_uses(path))


RIDDLES = ("What", "Whether", "Where", "Which", "Why", "Who", "How", "When")


def vague_docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].rstrip(",:") in RIDDLES:
                yield f"{name_of(path)}:{getattr(node, 'lineno', 1)} opens with {words[0]!r}"


def test_docstrings_open_with_a_verb_or_a_noun():
    assert not [line for path in all_sources() for line in vague_docstrings(path)]


def test_vague_docstrings_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    path = tmp_path / "probe.py"
    path.write_text('"""How it is done."""\n\n\ndef f():\n    """Whether it is."""\n')
    assert [line.rsplit(" ", 1)[1] for line in vague_docstrings(path)] == ["'How'", "'Whether'"]


def test_public_names():
    """A name added or lost is a change for users: it goes into the snapshot and CHANGELOG."""
    snapshot = (TESTS / "public_api.txt").read_text(encoding="utf-8").split()
    update = (
        "if meant, say so in CHANGELOG.md and run: "
        'python -c "import optax_lowmem as m; print(*sorted(m.__all__), sep=chr(10))"'
        " > tests/public_api.txt"
    )
    assert sorted(optax_lowmem.__all__) == snapshot, update
    missing = [name for name in optax_lowmem.__all__ if not hasattr(optax_lowmem, name)]
    assert not missing, "in __all__ but not defined"
