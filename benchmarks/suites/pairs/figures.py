"""The pictures of docs/ on paired runs, from the curves of `pairs`."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import curves
from benchmarks.claims import some
from benchmarks.claims.findings import MARGIN, count
from benchmarks.records import RESULTS, all_records, newest
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, VERMILION, band, headline, name_lines, plt
from benchmarks.suites.pairs import budgets, muon
from benchmarks.suites.pairs.differences import Differences, differences
from benchmarks.suites.pairs.presets import PRESETS, VARIANTS, case_of, stem_of

LONG = {rule: RESULTS / f"pairs-gpt2-124m-{rule}.npz" for rule in ("adam", "lion")}
LONGEST = RESULTS / "pairs-gpt2-124m-long-adam.npz"
MIDDLE = {rule: RESULTS / f"pairs-gpt-42m-{rule}.npz" for rule in ("adam", "lion")}
SHORT = RESULTS / "pairs-gpt2-124m-200-adam.npz"
SMALL = RESULTS / "pairs-smoke-gpt2-400-adam.npz"
LLAMA = RESULTS / "pairs-llama-58m-adam.npz"
PAIRS = {"adam": ("adamw", "flash_adamw", BLUE), "lion": ("lion", "flash_lion", ORANGE)}
FROM = 100  # steps: before, losses fall too steeply to be compared
Line = tuple[str, str, str]  # baseline, label, color
CONTROL: dict[str, Line] = {
    "adamw-nudged": ("adamw", "AdamW, rates + 0.1 %", GREY),
    "flash_adamw": ("adamw", "flash_adamw", BLUE),
}
FORTY: dict[str, dict[str, Line]] = {
    "adam": {"flash_adamw": ("adamw", "flash_adamw", BLUE),
             "coat_adamw": ("adamw", "coat_adamw", GREEN)},
    "lion": {"flash_lion": ("lion", "flash_lion", ORANGE)},
}  # fmt: skip
# weights stored alike in both
COAT: dict[str, Line] = {
    "coat_adamw-f32": ("adamw", "FP8 states, f32 weights", GREEN),
    "coat_adamw": ("split", "FP8 states, split weights", BLUE),
    "adamw+fp8": ("adamw", "FP8 activations, f32 weights", ORANGE),
    "coat_adamw-f32+fp8": ("adamw", "both, f32 weights", VERMILION),
}


def over(axes: Any, path: Path, lines: Mapping[str, Line]) -> dict[str, Differences]:
    """Draw the mean losses of variants over those of their baselines, with intervals."""
    stored, found = curves.load(path), {}
    for name, (base, label, color) in lines.items():
        own = found[name] = differences(stored, base, name)
        axes.plot(own.steps, own.mean, color=color, label=label)
        if own.interval:
            band(axes, own.steps, *own.interval, color)
    axes.axhspan(-MARGIN.size, MARGIN.size, color=GREY, alpha=0.25, lw=0)
    axes.axhline(0, color=GREY, lw=1)
    name_lines(axes)
    return found


def one_seed(paths: Mapping[str, Path]) -> tuple[Any, str]:
    """Draw held-out losses of one seed and their differences; return what the ends say."""
    figure, (losses, more) = plt.subplots(1, 2, figsize=(8.4, 3))
    ends = {}
    for rule, path in paths.items():
        base, ours, color = PAIRS[rule]
        stored = curves.load(path)
        plain, own = (stored.runs[f"{name} seed 0"] for name in (base, ours))
        steps = plain["val_step"]
        kept = steps >= FROM
        losses.plot(steps[kept], plain["val_loss"][kept], color=GREY, label=base)
        losses.plot(steps[kept], own["val_loss"][kept], color=color, label=ours, ls="--")
        apart = differences(stored, base, ours)
        late = apart.steps >= FROM
        more.plot(apart.steps[late], apart.mean[late], color=color, label=f"{ours} over {base}")
        ends[base, ours] = apart.mean[-1]
    band(more, steps[kept], -MARGIN.size, MARGIN.size, GREY)
    more.axhline(0, color=GREY, lw=1)
    losses.set(xlabel="step", title="held-out loss, nats per token")
    more.set(xlabel="step", title=f"difference, %; shaded: ± {MARGIN.size:g} %")
    for axes in (losses, more):
        name_lines(axes)
    assert np.isfinite(list(ends.values())).all()
    return figure, ", ".join(
        f"{ours} {abs(end):.1f} % {'above' if end > 0 else 'below'} {base}"
        for (base, ours), end in ends.items()
    )


def gpt2() -> Any:
    figure, ends = one_seed(LONG)
    headline(figure, f"GPT-2 124M, one seed: {ends}")
    return figure


def half_a_billion() -> Any:
    figure, ends = one_seed({"adam": LONGEST})
    about = curves.load(LONGEST).about
    tokens = about["steps"] * about["batch"] * about["context"]
    headline(figure, f"GPT-2 124M, {tokens / 1e6:.0f}M tokens, one seed: {ends}")
    return figure


def control() -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3))
    runs = {"GPT-2 124M": SHORT, "0.1M weights": SMALL}
    for axes, (name, path) in zip(panels, runs.items(), strict=True):
        own = over(axes, path, CONTROL)
        seeds = count(len(own["flash_adamw"].each))
        axes.set(xlabel="step", title=f"{name}, {seeds}: % over AdamW")
        (low, high), (of_low, of_high) = (
            some(own[name].interval) for name in ("flash_adamw", "adamw-nudged")
        )
        assert low[-1] < of_high[-1] and of_low[-1] < high[-1]  # the intervals meet
    headline(figure, "At both sizes flash_adamw ends as far from AdamW as AdamW with a rate "
             "0.1 % higher")  # fmt: skip
    return figure


def middle() -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3), sharey=True)
    ends = []
    for axes, (rule, lines) in zip(panels, FORTY.items(), strict=True):
        found = over(axes, MIDDLE[rule], lines)
        one = next(iter(found.values()))
        name = {"adam": "AdamW", "lion": "Lion"}[rule]
        axes.set(xlabel="step", title=f"% over optax's {name}, {count(len(one.each))}")
        ends += [own.interval[1][-1] for own in found.values() if own.interval]
    assert len(ends) == 3  # a band each
    assert max(ends) <= MARGIN.size
    headline(figure, "A GPT of 42 million weights trains with 8-bit states and split weights to at "
             f"most {MARGIN.size:g} % over the loss of f32")  # fmt: skip
    return figure


def coat() -> Any:
    figure, axes = plt.subplots(figsize=(8.4, 3.2))
    found = over(axes, LLAMA, COAT)
    seeds = count(len(found["coat_adamw"].each))
    axes.set(xlabel="step", title=f"% over the baseline with weights stored alike, {seeds}")
    most = max(abs(own.mean[-1]) for own in found.values())
    headline(figure, "A Llama of 58 million weights: FP8 states and activations end within "
             f"{most:.2f} % of AdamW, whose weights are stored alike")  # fmt: skip
    return figure


def bytes_and_losses() -> Any:
    """A row for each state, of the most bytes first: its difference with interval, and bytes."""
    rows = all_records()
    found, plain = budgets.choices(rows), budgets.size_of(rows, budgets.BASE)
    assert found and plain
    shown = [one for one in found if math.isfinite(one.pair.interval.mean)]  # others diverged
    figure, axes = plt.subplots(figsize=(8.4, 4.4))
    names, sizes = [plain["says"]], [plain["value"]]
    axes.plot([0], [0], "s", color=GREY)
    for margin, alpha in ((budgets.FOUR_BITS, 0.15), (MARGIN, 0.2)):
        axes.axvspan(-margin.size, margin.size, color=GREY, alpha=alpha, lw=0)
    for row, one in enumerate(shown, 1):
        mean, low, high = dataclasses.astuple(one.pair.interval)
        color = ORANGE if one.four_bits else BLUE
        axes.plot([mean], [row], "o", color=color, mfc=color if one.reached else "white")
        if math.isfinite(low):
            axes.plot([low, high], [row, row], color=color, zorder=1)
        names.append(one.size["says"])
        sizes.append(one.size["value"])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(sizes)), [f"{size:.2f}" for size in sizes])
    beside.set_ylabel("bytes per parameter: weights and state")
    for side in (axes, beside):
        side.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(
        "held-out loss over AdamW's, %, with intervals of 90 %\n"
        f"blue: 8-bit moments, filled if at most {MARGIN.size:g}; "
        f"orange: 4-bit moments, filled if at most {budgets.FOUR_BITS.size:g}"
    )
    headline(figure, budgets.message(found))
    return figure


def steps_of_muon() -> Any:
    """AdamW's and Muon's mean held-out losses along their runs, and Muon's ends by steps."""
    own, steps = muon.race(newest(all_records()), muon.PRESET), PRESETS[muon.PRESET].steps
    figure, axes = plt.subplots(figsize=(8.4, 3.2))
    lines = ((muon.BASE, "AdamW", GREY), (muon.OURS, muon.OURS, BLUE))
    stored = {}
    for (name, *_), rate in zip(lines, own.rates, strict=True):
        case = case_of(muon.PRESET, VARIANTS[name].rule, lr=rate)
        stored[name] = curves.load(RESULTS / f"{stem_of(case)}.npz").runs
    ends = {muon.BASE: own.plain,
            muon.OURS: {seed: of[steps] for seed, of in own.ours.items()}}  # fmt: skip
    seeds = [seed for seed in own.plain
             if all(f"{name} seed {seed}" in runs for name, runs in stored.items())]  # fmt: skip
    for name, label, color in lines:
        drawn = [stored[name][f"{name} seed {seed}"] for seed in seeds]
        for seed, run in zip(seeds, drawn, strict=True):  # the runs of the table
            assert math.isclose(run["val_loss"][-1], ends[name][seed], rel_tol=1e-6)
        mean = np.mean([run["val_loss"] for run in drawn], axis=0)
        axes.plot(drawn[0]["val_step"][1:], mean[1:], color=color, label=label)
    axes.plot(list(own.ends), list(own.ends.values()), "o:", color=BLUE, lw=1)
    first, *_, before, last = own.ends
    axes.annotate(f"ends of runs of {first} to {last} steps", (before, own.ends[before]), (-6, -16),
                  ha="right", textcoords="offset points", color=BLUE, fontsize=8)  # fmt: skip
    final = statistics.mean(own.plain.values())
    axes.plot([muon.steps_to(final, own.ends), steps], [final, final], color=GREY, ls=":", lw=1)
    axes.set(xlabel="step", title=f"held-out loss, nats per token; lines: mean of {len(seeds)} "
             f"seeds; points: of {len(own.plain)}")  # fmt: skip
    name_lines(axes)
    share, time = (statistics.mean(shares) for shares in (own.steps, own.seconds))
    assert share < 1 and time < 1
    headline(figure, f"A GPT of 42 million weights: flash_muon reaches AdamW's final loss in "
             f"{100 * share:.0f} % of its steps and {100 * time:.0f} % of its time")  # fmt: skip
    return figure


FIGURES = {
    "muon_steps": steps_of_muon,
    "gpt2_pairs": gpt2,
    "gpt2_long": half_a_billion,
    "gpt2_control": control,
    "gpt_42m_pairs": middle,
    "bytes_and_losses": bytes_and_losses,
    "coat_fair": coat,
}
