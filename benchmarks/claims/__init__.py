"""Claims of papers, with our measurements or why we have none: tables of docs/results/claims.md.

The module of a paper has its claims as data, below the measures that they name.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Rows, last
from benchmarks.render import markdown, without_empty_columns, without_repeats

SAME, BETTER, NOT, UNDECIDED = "same", "better", "not the same", "undecided"
NOT_MEASURED, NOT_TRIED = "no records", "not measured"
VERDICTS = (SAME, BETTER, NOT, UNDECIDED, NOT_MEASURED, NOT_TRIED)
ONE_SEED = "one seed"  # of our run
ALIKE = ("tokens/s", "bytes per parameter")  # units of what is the same with any seed


@dataclass(frozen=True)
class Finding:
    measured: str
    verdict: str  # one of VERDICTS
    rows: Rows  # the records it rests on
    scale: str = ""  # the size of the run, and its seeds

    def with_seeds(self) -> "Finding":
        """Return the finding, which says it where it rests on models trained with one seed."""
        seeded = [row for row in self.rows if row.get("seed") is not None]
        of_models = [row for row in seeded if "parameters" in row.get("flags", {})]
        trained = [row for row in of_models if row.get("unit") not in ALIKE]
        if len({row["seed"] for row in trained}) != 1 or ONE_SEED in self.scale:
            return self
        size = self.scale or f"{trained[0]['flags']['parameters'] / 1e6:.3g}M weights"
        return dataclasses.replace(self, scale=f"{size}, {ONE_SEED}")


class Missing(LookupError):
    """Records that a measure needs are not there yet."""


Measure = Callable[[Rows], Finding]  # of the newest record of each case; or it raises Missing
Holds = Callable[[float], bool]


def measure(function: Callable[..., Finding]) -> Callable[..., Measure]:
    """Give a measure parameters: `f(rows, ...)` becomes `f(...)`, a measure."""

    @functools.wraps(function)
    def given(*args: Any, **more: Any) -> Measure:
        return lambda rows: function(rows, *args, **more)

    return given


def graded(better: bool, same: bool) -> str:
    return BETTER if better else SAME if same else NOT


def judged(text: str, holds: bool | str, rows: Rows, scale: str = "") -> Finding:
    """A finding, by whether the claim holds, or with another verdict."""
    return Finding(text, holds if isinstance(holds, str) else graded(False, holds), rows, scale)


def some(found: Any) -> Any:
    """Return what was found; raise `Missing` where it is nothing."""
    if not found:
        raise Missing
    return found


def values_of(*found: dict[str, Any] | None) -> tuple[list[Any], Rows]:
    """The values of records, of which none may be missing, and the records."""
    used = [some(row) for row in found]
    return [row["value"] for row in used], used


def read(rows: Rows, *impls: str, **wanted: Any) -> tuple[list[Any], Rows]:
    """The values and records stored last of implementations."""
    return values_of(*(last(rows, impl=impl, **wanted) for impl in impls))


class Ratios:
    """One implementation's values over another's, `each`, of the cases that have both."""

    def __init__(self, cases: Mapping[str, Mapping[str, Any]], one: str, other: str):
        pairs = [(of[one], of[other]) for of in cases.values() if {one, other} <= of.keys()]
        self.each = [a["value"] / b["value"] for a, b in some(pairs)]
        self.rows = [row for pair in pairs for row in pair]
        self.least, self.most = min(self.each), max(self.each)
        self.median, self.count = statistics.median(self.each), len(pairs)

    def __str__(self) -> str:
        return f"x {self.least:.2f} to {self.most:.2f}"


@dataclass(frozen=True)
class Claim:
    where: str  # in the paper
    says: str  # what it says
    how: Measure | str  # to measure it, or why that can't be
    # what counts as the same, with its unit, stated before anything is measured: a measure with a
    # `margin` says it itself; empty: the page says it
    same: str = ""

    @property
    def margin(self) -> str:
        return self.same or str(getattr(self.how, "margin", ""))

    def finding(self, rows: Rows) -> Finding:
        if isinstance(self.how, str):
            return Finding(self.how, NOT_TRIED, [])
        try:
            return self.how(rows).with_seeds()
        except Missing:
            return Finding("", NOT_MEASURED, [])


HEAD = ("the paper says", "we measured", "our run", "the same means", "verdict")


def table(rows: Rows, claims: Sequence[Claim]) -> tuple[list[list[str]], Rows]:
    """A line for each claim, under the method and HEAD, and the records that they rest on."""
    found = [(claim, claim.finding(rows)) for claim in claims]
    body = [
        [claim.where, claim.says, one.measured, one.scale, claim.margin, one.verdict]
        for claim, one in found
    ]
    return body, [row for _, one in found for row in one.rows]


def shown(method: str, body: Sequence[Sequence[str]]) -> str:
    """Markdown of the lines of `table`: a table, and a list of what was not measured."""
    lines = without_empty_columns(
        [method, *HEAD], without_repeats([one for one in body if one[-1] != NOT_TRIED], (1, 3, 4))
    )
    reasons: dict[str, list[str]] = {}
    for where, _, reason, *_, verdict in body:
        if verdict == NOT_TRIED:
            reasons.setdefault(reason, []).append(where)
    missing = [f"- {'; '.join(where)}: {reason}.\n" for reason, where in reasons.items()]
    return markdown(*lines) + ("\nNot measured:\n\n" + "".join(missing) if missing else "")


def counted(rows: Rows, claims: Sequence[Claim]) -> list[int]:
    verdicts = [claim.finding(rows).verdict for claim in claims]
    return [verdicts.count(verdict) for verdict in VERDICTS]
