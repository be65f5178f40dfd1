"""The table of architectures and keys of Hugging Face configurations that fine-tuning supports."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from _llama import configuration

from benchmarks.records import Rows
from benchmarks.render import markdown


def _keys(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _values(only: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"`{name}: {json.dumps(values[0])}`" for name, values in only.items())


def configurations(rows: Rows) -> str:
    """Return a row for each architecture, and one of what all have in common."""
    del rows
    of = configuration
    body = [[f"`{n}`", _keys(f.read), _values(f.only)] for n, f in of.FAMILIES.items()]
    body.append(["all", _keys(of.READ), _values(of.SHARED)])
    types = ", ".join(of.ROPE_TYPES)
    return (
        markdown(["`model_type`", "reads", "supports only"], body)
        + f"\n`rope_type`: {types}. Tested with `transformers` {of.TESTED}.\n"
    )


TABLES = {"configurations": configurations}
