"""The shape of the repository: direction of imports, lean import, the public names."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import public_api

TESTS = Path(__file__).parents[1]
REPO = TESTS.parent
PACKAGE = REPO / "optax_lowmem"

# What each room of _src may import of the others (docs/internals/architecture.md says why).
# A new room fails `test_every_room_has_a_place` until it has a line here. Public modules may import
# everything, and nothing imports them.
CORE = ("core", "kernels", "codecs", "blocks", "step")
ALL_ROOMS = (*CORE, "optimizers", "wrappers")
MAY_IMPORT = {
    "core": (),
    "kernels": ("core",),
    "codecs": ("core", "kernels"),
    "blocks": ("core", "kernels"),
    "step": ("core", "kernels", "codecs", "blocks"),
    "optimizers": CORE,
    "wrappers": (*CORE, "optimizers"),
    "quantized_matmul": ("core", "kernels"),
    "switchback": (*ALL_ROOMS, "quantized_matmul"),
    "fp8_flow": (*ALL_ROOMS, "quantized_matmul"),
    "noise": ALL_ROOMS,
    "losses": (*CORE, "quantized_matmul"),
    "release": ALL_ROOMS,
    "checkpoint": ALL_ROOMS,
    "memory": ALL_ROOMS,
    "diagnostics": ALL_ROOMS,
    "sharding": ALL_ROOMS,
    "flax": (*ALL_ROOMS, "release"),
    "levanter": ALL_ROOMS,
}
# (file, room that it imports all the same): why. A file that no longer does fails the test.
EXCEPTIONS = {
    ("optimizers/__init__.py", "wrappers"): "stable_adamw's plain counterpart is update_clipping",
    ("wrappers/chain.py", "noise"): "step folds clipping into an optimizer inside gaussws_noise",
    ("memory/state.py", "checkpoint"): "the optax optimizer that a report compares with",
    ("memory/decoders.py", "losses"): "the chunks of the loss, whose size is counted once",
    ("losses/products.py", "fp8_flow"): "products of 8-bit operands, codes made once",
}


def sources(*folders: str) -> list[Path]:
    """The Python files below these folders of the repository."""
    return sorted(p for folder in folders for p in (REPO / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


@functools.cache
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


def room_of(module: list[str]) -> str | None:
    """The room of a module, or None for a public one and for `_src` itself."""
    return module[2] if module[1:2] == ["_src"] and len(module) > 2 else None


def rooms() -> set[str]:
    """The subpackages and modules directly inside _src."""
    found = {room_of(module_of(path)) for path in sources("optax_lowmem/_src")} - {None}
    assert {"core", "codecs"} <= found, "the package was not found"
    return {room for room in found if room}


def foreign_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(room or public name, text) of the imports of one file that its room may not have."""
    own = room_of(module_of(path))
    if own is None:  # public modules re-export everything
        return
    allowed = {own, *MAY_IMPORT.get(own, ())}
    for line, target in imports(path):
        names = target.split(".")
        room = room_of(names) or ".".join(names[:2])
        if names[0] == "optax_lowmem" and room not in allowed:
            yield room, f"{name_of(path)}:{line} imports {target}; {own} may not"


def exception_of(path: Path, room: str) -> tuple[str, str]:
    return name_of(path).removeprefix("optax_lowmem/_src/"), room


def upward_imports(path: Path) -> list[str]:
    """The imports of one file that its room may not have and that are no exceptions."""
    found = foreign_imports(path)
    return [text for room, text in found if exception_of(path, room) not in EXCEPTIONS]


def test_the_page_lists_every_package():
    page = (REPO / "docs/internals/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| [\d,]+ \|", page, re.MULTILINE)
    assert listed == list(MAY_IMPORT), "run python -m tests.repo.packages"


def test_every_room_has_a_place():
    """A room missing from MAY_IMPORT would escape the check of directions."""
    assert rooms() == MAY_IMPORT.keys(), "say in MAY_IMPORT what the new room may import"


def test_imports_go_one_way():
    assert not [bad for path in sources("optax_lowmem") for bad in upward_imports(path)]


def test_exceptions_are_needed():
    files = sources("optax_lowmem/_src")
    found = {exception_of(path, room) for path in files for room, _ in foreign_imports(path)}
    assert found == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "import optax_lowmem",
        "from optax_lowmem import codecs",
        "from optax_lowmem import flash_adamw",
        "from optax_lowmem._src import wrappers",
        "from .. import update",
        "from ..wrappers import chain",
        "def f():\n    from optax_lowmem._src.optimizers.adam import flash_adamw",
        "import importlib\nimportlib.import_module('optax_lowmem._src.step')",
    ],
)
def test_upward_imports_are_noticed(text, tmp_path, monkeypatch):
    """Each way to import upwards from codecs, so that the check above is known to see it."""
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    path = tmp_path / "optax_lowmem" / "_src" / "codecs" / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import core\nfrom . import base\nimport jax\n" + text)
    assert len(upward_imports(path)) == 1


def test_benchmarks_import_in_no_circle():
    paths = {".".join(module_of(path)): path for path in sources("benchmarks")}
    below = {
        name: {found for _, target in imports(path) if (found := module_in(paths, target)) != name}
        for name, path in paths.items()
    }
    graph = {name: targets - {None} for name, targets in below.items()}
    assert len(graph) > 20
    list(graphlib.TopologicalSorter(graph).static_order())  # raises where there is a circle


def module_in(paths: dict[str, Path], target: str) -> str | None:
    """The module that an import loads: the name itself, or what it is a member of."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in paths), None)


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


# checks that it has what it uses, and has a substitute
PARTITIONER = "optax_lowmem/_src/kernels/partitioned.py"
ABSENT_GPU = "benchmarks/absent_gpu.py"  # which no user runs: it compiles without a device


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
        if isinstance(node, ast.Constant) and str(node.value).startswith("jax._src."):
            yield f"{name_of(path)}:{node.lineno} names {node.value}"


def test_no_private_modules_of_jax():
    """They change without notice; tests may look inside, what users run may in one module only."""
    shipped = sources("optax_lowmem", "examples", "benchmarks")
    found = {name_of(path) for path in shipped if list(private_uses(path))}
    assert found == {PARTITIONER, ABSENT_GPU}
    books = sorted((REPO / "notebooks").glob("*.ipynb"))
    assert not [b.name for b in books if "jax._src" in b.read_text(encoding="utf-8")]


# Elementary functions: formulas of rules, codecs and distributions have them, and what carries
# out a step has not. Each exception is a formula of its own, or bits.
ELEMENTARY = {
    "cos", "erf", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "log2", "logistic",
    "power", "reciprocal", "round", "rsqrt", "sin", "sqrt", "square", "tanh",
}  # fmt: skip
LIBRARIES = {"jnp", "jax.numpy", "lax", "jax.lax", "jax.nn", "tl", "libdevice"}
FORMULAS = {
    "core/clipping.py": "RMS_t, which an optimizer, a wrapper and a diagnostic share",
    "core/hyperparameters.py": "of the step's number, once a step",
    "core/numerics.py": "the logarithm where a backend has none of its own",
    "blocks/block_means.py": "the mean of squares that Adam-mini's rule takes",
}


def carries_out(path: Path) -> bool:
    """Return whether a module runs formulas of others: core, the step, and kernels."""
    kernel = path.stem.endswith(("triton", "mosaic", "_tpu"))
    return (
        kernel
        or room_of(module_of(path)) in {"core", "kernels", "step"}
        or path.stem == "block_means"
    )


def elementary(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in ELEMENTARY and owner in LIBRARIES:
                yield f"{name_of(path)}:{node.lineno} calls {ast.unparse(node.func)}"


def test_a_formula_stands_with_its_rule_or_codec():
    files = [path for path in sources("optax_lowmem/_src") if carries_out(path)]
    found = {path: list(elementary(path)) for path in files}
    with_some = {
        name_of(p).removeprefix("optax_lowmem/_src/") for p, calls in found.items() if calls
    }
    assert with_some == FORMULAS.keys(), [call for calls in found.values() for call in calls]


def test_triton_is_written_in_few_modules():
    written = {
        name_of(path).removeprefix("optax_lowmem/_src/")
        for path in sources("optax_lowmem/_src")
        if any(target.split(".")[0] == "triton" for _, target in imports(path))
    }
    assert written == {"kernels/triton_library.py"}


def public_modules() -> list[Path]:
    return [path for path in sources("optax_lowmem") if "_src" not in path.parts]


def test_every_public_module_is_in_the_snapshot():
    found = {".".join(module_of(path)[1:]) for path in public_modules()}
    assert found == set(public_api.MODULES)


_RUNS_MAIN = "if __name__ == '__main__':\n    main()"


def test_public_modules_are_thin():
    for path in public_modules():
        body = parse(path).body[1:]
        if path.parent == PACKAGE and path.name == "__init__.py":
            body = [node for node in body if not isinstance(node, ast.Try | ast.Expr)]
        others = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
        if others and ast.unparse(others[-1]) == _RUNS_MAIN:  # `python -m optax_lowmem.plan`
            del others[-1]
        assert [ast.unparse(node.targets[0]) for node in others] == ["__all__"], name_of(path)
