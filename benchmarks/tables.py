"""Writes the tables of the README and docs/ from the records, between `table:` markers."""

import argparse
import importlib
import re
from collections.abc import Callable

from benchmarks import ROOT, claims
from benchmarks.records import Rows, all_records, newest
from benchmarks.render import markdown, source, without_empty_columns

MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if MARKED.search(page.read_text(encoding="utf-8"))
]
# modules below benchmarks.suites that have `TABLES`: name -> what makes it of records
SUITES = (
    "activations.tables", "choose", "configurations", "end_to_end.tables", "examples", "frameworks",
    "finetune", "fit.tables", "formats.tables", "kernels", "linear.tables", "memory",
    "mesh.compiled", "mesh.reshard", "mesh.scaling", "mesh.tables",
    "nf4", "noise.tables", "offload", "other_gpus", "pairs.budgets", "pairs.muon",
    "pairs.spread", "plan", "qlora", "release", "step.tables", "tpu.tables",
)  # fmt: skip
# module below benchmarks.claims -> name of its table, and of the method
PAPERS = {
    "flashoptim": ("claims", "FlashOptim"),
    "stable_adamw": ("claims_stable_adamw", "StableAdamW"),
    "q_adam_mini": ("claims_q_adam_mini", "Q-Adam-mini"),
    "coat": ("claims_coat", "COAT"),
    "coat_activations": ("claims_coat_activations", "COAT"),
    "switchback": ("claims_switchback", "SwitchBack"),
    "gaussws": ("claims_gaussws", "GaussWS"),
}


def of_paper(name: str, method: str) -> Callable[[Rows], str]:
    paper = importlib.import_module(f"benchmarks.claims.{name}")

    def table(rows: Rows) -> str:
        body, used = claims.table(newest(rows), paper.CLAIMS)
        return claims.shown(method, body) + (source(used) if used else "")

    return table


def summary(rows: Rows) -> str:
    body = []
    for name, (_, method) in PAPERS.items():
        paper = importlib.import_module(f"benchmarks.claims.{name}")
        of = {"coat": ", states", "coat_activations": ", activations"}.get(name, "")
        counts = claims.counted(newest(rows), paper.CLAIMS)
        body.append([method + of, *(str(n or "") for n in counts), str(sum(counts))])
    return markdown(*without_empty_columns(["claims of", *claims.VERDICTS, "all"], body))


TABLES: dict[str, Callable[[Rows], str]] = {"claims_summary": summary} | {
    table: of_paper(name, method) for name, (table, method) in PAPERS.items()
}
for suite in SUITES:
    TABLES |= importlib.import_module(f"benchmarks.suites.{suite}").TABLES


def rendered(text: str, rows: Rows) -> str:
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](rows) + m[3], text)


def main() -> None:
    """Rewrites the pages; with --check, fails where one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a page is out of date")
    args = parser.parse_args()
    rows, stale = all_records(), []
    for page in (ROOT / name for name in PAGES):
        text = page.read_text(encoding="utf-8")
        if (new := rendered(text, rows)) != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
