"""Describe arguments that optimizers share; no JAX import, since tools/docstrings.py runs it."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

COMMON = {
    "learning_rate": "number, f32 scalar or schedule.",
    "b1": "decay of mu, in [0, 1).",
    "b2": "decay of nu, in [0, 1), or a schedule that starts at 0 such as `b2_schedule()`.",
    "eps": "added outside the root.",
    "eps_root": "added inside the root.",
    "mu_dtype": "dtype of mu in leaves that are not compressed (small or excluded); None is f32.",
    "weight_decay": "number, f32 scalar or schedule; decoupled, times the learning rate.",
    "mask": "where weight decay applies: a tree (prefix) of bools or a function of the parameters.",
    "nesterov": "as in `optax.nadamw`.",
    "blocks": "head counts and rules; a `Structure`.",
    "storage": "codecs, group size, width of the master weights, rounding, policy.",
    "decouple_lr": "decay by `weight_decay * lr / peak`: True for a constant rate, or a schedule's "
    "peak as a number.",
}
_ARGS = re.compile(r"^Args:\n((?:  .*\n)+)\n", re.MULTILINE)
_ENTRY = re.compile(r"^  (\w+): .*\n(?:    .*\n)*", re.MULTILINE)
_AFTER = re.compile(r"^(?:Returns|Raises|Numerics|Memory|Example):", re.MULTILINE)


def with_common_arguments(function: F) -> F:
    """Complete a function's docstring: describe undocumented parameters by `COMMON`."""
    names = inspect.signature(function).parameters
    function.__doc__ = completed(inspect.cleandoc(function.__doc__ or ""), names)
    return function


def completed(text: str, names: Iterable[str]) -> str:
    """Return a docstring (without indentation) that describes each parameter, in signature order.

    Raises:
      KeyError: for a parameter that neither the docstring nor `COMMON` describes.
    """
    result = _ARGS.search(text)
    start = result or _AFTER.search(text)
    entries = {entry[1]: entry[0] for entry in _ENTRY.finditer(result[1] if result else "")}
    lines = (entries.get(name) or _line(name) for name in names)
    at = start.start() if start else len(text)
    end = result.end() if result else at
    return f"{text[:at]}Args:\n{''.join(lines)}\n{text[end:]}"


def _line(name: str) -> str:
    line = f"{name}: {COMMON[name]}"
    return textwrap.indent(textwrap.fill(line, 94, subsequent_indent="  "), "  ") + "\n"
