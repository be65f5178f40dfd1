"""Writes the table of tested versions into docs/internals, from the last lines of `.ci/run`.

`.ci/run | tee ci.log; python -m tools.ci_table ci.log`
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/internals/versions.md"
BEGIN, END = "<!-- ci -->\n", "<!-- end -->"
_STAGE = re.compile(
    r"^(\S+) +ok +(\d+)s of +\d+s +(\d+) passed, 0 failed +"
    r"python (\S+), jax (\S+), optax (\S+), flax (\S+?)(?:,.*)?$",
    re.MULTILINE,
)


def table(output: str) -> str:
    """Return the table of the stages that passed with tests on a version of JAX.

    Args:
      output: what `.ci/run` printed.

    Raises:
      ValueError: if no such stage is in the output.
    """
    stages = _STAGE.findall(output)
    if not stages:
        raise ValueError("no stage of .ci/run in this output")
    head = ["stage", "Python", "JAX", "optax", "Flax", "tests", "seconds"]
    rows = [head, ["---"] * len(head)]
    for name, seconds, tests, *versions in stages:
        rows.append([name, *versions, f"{int(tests):,}", seconds])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(page: str, output: str) -> str:
    """Return the page with the table between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(output) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8"), Path(sys.argv[1]).read_text("utf-8")), "utf-8")
