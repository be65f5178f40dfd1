"""Losses of states of few bytes, from the records of `pairs` and `memory`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from benchmarks.claims import UNDECIDED, Missing
from benchmarks.claims.equivalence import Margin, pairs_needed
from benchmarks.claims.findings import MARGIN, POWER, Pair, Trained, beside, over_parts
from benchmarks.records import Rows, last
from benchmarks.render import Rendered, Table, without_repeats
from benchmarks.suites.pairs.presets import VARIANTS

PRESET, RULE, BASE = "gpt-42m", "adam", "adamw"
CASE = f"{PRESET}/{RULE}"
# what one may choose: no controls, no published forms
CHOICES = (
    "flash_adamw", "stable_adamw", "coat_adamw", "flash_adamw-bf16-rounded", "flash_adamw-bf16-fed",
    "flash_adamw-int8", "flash_adamw-int8-fed", "flash_adamw-e4m3-fed", "flash_adam_mini",
    "q_adam_mini", "flash_factored_adamw", "flash_factored_adamw-four-bit",
    "flash_factored_adamw-four-bit-32", "flash_factored_adamw-four-bit-stochastic",
    "flash_factored_adamw-four-bit-stochastic-32",
    "flash_adamw-four-bit", "flash_adamw-four-bit-sqrt", "flash_adamw-four-bit-nearest",
    "flash_adam_mini-four-bit",
)  # fmt: skip
# what Adam-mini's rule costs, and what our formats cost beside the same rule in f32
MINI = (
    (BASE, "adam_mini"), ("adam_mini", "flash_adam_mini"), ("adam_mini", "q_adam_mini"),
    ("adam_mini", "flash_adam_mini-four-bit"),
)  # fmt: skip
FOUR_BITS = Margin(0.15)  # of the loss
LARGER = f"llama-134m/{RULE}"
LARGER_MARGIN = Margin(0.3)
LONG_RUN = f"gpt2-124m-long/{RULE}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variant with its bytes and its losses beside AdamW's of the same seeds."""

    name: str
    size: dict[str, Any]  # its record: bytes per parameter, of weights and state
    pair: Pair

    @property
    def four_bits(self) -> bool:
        return "four-bit" in self.name

    @property
    def margin(self) -> Margin:
        return FOUR_BITS if self.four_bits else MARGIN

    @property
    def reached(self) -> bool:
        """Return whether the whole interval is at most the margin over AdamW's loss, or below."""
        return self.pair.interval.no_worse(self.margin)


def size_of(rows: Rows, name: str) -> dict[str, Any] | None:
    return last(rows, bench="memory", case=CASE, impl=name, metric="total")


def choices(rows: Rows) -> list[Choice]:
    """Return those that have records of both, of the most bytes first."""
    found = []
    for name in CHOICES:
        size = size_of(rows, name)
        try:
            pair = beside(rows, CASE, BASE, name)
        except Missing:
            continue
        if size:
            found.append(Choice(name, size, pair))
    return sorted(found, key=lambda one: -one.size["value"])


def table(rows: Rows) -> Table:
    found, plain = choices(rows), size_of(rows, BASE)
    body, used = [], []
    if found and plain:
        body.append([plain["says"], f"{plain['value']:.2f}", "", "baseline", "", "", ""])
        used.append(plain)
    for one in found:
        seeds, verdict = len(one.pair.plain), one.pair.verdict(one.margin)
        deviation = statistics.stdev(one.pair.differences) if seeds > 1 else math.nan
        spread = f"{deviation:.2f} %" if seeds > 1 else ""
        needed = verdict == UNDECIDED and seeds > 1
        body.append([one.size["says"], f"{one.size['value']:.2f}", str(seeds),
                     str(one.pair.interval), spread,
                     f"{pairs_needed(deviation, one.margin, POWER):,}" if needed else "",
                     verdict])  # fmt: skip
        used += [one.size, *one.pair.rows]
    head = ["weights and state", "bytes per parameter", "seeds", "held-out loss over AdamW's",
            "deviation of a pair", "seeds needed", ""]  # fmt: skip
    return head, body, used


def message(found: list[Choice]) -> str:
    """Say how many optimizers with moments of 8 and of 4 bits reach AdamW's loss."""
    counts = []
    for bits in (8, 4):
        own = [one.reached for one in found if one.four_bits == (bits == 4)]
        if own:
            counts.append(f"{sum(own) or 'none'} of {len(own)} optimizers with {bits}-bit moments")
    return f"A GPT of 42 million weights: {' and '.join(counts)} reach AdamW's loss"


def larger(rows: Rows) -> Table:
    body, used = [], []
    for name in CHOICES:
        size = size_of(rows, name)
        try:
            found = Trained(LARGER, BASE, name, margin=LARGER_MARGIN, bench="pairs")(rows)
        except Missing:
            continue
        body.append([size["says"] if size else name, found.scale, found.measured, found.verdict])
        used += found.rows
    return ["state", "run", "held-out loss", ""], without_repeats(body, [1]), used


def long_run(rows: Rows) -> Table:
    head = ["run", "held-out loss", "over parts of the held-out text", "tokens/s of each", ""]
    trained = Trained(LONG_RUN, BASE, "flash_adamw", bench="pairs")
    try:
        found = trained(rows)
    except Missing:
        return head, [], []
    parts = str(over_parts(trained.pair(rows)))
    speeds = [last(rows, bench="pairs", case=LONG_RUN, impl=row["impl"], metric="tokens_per_s")
              for row in found.rows]  # fmt: skip
    shown = " → ".join(f"{row['value']:,.0f}" for row in speeds if row)
    body = [[found.scale, found.measured, parts, shown, found.verdict]]
    return head, body, found.rows


def adam_mini(rows: Rows) -> Table:
    body, used = [], []
    for base, name in MINI:
        try:
            pair = beside(rows, CASE, base, name)
        except Missing:
            continue
        margin = FOUR_BITS if "four-bit" in name else MARGIN
        body.append([f"{VARIANTS[name].says}, over {VARIANTS[base].says}", str(len(pair.plain)),
                     str(pair.interval), pair.verdict(margin)])  # fmt: skip
        used += pair.rows
    return ["trained", "seeds", "held-out loss", ""], body, used


TABLES = {
    "adam_mini_losses": Rendered(adam_mini, "pairs --preset gpt-42m"),
    "budget_losses": Rendered(table, "pairs --preset gpt-42m"),
    "budget_losses_larger": Rendered(larger, "pairs --preset llama-134m"),
    "long_run": Rendered(long_run, "pairs --preset gpt2-124m-long"),
}
