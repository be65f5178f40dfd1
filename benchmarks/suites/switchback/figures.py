"""The pictures of docs/ on SwitchBack, from the curves of `switchback`."""

from typing import Any

import numpy as np

from benchmarks import curves, style
from benchmarks.excerpts import held_out, of_part
from benchmarks.style import plt
from benchmarks.suites.switchback.bench import CURVES

BASE, AGAIN = "standard", "standard-other-start"
_LINES = {
    "llm_int8": ("all three products in int8", style.VERMILION),
    "switchback-int8": ("SwitchBack, int8", style.BLUE),
    "switchback-fp8": ("SwitchBack, FP8", style.SKY),
    "switchback_m-int8": ("SwitchBackM, int8", style.GREEN),
    "tensorwise-unit": ("tensor-wise FP8", style.ORANGE),
}


def losses(part: str) -> Any:
    stored = curves.load(CURVES)
    found, about = held_out(of_part(stored, part)), stored.about[part]
    steps = found.pop("step")
    chance_of = held_out(of_part(stored, "run"))  # the large batch has no second start
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    lines = {name: line for name, line in _LINES.items() if name in found}
    if AGAIN not in found:
        shift = np.array(chance_of[AGAIN]) / np.array(chance_of[BASE])
        found[AGAIN] = np.array(found[BASE]) * shift[-len(found[BASE]) :].max()
    over, chance = style.differences(ax, steps, found, lines, BASE, AGAIN)
    ax.set(xlabel=f"step of {about['tokens']:,} bytes", ylabel="held-out loss, % over bf16")
    worst = max(over[name][-1] for name in lines if name.startswith("switchback"))
    assert worst < 2 * chance
    style.headline(fig, f"SwitchBack ends within {worst:.2f} % of bf16 with {about['tokens']:,} "
                        "bytes a step, like runs that differ by chance")  # fmt: skip
    return fig


def features() -> Any:
    runs = of_part(curves.load(CURVES), "run")
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    shown = {
        "standard": ("bf16", style.BLACK, "-"),
        "tensorwise-unit": ("tensor-wise FP8", style.ORANGE, "--"),
        "standard-layer-scale": ("bf16, layer scale", style.BLUE, "-"),
        "tensorwise-unit-layer-scale": ("tensor-wise FP8, layer scale", style.PURPLE, "--"),
    }
    for name, (label, color, line) in shown.items():
        sizes = runs[name]["features"][-1]
        ax.plot(range(len(sizes)), sizes, line, color=color, label=label)
    ax.set(yscale="log", xlabel="layers below", ylabel="mean magnitude E|x|")
    ax.set_yticks([0.03, 0.1, 0.3, 1, 3, 10], ["0.03", "0.1", "0.3", "1", "3", "10"])
    ax.minorticks_off()
    style.name_lines(ax)
    last = {name: runs[name]["features"][-1][-1] for name in shown}
    ratio = last["standard"] / last["standard-layer-scale"]
    style.headline(fig, f"Zero-init layer scale keeps features {ratio:.0f} times smaller, in bf16 "
                        "and in FP8")  # fmt: skip
    return fig


FIGURES = {
    "switchback_losses": lambda: losses("run"),
    "switchback_large": lambda: losses("large"),
    "switchback_features": features,
}
