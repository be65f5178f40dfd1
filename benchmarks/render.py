"""Tables in Markdown: every table of the README and of docs/ is written here."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.records import Rows, newest

Table = tuple[list[str], list[list[str]], Rows]  # head, body, the records that they rest on
NOTHING = "No record yet.\n"


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


def source(rows: Rows) -> str:
    """Return the line with the device, JAX version and commit of records."""
    where = sorted({f"{r['device']}, jax {r['jax']}, commit {r['commit']}" for r in rows})
    return "\n" + "; ".join(where) + ".\n"


@dataclass(frozen=True)
class Rendered:
    """A table of the newest records, with where they are from.

    Attributes:
      make: it, from records.
      command: of `benchmarks.run` or the script of examples/ that makes the records.
    """

    make: Callable[[Rows], Table]
    command: str

    def __call__(self, rows: Rows) -> str:
        """Return the table as Markdown, or how to make its records."""
        head, body, used = self.make(newest(rows))
        if not body:
            script = self.command.startswith("examples/")
            command = self.command if script else f"-m benchmarks.run {self.command}"
            return f"Nothing is recorded yet: `python {command} --record`.\n"
        return markdown(head, body) + (source(used) if used else "")
