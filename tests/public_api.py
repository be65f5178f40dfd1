"""The public names of the library, a line each with its signature.

`python -m tests.public_api` writes them to tests/public_api.txt, which a test compares.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optax_lowmem._src.arrays.reprs import ShowsChanges
from tests import levanter_stand_in  # noqa: F401

SNAPSHOT = Path(__file__).with_suffix(".txt")
PACKAGE = "optax_lowmem"
MODULES = (
    "",
    "blocks",
    "checkpoint",
    "codecs",
    "diagnostics",
    "flax",
    "gaussws",
    "gaussws.parts",
    "layers",
    "layers.fp8_flow",
    "layers.fp8_flow.linen",
    "layers.linen",
    "layers.nf4",
    "levanter",
    "memory",
    "plan",
    "release",
    "sharding",
)


def _default(value: Any) -> str:
    plain = isinstance(value, bool | int | float | str | tuple | ShowsChanges | None)
    return repr(value) if plain else "..."  # others may show an address, or what JAX calls it


def _parameters(signature: inspect.Signature) -> str:
    """The parameters of a signature, without annotations, which Pythons print differently."""
    found = []
    for p in signature.parameters.values():
        default = p.default
        if default is not p.empty:
            text = _default(default)
            default = _Text(text)
        found.append(p.replace(annotation=p.empty, default=default))
    return str(inspect.Signature(found))


class _Text:
    """A default value as it is printed."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _of_class(kind: type) -> str:
    """Return how a class is made; a subclass of Flax's by what it writes alone."""
    ours = all(base.__module__.split(".")[0] != "flax" for base in kind.__mro__)
    if ours:
        return _parameters(inspect.signature(kind))
    init = vars(kind).get("__init__")
    if init is not None and init.__code__.co_filename == inspect.getfile(kind):
        return _parameters(inspect.signature(init))
    own = [name for name in inspect.get_annotations(kind) if name not in ("name", "parent")]
    return f" with {', '.join(own)}" if own else ""


def line(name: str, thing: Any) -> str:
    if inspect.ismodule(thing):
        return f"{name}: module"
    if inspect.isclass(thing):
        return f"class {name}{_of_class(thing)}"
    if inspect.isfunction(thing) or hasattr(thing, "__wrapped__"):
        return f"{name}{_parameters(inspect.signature(thing))}"
    return f"{name}: {type(thing).__name__}"


def lines() -> Iterator[str]:
    for module in MODULES:
        path = f"{PACKAGE}.{module}".rstrip(".")
        found = importlib.import_module(path)
        yield from (line(f"{path}.{name}", getattr(found, name)) for name in sorted(found.__all__))


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{one}\n" for one in lines()), encoding="utf-8")
