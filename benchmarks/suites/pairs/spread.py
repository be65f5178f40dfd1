"""Spread of paired runs, at their end and early, and what so many of them can decide."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import curves
from benchmarks.claims import Missing
from benchmarks.claims.equivalence import Interval, pairs_needed
from benchmarks.claims.findings import Pair, beside
from benchmarks.records import RESULTS, Rows, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.pairs.budgets import BASE, CASE, FOUR_BITS, PRESET, RULE
from benchmarks.suites.pairs.differences import early
from benchmarks.suites.pairs.presets import LION, PRESETS, VARIANTS

CURVES = RESULTS / f"pairs-{PRESET}-{RULE}.npz"

NEAR = ("flash_adamw", "coat_adamw")  # they differ from AdamW by roundings of 8 bits
# by more: two controls, 4-bit states of the package, and those on trial
APART = (
    "adamw-lower", "adamw-higher", "flash_adamw-four-bit", "flash_adamw-four-bit-nearest",
    "flash_adamw-four-bit-sqrt", "flash_adamw-four-bit-sqrt-nu", "flash_factored_adamw",
    "flash_factored_adamw-four-bit", "flash_factored_adamw-four-bit-stochastic-32",
    "adamw-factored", "adamw-factored-four-bit", "adamw-factored-four-bit-nearest", "adamw-ratio",
    "adamw-ratio-four-bit", "adamw-ratio-four-bit-nearest", "adamw-shrunk-four-bit-nearest",
)  # fmt: skip
POWERS = (0.8, 0.9)
# first and last points of the training loss: with the warm-up of 150 steps, and after it, before
# runs have come apart
WINDOWS = ((100, 200), (300, 900))
DIVERGED = 100.0  # percent over AdamW's loss


@dataclasses.dataclass(frozen=True)
class Spread:
    """Standard deviation of the difference of one pair, in percent, of so many degrees of freedom.

    Attributes:
      deviation: it.
      freedom: the pairs less the means that were taken from them.
    """

    deviation: float
    freedom: int

    @staticmethod
    def of(differences: Sequence[float]) -> Spread:
        return Spread(statistics.stdev(differences), len(differences) - 1)

    @staticmethod
    def pooled(spreads: Sequence[Spread]) -> Spread:
        """Return the root of the mean variance, weighted by degrees of freedom."""
        freedom = sum(one.freedom for one in spreads)
        total = sum(one.freedom * one.deviation**2 for one in spreads)
        return Spread(math.sqrt(total / freedom), freedom)

    @property
    def cells(self) -> list[str]:
        """The deviation, and how many pairs the margin of 4 bits needs."""
        counts = [str(pairs_needed(self.deviation, FOUR_BITS, power)) for power in POWERS]
        return [f"{self.deviation:.2f} %", " / ".join(counts)]


def across_devices(rows: Rows, case: str, name: str) -> Pair:
    """Pair the losses of one variant on the two devices that have run most of its seeds."""
    found: dict[str, dict[int, Any]] = {}
    for row in select(rows, bench="pairs", case=case, metric="val_loss", impl=name):
        found.setdefault(row["device"], {})[row["seed"]] = row
    if len(found) < 2:
        raise Missing
    second, first = sorted(found.values(), key=len)[-2:]
    seeds = sorted(first.keys() & second.keys())
    used = [one[seed] for one in (first, second) for seed in seeds]
    values = [row["value"] for row in used]
    return Pair(values[: len(seeds)], values[len(seeds) :], used)


def of_two_seeds(rows: Rows) -> Spread:
    """Return the spread of runs that share neither start nor batches: sqrt(2) of AdamW's own."""
    own = select(rows, bench="pairs", case=CASE, metric="val_loss", impl=BASE)
    by_seed = {row["seed"]: row["value"] for row in own}
    mean = statistics.mean(by_seed.values())
    one = Spread.of([100 * value / mean for value in by_seed.values()])
    return Spread(math.sqrt(2) * one.deviation, one.freedom)


def pairs(rows: Rows) -> dict[str, Pair]:
    """Return the pairs of all that has records of two seeds at least, by name."""
    found = {}
    try:
        found[LION] = across_devices(rows, f"{PRESET}/{LION}", LION)
    except Missing:
        pass
    for name in (*NEAR, *APART):
        try:
            pair = beside(rows, CASE, BASE, name)
        except Missing:
            continue
        if len(pair.plain) > 1:
            found[name] = pair
    return found


def losses(rows: Rows) -> Table:
    """Held-out losses over AdamW's with verdicts, and how many pairs the margin needs."""
    found, body = pairs(rows), []
    spreads = {name: Spread.of(pair.differences) for name, pair in found.items()}
    for name, pair in found.items():
        says = VARIANTS[name].says + (", over itself on another GPU" if name == LION else "")
        body.append([says, str(len(pair.plain)), str(pair.interval), pair.verdict(FOUR_BITS),
                     *spreads[name].cells])  # fmt: skip
    apart = [spread for name, spread in spreads.items() if name in APART]
    if apart:
        says = f"the {len(apart)} that differ by more than 8-bit roundings, pooled"
        body.append([says, "", "", "", *Spread.pooled(apart).cells])
        says = f"{VARIANTS[BASE].says}, from two seeds"
        body.append([says, "", "", "", *of_two_seeds(rows).cells])
    powers = " / ".join(f"{100 * power:.0f} %" for power in POWERS)
    head = ["trained", "pairs", "held-out loss over AdamW's", f"within {FOUR_BITS}",
            "standard deviation of a pair", f"pairs needed, power {powers}"]  # fmt: skip
    return head, body, [row for pair in found.values() for row in pair.rows]


def losses_early(rows: Rows) -> Table:
    """Training losses over AdamW's in the first steps, of every variant with curves."""
    stored, body, used = curves.load(CURVES), [], []
    names = {label.rpartition(" seed ")[0] for label in stored.runs} - {BASE}
    for name in (one for one in VARIANTS if one in names):
        found = [list(map(float, early(stored, BASE, name, window))) for window in WINDOWS]
        intervals = map(Interval.of, found)
        cells = ["diverged" if one.mean > DIVERGED else str(one) for one in intervals]
        spread = "" if "diverged" in cells else f"{Spread.of(found[-1]).deviation:.2f} %"
        body.append([VARIANTS[name].says, str(len(found[-1])), *cells, spread])
        used += beside(rows, CASE, BASE, name).rows
    every = PRESETS[PRESET].every
    spans = [f"steps {first - every + 1} to {last}" for first, last in WINDOWS]
    return ["trained", "pairs", *spans, "standard deviation of a pair"], body, used


TABLES = {
    "pair_losses": Rendered(losses, f"pairs --preset {PRESET}"),
    "early_losses": Rendered(losses_early, f"pairs --preset {PRESET}"),
}
