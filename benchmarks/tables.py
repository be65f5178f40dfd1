"""Writes the tables of the README and docs/ from the records, between `table:` markers."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT, claims
from benchmarks.claims import (
    coat,
    coat_activations,
    flashoptim,
    gaussws,
    q_adam_mini,
    stable_adamw,
    switchback,
)
from benchmarks.records import Rows, all_records, newest
from benchmarks.render import markdown, source
from benchmarks.suites import checkpoint, composition, examples, front, memory, release
from benchmarks.suites.activations import tables as activations
from benchmarks.suites.end_to_end import tables as end_to_end
from benchmarks.suites.fit import tables as fit
from benchmarks.suites.formats import tables as formats
from benchmarks.suites.linear import tables as linear
from benchmarks.suites.mesh import tables as mesh
from benchmarks.suites.noise import tables as noise
from benchmarks.suites.step import tables as step

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/results/index.md",
    "docs/guides/activations.md",
    "docs/internals/architecture.md",
    "docs/guides/choosing.md",
    "docs/guides/composition.md",
    "docs/results/cpu_speed.md",
    "docs/results/gpu_speed.md",
    "docs/guides/layers.md",
    "docs/results/memory.md",
    "docs/guides/noise.md",
    "docs/guides/sharding.md",
    "docs/results/training_speed.md",
    "docs/results/claims.md",
)
MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# what has `TABLES`: name -> what makes it of records
SUITES: tuple[Any, ...] = (
    activations, checkpoint, composition, end_to_end, examples, fit, formats, front, linear, memory,
    mesh, noise, release, step,
)  # fmt: skip
PAPERS: dict[str, tuple[str, Any]] = {
    "claims": ("FlashOptim", flashoptim),
    "claims_stable_adamw": ("StableAdamW", stable_adamw),
    "claims_q_adam_mini": ("Q-Adam-mini", q_adam_mini),
    "claims_coat": ("COAT", coat),
    "claims_coat_activations": ("COAT", coat_activations),
    "claims_switchback": ("SwitchBack", switchback),
    "claims_gaussws": ("GaussWS", gaussws),
}


def of_paper(name: str, paper: Any) -> Callable[[Rows], str]:
    """Return what makes the table of a paper's claims and our measurements."""

    def table(rows: Rows) -> str:
        body, used = claims.table(newest(rows), paper.CLAIMS)
        head = [name, "the paper says", "we measured", ""]
        return markdown(head, body) + (source(used) if used else "")

    return table


TABLES: dict[str, Callable[[Rows], str]] = {
    **{name: table for suite in SUITES for name, table in suite.TABLES.items()},
    **{name: of_paper(*paper) for name, paper in PAPERS.items()},
}


def rendered(text: str, rows: Rows) -> str:
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](rows) + m[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    rows, stale = all_records(), []
    for page in (ROOT / name for name in PAGES):
        if not page.exists():
            continue
        text = page.read_text(encoding="utf-8")
        new = rendered(text, rows)
        stale += [page.name] if new != text else []
        if not check:
            page.write_text(new, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
