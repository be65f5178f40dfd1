"""Write the table of floors in docs/internals/architecture.md: `python -m tests.repo.packages`.

The description of a package is the first paragraph of its docstring.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo.test_architecture import FLOORS, PACKAGE, REPO

PAGE = REPO / "docs/internals/architecture.md"
MARKS = "<!-- packages -->\n", "<!-- end -->\n"


def description(place: Path) -> str:
    file = place / "__init__.py" if place.is_dir() else place
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").removesuffix(".")


def lines(place: Path) -> int:
    files = place.rglob("*.py") if place.is_dir() else [place]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def rows() -> Iterator[str]:
    yield "| package | lines | |"
    yield "|---|---|---|"
    for floor, rooms in FLOORS.items():
        for name in (floor, *(f"{floor}/{room}" for room in rooms)):
            folder = PACKAGE / "_src" / name
            place = folder if folder.is_dir() else folder.with_suffix(".py")
            text = description(place)
            yield f"| `{name}` | {lines(place):,} | {f'**{text}**' if name == floor else text} |"


def page() -> str:
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1], 1)
    return "".join([before, MARKS[0], "\n".join(rows()), "\n", MARKS[1], after])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
