"""Claims of papers, with our measurements or why we have none: tables of docs/results/claims.md.

The module of a paper has its claims as data, below the measures that they name.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Rows

SAME, BETTER, NOT = "same", "better", "not the same"
NOT_MEASURED, NOT_TRIED = "not measured yet", "not tried here"


@dataclass(frozen=True)
class Finding:
    """Our measurement of a claim, its verdict, and the records it rests on."""

    measured: str
    verdict: str
    rows: Rows


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


def judged(text: str, holds: bool | str, rows: Rows) -> Finding:
    """A finding, by whether the claim holds, or with another verdict."""
    return Finding(text, holds if isinstance(holds, str) else SAME if holds else NOT, rows)


def some(found: Any) -> Any:
    """Return what was found; raise `Missing` where it is nothing."""
    if not found:
        raise Missing
    return found


def all_of(*found: dict[str, Any] | None) -> Rows:
    """The records, of which none may be missing."""
    return [some(row) for row in found]


@dataclass(frozen=True)
class Claim:
    """A claim: where in the paper, what it says, and how to measure it or why that can't be."""

    where: str
    says: str
    how: Measure | str

    def finding(self, rows: Rows) -> Finding:
        """Return the finding of the claim from the records."""
        if isinstance(self.how, str):
            return Finding(self.how, NOT_TRIED, [])
        try:
            return self.how(rows)
        except Missing:
            return Finding("", NOT_MEASURED, [])


def table(rows: Rows, claims: Sequence[Claim]) -> tuple[list[list[str]], Rows]:
    """The rows of the table, and the records that they rest on."""
    found = [claim.finding(rows) for claim in claims]
    body = [
        [claim.where, claim.says, one.measured, one.verdict]
        for claim, one in zip(claims, found, strict=True)
    ]
    return body, [row for one in found for row in one.rows]
