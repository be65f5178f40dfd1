"""Code on the pages of the repository, which tests run."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def page_block(page: str, line: str) -> dict[str, Any]:
    """The names that the python block of a page with this text in it defines."""
    text = (ROOT / page).read_text("utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in found if line in block)
    namespace: dict[str, Any] = {"__name__": "a_page"}
    exec(compile(block, page, "exec"), namespace)  # noqa: S102
    return namespace
