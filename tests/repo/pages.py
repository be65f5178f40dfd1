"""Pages of the documentation, their blocks of code, and how the tests run them."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]

_BLOCK = re.compile(
    r"^(?P<lowered><!-- lowered for CUDA -->\n)?"
    r"(?:```python\n(?P<shown>.*?)^```\n|<!-- run\n(?P<hidden>.*?)^-->\n)"
    r"(?:\n```text\n(?P<printed>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of Python: its source, the output that the page shows, and whether it is lowered."""

    name: str
    source: str
    printed: str | None
    lowered: bool


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """The Python blocks of a page, those in `<!-- run ... -->` comments included, in order."""
    return [
        Block(
            f"{name_of(page)}, block {index}",
            found["shown"] or found["hidden"],
            found["printed"],
            bool(found["lowered"]),
        )
        for index, found in enumerate(_BLOCK.finditer(page.read_text("utf-8")))
    ]


def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.source, block.name, "exec"), namespace)  # noqa: S102
    return out.getvalue()


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of Python as a command."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=os.environ | env, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
