"""Reads docstrings for the site: examples as code, formulas as MathML, which needs no script."""

import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

_EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)
_DISPLAY = re.compile(r"^( *)\.\. math::((?:.*\n)(?:(?:\1 +.*)?\n)*)", re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]*)`")

_ARGUMENTS = Path(__file__).parents[1] / "optax_lowmem/_src/optim/optimizers/arguments.py"
_COMPLETED = runpy.run_path(str(_ARGUMENTS))["completed"]


def converted(text: str) -> str:
    """Return a docstring in Google's style, with Markdown in it."""
    text = _EXAMPLE.sub(r"\1Examples:", text)
    text = _INLINE.sub(lambda found: convert(found[1]), text)
    return _DISPLAY.sub(_display, text)


def _display(found: re.Match) -> str:
    latex = " ".join(textwrap.dedent(found[2]).split()).replace("&", "")
    rows = [row.strip() for row in latex.split(r"\\")]
    formulas = "".join(convert(row, display="block") for row in rows)
    return f"\n{found[1]}<div>{formulas}</div>\n\n"


class Docstrings(griffe.Extension):
    """Converts the docstring of every object; completes those of decorated optimizers."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            if any(str(d.value) == "with_common_arguments" for d in getattr(obj, "decorators", ())):
                obj.docstring.value = _COMPLETED(
                    obj.docstring.value, [p.name for p in obj.parameters]
                )
            obj.docstring.value = converted(obj.docstring.value)
