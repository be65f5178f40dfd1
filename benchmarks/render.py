"""Tables in Markdown: every table of the README and of docs/ is written here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Rows, newest

GIB = 2.0**30
Table = tuple[list[str], list[list[str]], Rows]  # head, body, the records that they rest on
NOTHING = "No record yet.\n"


def markdown(head: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


REPEATED = "″"


def without_repeats(body: Sequence[Sequence[str]], columns: Sequence[int]) -> list[list[str]]:
    """Write a ditto mark for a cell of `columns` that repeats the one above it."""
    lines: list[list[str]] = []
    for number, line in enumerate(body):
        above = body[number - 1] if number else [""] * len(line)
        lines.append([
            REPEATED if at in columns and cell and cell == above[at] else cell
            for at, cell in enumerate(line)
        ])  # fmt: skip
    return lines


def without_empty_columns(
    head: Sequence[str], body: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    kept = [at for at in range(len(head)) if any(line[at] for line in body)]
    return [head[at] for at in kept], [[line[at] for at in kept] for line in body]


def source(rows: Rows) -> str:
    """Return the line with the devices, JAX versions and commits of records."""
    commits: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        commits.setdefault((row["device"], row["jax"]), set()).add(row["commit"])
    where = [
        f"{device}, jax {jax}, commit{'s' * (len(own) > 1)} {', '.join(sorted(own))}"
        for (device, jax), own in sorted(commits.items())
    ]
    return "\n" + "; ".join(where) + ".\n"


def cell(row: dict[str, Any] | None, form: str, unit: float = 1.0) -> str:
    """The value of a record in units, or nothing where there is none."""
    return form.format(row["value"] / unit) if row else ""


def target(what: str, asked: str, limit: float, value: float, text: str | None = None) -> list[str]:
    """Return a line of a table of targets: what, asked, measured, reached.

    `asked` prints the limit behind `≤ ` or `≥ `, which say what reaches it, and the value without
    these, unless there is a `text` of it.
    """
    reached = value <= limit if asked.startswith("≤") else value >= limit
    text = asked[2:].format(value) if text is None else text
    return [what, asked.format(limit), text, "yes" if reached else "**no**"]


@dataclass(frozen=True)
class Rendered:
    """A table of the newest records, with where they are from."""

    make: Callable[[Rows], Table]  # it, from records
    command: str  # of `benchmarks.run` or the script of examples/ that makes the records

    def __call__(self, rows: Rows) -> str:
        """Return the table as Markdown, or how to make its records."""
        head, body, used = self.make(newest(rows))
        if not body:
            script = self.command.startswith("examples/")
            command = self.command if script else f"-m benchmarks.run {self.command}"
            return f"Not measured yet. `python {command} --record` measures it.\n"
        return markdown(head, body) + (source(used) if used else "")


def alone(make: Callable[[Rows], Table]) -> Callable[[Rows], str]:
    """Return a table without its devices and commits, which another page has."""

    def table(rows: Rows) -> str:
        head, body, _ = make(newest(rows))
        return markdown(head, body)

    return table


def by_machine(rows: Rows, write: Callable[[Rows], str], *keys: str) -> str:
    """Join what `write` makes of the records of each device and JAX version, and other fields."""
    keys = (*keys, "device", "jax")
    parts = {tuple(row[key] for key in keys) for row in rows}
    own = ([row for row in rows if tuple(row[key] for key in keys) == part]
           for part in sorted(parts))  # fmt: skip
    return "\n".join(map(write, own)) or NOTHING


def save(made: Any, file: Path) -> Path:
    """Writes a figure as PNG, twice as wide as pages show it; return the file."""
    import matplotlib.pyplot as plt

    file.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(file, dpi=170, pil_kwargs={"optimize": True})
    plt.close(made)
    return file
