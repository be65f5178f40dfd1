"""Muon trained in pairs: its forms compared, and its steps to AdamW's final loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import numpy as np

from benchmarks.claims import Missing, some
from benchmarks.claims.findings import beside
from benchmarks.records import Rows, alike, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.pairs.presets import MUON, PRESETS, VARIANTS, case_of

PRESET, LARGER = "gpt-42m-muon", "gpt2-124m-muon"
BASE, OURS, PLAIN = "adamw", "flash_muon", "muon"
SAYS = {PRESET: "GPT, 42M weights", LARGER: "GPT-2 124M"}
FORMS = (*(name for name in VARIANTS if name.startswith(f"{OURS}-")), PLAIN)


def runs(rows: Rows, preset: str, impl: str, metric: str = "val_loss") -> Rows:
    """Return the records of an optimizer's runs of a preset, of any length and rate, on one GPU."""
    found = select(rows, bench="pairs", impl=impl, metric=metric)
    return alike([row for row in found if row["flags"]["preset"] == preset])


def rate_of(row: dict[str, Any]) -> float:
    """Return the peak rate of a run, which has one rule's alone."""
    (rate,) = row["flags"]["rates"].values()
    return float(rate)


def steps_of(row: dict[str, Any]) -> int:
    return int(row["flags"]["steps"])


def whole(rows: Rows, preset: str, impl: str, metric: str = "val_loss") -> Rows:
    """Return the runs of the preset's length."""
    last = PRESETS[preset].steps
    return [row for row in runs(rows, preset, impl, metric) if steps_of(row) == last]


def chosen_rate(rows: Rows, preset: str, impl: str) -> float:
    """Return the rate with the most seeds; of several, that with the lowest loss of one."""
    found: dict[float, list[float]] = {}
    for row in some(whole(rows, preset, impl)):
        found.setdefault(rate_of(row), []).append(row["value"])
    return max(found, key=lambda rate: (len(found[rate]), -min(found[rate])))


def step_ms(rows: Rows, preset: str, impl: str, rate: float) -> float:
    """Return the median time of a step."""
    found = whole(rows, preset, impl, "tokens_per_s")
    times = [1e3 * r["flags"]["tokens"] / r["value"] for r in found if rate_of(r) == rate]
    return statistics.median(some(times))


def steps_to(loss: float, ends: dict[int, float]) -> float:
    """Return the steps after which runs have a loss, from final losses by length of the run.

    Between two lengths the loss is linear in the logarithm of the length.
    """
    lengths = sorted(ends)
    losses = [ends[length] for length in lengths]
    if not losses[0] >= loss >= losses[-1] or any(a < b for a, b in itertools.pairwise(losses)):
        raise Missing
    # `interp` takes rising values
    return math.exp(np.interp(loss, losses[::-1], [math.log(n) for n in reversed(lengths)]))


@dataclasses.dataclass(frozen=True)
class Race:
    """AdamW's runs and those of Muon of several lengths, of the same seeds."""

    rates: tuple[float, float]  # AdamW's and Muon's
    ms: tuple[float, float]  # of a step
    plain: dict[int, float]  # AdamW's final loss by seed
    ours: dict[int, dict[int, float]]  # Muon's by seed and length of the run
    steps: list[float]  # of Muon to AdamW's final loss, over AdamW's, of each seed
    rows: Rows

    @property
    def seconds(self) -> list[float]:
        """Return Muon's time to AdamW's final loss over AdamW's, of each seed."""
        return [share * self.ms[1] / self.ms[0] for share in self.steps]

    @property
    def ends(self) -> dict[int, float]:
        """Return Muon's mean final loss by length of the run."""
        lengths = set.intersection(*(set(own) for own in self.ours.values()))
        seeds = self.ours.values()
        return {n: statistics.mean(own[n] for own in seeds) for n in sorted(lengths)}


def race(rows: Rows, preset: str) -> Race:
    rates = chosen_rate(rows, preset, BASE), chosen_rate(rows, preset, OURS)
    first = [row for row in whole(rows, preset, BASE) if rate_of(row) == rates[0]]
    second = [row for row in runs(rows, preset, OURS) if rate_of(row) == rates[1]]
    plain = {row["seed"]: row["value"] for row in first}
    ours: dict[int, dict[int, float]] = {}
    for row in second:
        if row["seed"] in plain:
            ours.setdefault(row["seed"], {})[steps_of(row)] = row["value"]
    shares = [steps_to(plain[seed], own) / PRESETS[preset].steps for seed, own in ours.items()]
    ms = step_ms(rows, preset, BASE, rates[0]), step_ms(rows, preset, OURS, rates[1])
    ends = {seed: plain[seed] for seed in some(list(ours))}
    return Race(rates, ms, ends, ours, shares, [*first, *second])


def forms(rows: Rows) -> Table:
    """The losses of other forms of Muon over those of `flash_muon`, of the same seeds and steps."""
    head = ["", "seeds", "held-out loss", "over `flash_muon`", "ms per step"]
    try:
        rate = chosen_rate(rows, PRESET, OURS)
    except Missing:
        return head, [], []
    body, used = [], []
    for name in FORMS:
        try:
            pair = beside(rows, case_of(PRESET, MUON, lr=rate), OURS, name)
        except Missing:
            continue
        form = VARIANTS[name].says.partition(", ")[2]
        says = f"`optax.contrib.muon`, {form}" if name == PLAIN else form
        body.append([says, str(len(pair.ours)), pair.means, str(pair.interval),
                     f"{step_ms(rows, PRESET, name, rate):.2f}"])  # fmt: skip
        used += pair.rows
    return head, body, used


def by_rate(rows: Rows) -> Table:
    """The final losses of the first seed at each rate."""
    body, used = [], []
    for preset, impl in itertools.product(SAYS, (BASE, OURS)):
        found = sorted((r for r in whole(rows, preset, impl) if r["seed"] == 0), key=rate_of)
        if found:
            losses = ", ".join(f"{rate_of(row):g}: {row['value']:.3f}" for row in found)
            body.append([SAYS[preset], f"`{impl}`", losses])
            used += found
    return ["", "", "peak rate: held-out loss of seed 0"], body, used


def percent(shares: list[float]) -> str:
    low, mean, high = (100 * of(shares) for of in (min, statistics.mean, max))
    return f"{mean:.0f} % ({low:.0f} to {high:.0f})"


def to_a_loss(rows: Rows) -> Table:
    """Muon's steps and seconds to AdamW's final loss, of the presets whose runs reach it."""
    body, used = [], []
    for preset, says in SAYS.items():
        try:
            own = race(rows, preset)
        except Missing:
            continue
        body.append([
            says, f"{PRESETS[preset].steps:,}", str(len(own.plain)),
            f"{statistics.mean(own.plain.values()):.3f}", "{:g}, {:g}".format(*own.rates),
            "{:.2f}, {:.2f}".format(*own.ms), percent(own.steps), percent(own.seconds),
        ])  # fmt: skip
        used += own.rows
    head = ["", "AdamW's steps", "seeds", "AdamW's final loss", "rates", "ms per step",
            "steps of `flash_muon` to that loss", "its time"]  # fmt: skip
    return head, body, used


RATES = "1e-3 2e-3 4e-3 8e-3 16e-3"
TABLES = {
    "muon_rates": Rendered(by_rate, f"pairs --preset {PRESET} --variants {OURS} --lr {RATES}"),
    "muon_steps": Rendered(
        to_a_loss, f"pairs --preset {PRESET} --variants {OURS} --steps 700 1000 1500 3000 --seeds 5"
    ),
    "muon_forms": Rendered(
        forms, f"pairs --preset {PRESET} --variants {' '.join((OURS, *FORMS))} --seeds 5"
    ),
}
