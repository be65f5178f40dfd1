"""The picture of whole training steps beside torch's."""

from typing import Any

from benchmarks.records import Rows, all_records, newest
from benchmarks.render import GIB
from benchmarks.style import BLUE, GREY, headline, plt
from benchmarks.suites.end_to_end.tables import ACCUMULATED, MODELS, PROGRAMS, peak, steps

# of another batch; and within 2 % of the same without an FP8 head, where names would overlap
HIDDEN = {*ACCUMULATED, "fp8-unrolled-head", "fp8-unrolled-head-gradients"}


def draw(rows: Rows) -> Any:
    found, gains = steps(rows), []
    if not found:
        raise SystemExit("no records of whole steps: run `benchmarks.run end_to_end` first")
    figure, panels = plt.subplots(len(found), 1, figsize=(7.2, 1 + 2.3 * len(found)), squeeze=False)
    for axes, (case, own) in zip(panels.flat, found.items(), strict=True):
        fastest = {True: 0.0, False: 0.0}  # of ours, of the others
        for name, of in own.items():
            if name in HIDDEN:
                continue
            label, speed = PROGRAMS[name], of["tokens_per_s"]["value"]
            ours = label.startswith("ours")
            fastest[ours] = max(fastest[ours], speed)
            at, color = (peak(of)["value"] / GIB, speed / 1e3), BLUE if ours else GREY
            axes.plot(*at, "o" if ours else "s", color=color, markersize=7)
            for words in ("`", "ours, ", ", flashoptim", "the same model with "):
                label = label.replace(words, "")
            # clear of its neighbour's marker
            below = (7, -3 if "Liger" not in label else 5 if "checkpointing" in label else -11)
            axes.annotate(label, at, below, textcoords="offset points", size=8, color=color)
        gains.append(fastest[True] / fastest[False] if fastest[False] else 0.0)
        axes.set_title(f"{', '.join(MODELS[case])} tokens")
        axes.margins(y=0.15)
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.35 * (right - left))  # for what is written there
        axes.set_ylabel("thousand tokens per second")
        device = of["tokens_per_s"]["device"]
    panels[-1, 0].set_xlabel(f"peak memory, GiB, on one {device}; ours in blue")
    words = "Speed and memory of a training step"
    if min(gains) > 1:
        words = (f"With FP8 activations ours is {min(gains):.2f} to {max(gains):.2f} times as fast"
                 "\nas the fastest other program")  # fmt: skip
    headline(figure, words)
    return figure


FIGURES = {"training_speed": lambda: draw(newest(all_records()))}
