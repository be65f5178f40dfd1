"""Muon trained in pairs: its iterations compared, and its steps to AdamW's final loss."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np

from benchmarks import curves
from benchmarks.claims import Missing, some
from benchmarks.claims.findings import beside
from benchmarks.records import RESULTS, Rows, all_records, newest, select
from benchmarks.render import Rendered, Table
from benchmarks.style import BLUE, GREY, headline, name_lines, plt
from benchmarks.suites.pairs.presets import ADAM, BASES, MUON, PRESETS, VARIANTS

PRESET, LARGER = "gpt-42m-muon", "gpt2-124m-muon"
OURS = "flash_muon"
SAYS = {PRESET: "GPT, 42M weights", LARGER: "GPT-2 124M"}
ITERATIONS = (OURS, *(name for name in VARIANTS if name.startswith(f"{OURS}-")))


def runs(rows: Rows, preset: str, rule: str, impl: str) -> Rows:
    """Return the final losses of a preset's runs of any length and rate."""
    found = select(newest(rows, bench="pairs"), impl=impl, metric="val_loss")
    return [
        row for row in found if row["flags"]["preset"] == preset and rule in row["flags"]["rates"]
    ]


def steps_of(row: dict[str, Any]) -> int:
    return int(row["flags"]["steps"])


def rates(rows: Rows, preset: str, rule: str, impl: str) -> dict[float, dict[str, Any]]:
    """Return the whole run of the first seed by its rate, the lowest first."""
    found = {
        row["flags"]["rates"][rule]: row
        for row in runs(rows, preset, rule, impl)
        if row["seed"] == 0 and steps_of(row) == PRESETS[preset].steps
    }
    return dict(sorted(found.items()))


def best(rows: Rows, preset: str, rule: str, impl: str) -> float:
    """Return the rate of the lowest final loss of the first seed."""
    found = rates(rows, preset, rule, impl)
    some(list(found))
    return min(found, key=lambda rate: found[rate]["value"])


@dataclasses.dataclass(frozen=True)
class Race:
    """AdamW's runs at its best rate, and Muon's at its own, of several lengths.

    `steps` and `seconds` are Muon's until AdamW's final loss, as shares of AdamW's, by seed: final
    losses of whole schedules are interpolated between lengths, linearly in their logarithm.
    """

    rates: tuple[float, float]  # AdamW's and Muon's
    losses: dict[int, list[float]]  # Muon's final losses by steps
    plain: list[float]  # AdamW's final losses
    ms: tuple[float, float]  # of a step
    steps: list[float]
    rows: Rows

    @property
    def seconds(self) -> list[float]:
        return [share * self.ms[1] / self.ms[0] for share in self.steps]


def milliseconds(rows: Rows, of: Rows) -> float:
    """Return the median time of a step of runs, in ms."""
    found = select(newest(rows, bench="pairs"), metric="tokens_per_s")
    kept = {(row["case"], row["impl"], row["seed"]) for row in of}
    times = [
        1e3 * row["flags"]["tokens"] / row["value"]
        for row in found
        if (row["case"], row["impl"], row["seed"]) in kept
    ]
    return statistics.median(some(times))


def race(rows: Rows, preset: str) -> Race:
    last = PRESETS[preset].steps
    chosen = best(rows, preset, ADAM, BASES[ADAM]), best(rows, preset, MUON, OURS)

    def at(rule: str, impl: str, rate: float) -> Rows:
        found = runs(rows, preset, rule, impl)
        return [row for row in found if row["flags"]["rates"][rule] == rate]

    plain = at(ADAM, BASES[ADAM], chosen[0])
    ours = at(MUON, OURS, chosen[1])
    ends = {row["seed"]: row["value"] for row in plain if steps_of(row) == last}
    losses: dict[int, dict[int, float]] = {}
    for row in ours:
        losses.setdefault(steps_of(row), {})[row["seed"]] = row["value"]
    lengths = sorted(losses)
    seeds = sorted(set(ends).intersection(*losses.values()))
    shares = []
    for seed in seeds:
        own = [losses[length][seed] for length in lengths]
        if not own[0] >= ends[seed] >= own[-1]:
            raise Missing
        # losses fall with the steps; `interp` takes rising ones
        taken = np.interp(ends[seed], own[::-1], np.log(lengths)[::-1])
        shares.append(float(np.exp(taken)) / last)
    return Race(
        chosen,
        {length: [losses[length][seed] for seed in seeds] for length in lengths},
        [ends[seed] for seed in seeds],
        (milliseconds(rows, plain), milliseconds(rows, ours)),
        some(shares),
        [*plain, *ours],
    )


def iterations(rows: Rows) -> Table:
    """The losses of each form of `flash_muon` over those of its default, at equal steps."""
    head = ["`flash_muon`", "seeds", "held-out loss", "over the first row", "ms a step"]
    body, used = [], []
    try:
        case = f"{PRESET} lr={best(rows, PRESET, MUON, OURS):g}/{MUON}"
    except Missing:
        return head, body, used
    for name in ITERATIONS:
        own = select(newest(rows, bench="pairs"), case=case, metric="val_loss", impl=name)
        if not own:
            continue
        mean = statistics.mean(row["value"] for row in own)
        over = "" if name == OURS else str(beside(rows, case, OURS, name).interval)
        says = VARIANTS[name].says.removeprefix("flash_muon").lstrip(", ") or "default"
        body.append([says, str(len(own)), f"{mean:.4f}", over, f"{milliseconds(rows, own):.2f}"])
        used += own
    return head, body, used


def by_rate(rows: Rows) -> Table:
    """The final losses of the first seed at each rate."""
    body, used = [], []
    for preset, says in SAYS.items():
        for rule, impl in ((ADAM, BASES[ADAM]), (MUON, OURS)):
            found = rates(rows, preset, rule, impl)
            losses = ", ".join(f"{rate:g}: {row['value']:.3f}" for rate, row in found.items())
            if found:
                body.append([says, f"`{impl}`", losses])
                used += found.values()
    return ["", "", "peak rate: held-out loss, one seed"], body, used


def percent(shares: list[float]) -> str:
    low, mean, high = (100 * of(shares) for of in (min, statistics.mean, max))
    return f"{mean:.0f} % ({low:.0f} to {high:.0f})"


def to_a_loss(rows: Rows) -> Table:
    body, used = [], []
    for preset, says in SAYS.items():
        try:
            own = race(rows, preset)
        except Missing:
            continue
        (plain, ours), (of_plain, of_ours) = own.rates, own.ms
        body.append([
            says, f"{PRESETS[preset].steps:,}", str(len(own.plain)),
            f"{statistics.mean(own.plain):.3f}", f"{plain:g}, {ours:g}",
            f"{of_plain:.2f}, {of_ours:.2f}", percent(own.steps), percent(own.seconds),
        ])  # fmt: skip
        used += own.rows
    head = ["", "AdamW's steps", "seeds", "AdamW's final loss", "best rates", "ms a step",
            "steps of `flash_muon` to that loss", "its seconds"]  # fmt: skip
    return head, body, used


TABLES = {
    "muon_iterations": Rendered(iterations, f"pairs --preset {PRESET}"),
    "muon_rates": Rendered(by_rate, f"pairs --preset {PRESET}"),
    "muon_steps": Rendered(to_a_loss, f"pairs --preset {PRESET}"),
}


def draw() -> Any:
    """AdamW's mean held-out loss along its run and Muon's, and Muon's final losses by steps."""
    own, steps = race(all_records(), PRESET), PRESETS[PRESET].steps
    figure, axes = plt.subplots(figsize=(8.4, 3.2))
    lines = ((ADAM, BASES[ADAM], "AdamW", GREY), (MUON, OURS, OURS, BLUE))
    stored = [
        curves.load(RESULTS / f"pairs-{PRESET}-lr={rate:g}-{rule}.npz").runs
        for rate, (rule, *_) in zip(own.rates, lines, strict=True)
    ]
    seeds = set.intersection(*({name.partition(" seed ")[2] for name in one} for one in stored))
    for of, (_, impl, label, color) in zip(stored, lines, strict=True):
        drawn = [of[f"{impl} seed {seed}"] for seed in sorted(seeds)]
        mean = np.mean([run["val_loss"] for run in drawn], axis=0)
        axes.plot(drawn[0]["val_step"][1:], mean[1:], color=color, label=label)
    ends = {length: statistics.mean(values) for length, values in own.losses.items()}
    axes.plot(list(ends), list(ends.values()), "o", color=BLUE)
    axes.annotate("ends of runs of fewer steps", next(iter(ends.items())), (0, -14), ha="center",
                  textcoords="offset points", color=BLUE, fontsize=8)  # fmt: skip
    final, share = statistics.mean(own.plain), statistics.mean(own.steps)
    axes.plot([share * steps, steps], [final, final], color=GREY, ls=":", lw=1)
    axes.set(xlabel="step", title=f"held-out loss, nats per token; mean of {len(seeds)} seeds "
             f"(points: {len(own.plain)})")  # fmt: skip
    name_lines(axes)
    seconds = statistics.mean(own.seconds)
    headline(figure, f"A GPT of 42 million weights: flash_muon reaches AdamW's final loss in "
             f"{100 * share:.0f} % of its steps and {100 * seconds:.0f} % of its time")  # fmt: skip
    return figure


FIGURES = {"muon_steps": draw}
