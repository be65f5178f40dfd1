"""Spread of paired runs, at their end and early, and what so many of them can decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import curves
from benchmarks.claims import Missing
from benchmarks.claims.equivalence import Interval, pairs_needed
from benchmarks.claims.findings import POWER, Pair, beside
from benchmarks.records import RESULTS, Rows, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.pairs.budgets import BASE, CASE, FOUR_BITS, PRESET, RULE
from benchmarks.suites.pairs.differences import early
from benchmarks.suites.pairs.presets import LION, PRESETS, VARIANTS

CURVES = RESULTS / f"pairs-{PRESET}-{RULE}.npz"

SAYS = {name: of.says for name, of in VARIANTS.items()}
# they differ from AdamW by more than roundings of 8 bits: two controls and 4-bit states
CONTROLS = ("adamw-lower", "adamw-higher")
APART = (
    *CONTROLS, "flash_adamw-four-bit", "flash_adamw-four-bit-nearest",
    "flash_adamw-four-bit-sqrt", "flash_adamw-four-bit-sqrt-nu", "flash_factored_adamw",
    "flash_factored_adamw-four-bit", "flash_factored_adamw-four-bit-stochastic-32",
)  # fmt: skip
BASES = {LION: f"{PRESET}/{LION}", BASE: CASE}
# what differs early by at most 0.01 %, and Adam-mini in four storages, which differ as its first
LEFT_OUT = (
    "flash_adamw", "coat_adamw", "flash_adamw-bf16-rounded", "flash_adam_mini",
    "flash_adam_mini-four-bit", "q_adam_mini",
)  # fmt: skip
# first and last points of the training loss: with the warm-up of 150 steps, and after it, before
# runs have come apart
WINDOWS = ((100, 200), (300, 900))
DIVERGED = 100.0  # percent over AdamW's loss


def cells(deviation: float) -> list[str]:
    """A pair's standard deviation, in percent, and how many pairs the margin of 4 bits needs."""
    return [f"{deviation:.2f} %", str(pairs_needed(deviation, FOUR_BITS, POWER))]


def pooled(pairs: Sequence[Pair]) -> float:
    """Return the root of the mean variance, weighted by degrees of freedom."""
    freedom = [len(pair.plain) - 1 for pair in pairs]
    each = zip(freedom, pairs, strict=True)
    total = sum(n * statistics.stdev(pair.differences) ** 2 for n, pair in each)
    return math.sqrt(total / sum(freedom))


def across_devices(rows: Rows, case: str, name: str) -> Pair:
    """Pair the losses of one variant on the two devices that have run most of its seeds."""
    found: dict[str, dict[int, Any]] = {}
    for row in select(rows, bench="pairs", case=case, metric="val_loss", impl=name):
        found.setdefault(row["device"], {})[row["seed"]] = row
    if len(found) < 2:
        raise Missing
    second, first = sorted(found.values(), key=len)[-2:]
    return Pair.of((first[seed], second[seed]) for seed in sorted(first.keys() & second.keys()))


def of_two_seeds(rows: Rows) -> float:
    """Return the deviation of runs that share neither start nor batches: sqrt(2) of AdamW's own."""
    own = select(rows, bench="pairs", case=CASE, metric="val_loss", impl=BASE)
    values = list({row["seed"]: row["value"] for row in own}.values())
    mean = statistics.mean(values)
    return math.sqrt(2) * statistics.stdev(100 * value / mean for value in values)


def pairs(rows: Rows) -> dict[str, Pair]:
    found = {}
    for name, case in BASES.items():
        try:
            found[name] = across_devices(rows, case, name)
        except Missing:
            pass
    for name in APART:
        try:
            pair = beside(rows, CASE, BASE, name)
        except Missing:
            continue
        if len(pair.plain) > 1:
            found[name] = pair
    return found


def losses(rows: Rows) -> Table:
    found, body = pairs(rows), []
    for name, pair in found.items():
        if name not in BASES and name not in CONTROLS:
            continue  # shown with the bytes
        says = SAYS[name] + (", over itself on another GPU" if name in BASES else "")
        body.append([says, str(len(pair.plain)), str(pair.interval), pair.verdict(FOUR_BITS),
                     *cells(statistics.stdev(pair.differences))])  # fmt: skip
    apart = [pair for name, pair in found.items() if name in APART]
    if apart:
        says = f"the {len(apart)} that differ by more than 8-bit roundings, pooled"
        body.append([says, "", "", "", *cells(pooled(apart))])
        body.append([f"{SAYS[BASE]}, from two seeds", "", "", "", *cells(of_two_seeds(rows))])
    head = ["trained", "pairs", "held-out loss over AdamW's", f"within {FOUR_BITS}",
            "deviation of a pair", "pairs needed"]  # fmt: skip
    return head, body, [row for pair in found.values() for row in pair.rows]


def losses_early(rows: Rows) -> Table:
    stored, body, used = curves.load(CURVES), [], []
    names = {label.rpartition(" seed ")[0] for label in stored.runs} - {BASE}
    for name in (one for one in SAYS if one in names and one not in LEFT_OUT):
        found = [list(map(float, early(stored, BASE, name, window))) for window in WINDOWS]
        intervals = map(Interval.of, found)
        shown = ["diverged" if one.mean > DIVERGED else str(one) for one in intervals]
        body.append([SAYS[name], str(len(found[-1])), *shown])
        used += beside(rows, CASE, BASE, name).rows
    every = PRESETS[PRESET].every
    spans = [f"steps {first - every + 1} to {last}" for first, last in WINDOWS]
    return ["trained", "pairs", *spans], body, used


TABLES = {
    "pair_losses": Rendered(losses, f"pairs --preset {PRESET}"),
    "early_losses": Rendered(losses_early, f"pairs --preset {PRESET}"),
}
