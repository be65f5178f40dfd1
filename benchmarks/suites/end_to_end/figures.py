"""The picture of whole training steps beside torch's."""

from typing import Any

from benchmarks.records import Rows, all_records, newest
from benchmarks.render import GIB
from benchmarks.style import BLUE, GREY, headline, plt
from benchmarks.suites.end_to_end.tables import ACCUMULATED, MODELS, PROGRAMS, peak, steps

# of another batch; and within 2 % of the same without an FP8 head, where names would overlap
HIDDEN = {*ACCUMULATED, "fp8-unrolled-head", "fp8-unrolled-head-gradients"}


def draw(rows: Rows) -> Any:
    """Draw tokens per second against the peak of memory; one panel for each model."""
    found = steps(rows)
    if not found:
        raise SystemExit("no records of whole steps: run `benchmarks.run end_to_end` first")
    figure, panels = plt.subplots(len(found), 1, figsize=(7.2, 1 + 2.3 * len(found)), squeeze=False)
    for axes, (case, own) in zip(panels.flat, found.items(), strict=True):
        for name, of in own.items():
            if name in HIDDEN:
                continue
            ours = PROGRAMS[name].startswith("ours")
            at = peak(of)["value"] / GIB, of["tokens_per_s"]["value"] / 1e3
            color = BLUE if ours else GREY
            axes.plot(*at, "o" if ours else "s", color=color, markersize=7)
            label = PROGRAMS[name].replace("`", "").removeprefix("ours, ")
            label = label.replace(", flashoptim", "").replace("the same model with ", "")
            # clear of its neighbour's marker
            below = (7, -3 if "Liger" not in label else 5 if "checkpointing" in label else -11)
            where = {"xytext": below, "textcoords": "offset points"}
            axes.annotate(label, at, **where, size=8, color=color)
        axes.set_title(f"{', '.join(MODELS[case])} tokens")
        axes.margins(y=0.15)
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.35 * (right - left))  # for what is written there
        axes.set_ylabel("thousand tokens per second")
        device = next(iter(next(iter(found.values())).values()))["tokens_per_s"]["device"]
    panels[-1, 0].set_xlabel(f"peak memory, GiB, on one {device}; ours in blue")
    headline(figure, _best(found))
    return figure


def _best(found: dict) -> str:
    """Say by how much the fastest of ours is ahead of the fastest other, if it is in each model."""
    gains = []
    for own in found.values():
        speed = {"ours": 0.0, "others": 0.0}
        for name, of in own.items():
            if name not in HIDDEN:
                whose = "ours" if PROGRAMS[name].startswith("ours") else "others"
                speed[whose] = max(speed[whose], of["tokens_per_s"]["value"])
        gains.append(speed["ours"] / speed["others"] if speed["others"] else 0.0)
    if min(gains) <= 1:
        return "Speed and memory of a training step"
    return (
        f"With FP8 activations ours is {min(gains):.2f} to {max(gains):.2f} times as fast\n"
        "as the fastest other program"
    )


FIGURES = {"training_speed": lambda: draw(newest(all_records()))}
