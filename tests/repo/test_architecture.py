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

# The floors of _src, the rooms of each, and the floors that each may import besides its own
# (docs/internals/architecture.md says why). A room imports the modules of its floor that are in no
# room, and the rooms before it. Public modules may import everything, and nothing imports them.
FLOORS = {
    "arrays": ("roles", "codecs"),
    "kernels": (),
    "optim": ("blocks", "step", "optimizers", "wrappers"),
    "layers": ("quantized_matmul", "switchback", "fp8_flow", "noise", "losses"),
    "training": (
        "gaussws_noise", "release", "checkpoint", "memory", "diagnostics", "sharding", "flax",
        "levanter",
    ),
}  # fmt: skip
BELOW = {
    "arrays": (),
    "kernels": ("arrays",),
    "optim": ("arrays", "kernels"),
    "layers": ("arrays", "kernels"),
    "training": ("arrays", "kernels", "optim", "layers"),
}
# (file, room that it imports all the same): why. A file that no longer does fails the test.
EXCEPTIONS = {
    (
        "optim/optimizers/__init__.py",
        "optim/wrappers",
    ): "stable_adamw's plain counterpart is update_clipping",
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
    """The floor and room of a module, `optim/step`, its floor if it is in no room, or None.

    None is for public modules and for `_src` itself.
    """
    if module[1:2] != ["_src"] or len(module) < 3:
        return None
    floor, *rest = module[2:]
    return f"{floor}/{rest[0]}" if rest and rest[0] in FLOORS.get(floor, ()) else floor


def may_import(room: str, other: str) -> bool:
    """Whether a module of one room may import one of another."""
    floor, _, name = room.partition("/")
    other_floor, _, other_name = other.partition("/")
    if floor != other_floor:
        return other_floor in BELOW.get(floor, ())
    rooms = ("", *FLOORS[floor])
    return rooms.index(other_name) <= rooms.index(name)


def foreign_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(room or public name, text) of the imports of one file that its room may not have."""
    room = room_of(module_of(path))
    if room is None:  # public modules re-export everything
        return
    for line, target in imports(path):
        names = target.split(".")
        other = room_of(names)
        if names[0] == "optax_lowmem" and not (other and may_import(room, other)):
            other = other or ".".join(names[:2])
            yield other, f"{name_of(path)}:{line} imports {target}; {room} may not"


def exception_of(path: Path, room: str) -> tuple[str, str]:
    return name_of(path).removeprefix("optax_lowmem/_src/"), room


def upward_imports(path: Path) -> list[str]:
    """The imports of one file that its room may not have and that are no exceptions."""
    found = foreign_imports(path)
    return [text for room, text in found if exception_of(path, room) not in EXCEPTIONS]


def test_the_page_lists_every_room():
    page = (REPO / "docs/internals/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)` \| [\d,]+ \|", page, re.MULTILINE)
    rooms = [f"{floor}{room and '/'}{room}" for floor in FLOORS for room in ("", *FLOORS[floor])]
    assert listed == rooms, "run python -m tests.repo.packages"


def test_every_package_is_a_room():
    """A package that is missing from FLOORS would be checked as a module of its floor."""
    source = PACKAGE / "_src"
    assert {p.name for p in source.iterdir() if p.name != "__pycache__"} - {"__init__.py"} == set(
        FLOORS
    )
    for floor, rooms in FLOORS.items():
        packages = {p.parent.name for p in (source / floor).glob("*/__init__.py")}
        modules = {p.stem for p in (source / floor).glob("*.py")}
        assert packages <= set(rooms) <= packages | modules, floor


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
        "from optax_lowmem._src.optim import wrappers",
        "from ... import kernels",
        "from ...optim.wrappers import chain",
        "def f():\n    from optax_lowmem._src.optim.optimizers.adam import flash_adamw",
        "import importlib\nimportlib.import_module('optax_lowmem._src.optim.step')",
    ],
)
def test_upward_imports_are_noticed(text, tmp_path, monkeypatch):
    """Each way to import upwards from codecs, so that the check above is known to see it."""
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    path = tmp_path / "optax_lowmem" / "_src" / "arrays" / "codecs" / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import groups\nfrom . import base\nimport jax\n" + text)
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
    "arrays/hyperparameters.py": "of the step's number, once per step",
    "arrays/numerics.py": "the logarithm where a backend has none of its own",
    "optim/blocks/block_means.py": "the mean of squares in Adam-mini's rule",
    "optim/clipping.py": "RMS_t, which an optimizer, a wrapper and a diagnostic share",
}


def carries_out(path: Path) -> bool:
    """Return whether a module runs formulas of others: arrays, the step, and kernels."""
    kernel = path.stem.endswith(("_kernel", "mosaic", "_tpu"))
    runs = {"arrays", "kernels", "optim", "optim/step"}
    return kernel or room_of(module_of(path)) in runs or path.stem == "block_means"


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
