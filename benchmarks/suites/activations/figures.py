"""The pictures of docs/ on COAT's activations: bytes from shapes, losses from the curves."""

from typing import Any

from benchmarks import curves, style
from benchmarks.excerpts import held_out, of_part
from benchmarks.style import plt
from benchmarks.suites.activations import tables
from benchmarks.suites.activations.bytes import COLUMNS, by_column, kept
from benchmarks.suites.activations.layers import Shape
from benchmarks.suites.activations.training import CURVES, PART

_COLORS = dict(zip(COLUMNS, (style.BLUE, style.ORANGE, style.SKY, style.GREEN, style.PURPLE,
                             style.GREY), strict=True))  # fmt: skip
_NAMES = {"the paper: BF16": "bf16, in the paper", tables.BF16: "bf16 in JAX",
          tables.OURS: "ours, FP8"}  # fmt: skip


def kept_bytes() -> Any:
    shape, printed = Shape.parse(tables.TWO_THIRDS), tables.PRINTED.items()
    bars = {name: dict(zip(COLUMNS, own[:-1], strict=False)) for name, own in printed}
    bars |= {name: by_column(kept(shape, name, "cudnn")) for name in (tables.BF16, tables.OURS)}
    fig, ax = plt.subplots(figsize=(8, 3.4))
    total = {}
    for name, own in bars.items():
        start, label = 0.0, _NAMES.get(name, name)
        for column, size in own.items():
            ax.barh(label, size, left=start, color=_COLORS[column], height=0.62)
            if size > 1.5:
                ink = "white" if column in ("RMSNorm", "FlashAttn", "Residual") else "black"
                ax.text(start + size / 2, label, f"{size:.1f}", color=ink, size=8, ha="center",
                        va="center")  # fmt: skip
            start += size
        total[name] = start
        ax.text(start + 0.3, label, f"{start:.1f} U", va="center", weight="bold")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    what = "U = batch x length x width x 2 bytes: the input of the layer in bf16"
    ax.set(xlim=(0, 33), xlabel=what)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in _COLORS.values()]
    fig.legend(handles, COLUMNS, loc="outside lower center", ncols=len(COLUMNS), fontsize=8)
    less = total[tables.BF16] / total[tables.OURS]
    style.headline(fig, f"FP8 keeps {less:.1f} times less for the backward pass than JAX in bf16")
    return fig


def losses() -> Any:
    stored = curves.load(CURVES)
    found, about = held_out(of_part(stored, PART)), stored.about[PART]
    steps = found.pop("step")
    lines = {"fp8": ("FP8 activations", style.BLUE), "coat_adamw": ("FP8 states", style.ORANGE),
             "fp8-coat_adamw": ("both", style.VERMILION)}  # fmt: skip
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    over, _ = style.differences(ax, steps, found, lines, "standard", "standard-other-start")
    ax.set(xlabel=f"step of {about['tokens']:,} tokens", ylabel="held-out loss, % over bf16")
    worst, other = max(over[name][-1] for name in lines), abs(over["standard-other-start"][-1])
    assert worst < other
    style.headline(fig, f"FP8 activations and states end within {worst:.1f} % of bf16, less than "
                  "what another start does")  # fmt: skip
    return fig


FIGURES = {"coat_activations_bytes": kept_bytes, "coat_activations_losses": losses}
