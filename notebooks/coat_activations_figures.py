"""The pictures of coat_activations.ipynb, in Okabe and Ito's colours."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, log_log
from matplotlib.figure import Figure

from benchmarks.suites.activations.bytes import COLUMNS
from benchmarks.suites.activations.training import VARIANTS

_COLUMNS = dict(zip(COLUMNS, (BLUE, ORANGE, SKY, GREEN, PURPLE, GREY), strict=True))
_LINES = {  # colour, line
    "standard": (BLACK, "-"),
    "standard-other-start": (BLACK, ":"),
    "fp8": (BLUE, "-"),
    "coat_adamw": (ORANGE, "-"),
    "fp8-coat_adamw": (VERMILION, "-"),
}


def bytes_figure(bars: dict[str, dict[str, float]]) -> Figure:
    """U of a layer, one bar a way to keep activations."""
    fig, ax = plt.subplots(figsize=(8, 0.6 + 0.42 * len(bars)), layout="constrained")
    for name, own in bars.items():
        left = 0.0
        for column, size in own.items():
            label = column if name == next(reversed(bars)) else None
            ax.barh(name, size, left=left, color=_COLUMNS[column], height=0.65, label=label)
            left += size
        ax.text(left + 0.2, name, f"{left:.2f}", va="center")
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_title("activations that a layer keeps, U", loc="left", fontsize=9)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLUMNS))
    return fig


def groups_figure(errors: dict[int, tuple[float, float]]) -> Figure:
    """Errors of what is kept, and bytes of scales, over the size of groups."""
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 3), layout="constrained")
    sizes = list(errors)
    titles = ("error of kept activations, of their square", "bytes of scales, of the codes', %")
    for ax, which, title, unit in zip(axes, (0, 1), titles, (1, 100), strict=True):
        ax.plot(sizes, [unit * own[which] for own in errors.values()], "o-", color=BLUE, lw=1.4)
        ax.set(xscale="log", ylim=(0, None))
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xlabel("neighbours that share a scale")
    return fig


def blocks_figure(errors: dict[str, dict[int, float]]) -> Figure:
    """A norm's error with blocks across tokens and with groups within them (Figure 4a)."""
    fig, ax = plt.subplots(figsize=(5, 3), layout="constrained")
    for (name, own), colour in zip(errors.items(), (VERMILION, BLUE), strict=True):
        ax.plot(list(own), list(own.values()), "o-", color=colour, lw=1.4, label=name)
    log_log(ax, list(next(iter(errors.values()))))
    ax.set_title("error of a norm's result, of its square", loc="left", fontsize=9)
    ax.set_xlabel("numbers that share a scale")
    ax.legend()
    return fig


def losses_figure(runs: dict[str, dict[str, np.ndarray]], unit: str) -> Figure:
    """Held-out losses, and how far they are from the standard's."""
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 3.8), layout="constrained")
    for name, of in runs.items():
        colour, line = _LINES[name]
        style = {"color": colour, "ls": line, "lw": 1.4}
        axes[0].plot(of["val_step"], of["val_loss"], label=VARIANTS[name].says, **style)
        count = len(of["val_loss"])  # a run that failed ends early
        more = 100 * (of["val_loss"] / runs["standard"]["val_loss"][:count] - 1)
        axes[1].plot(of["val_step"][1:], more[1:], **style)
    titles = f"held-out loss, nats a {unit}", f"over {VARIANTS['standard'].says}, %"
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xlabel("steps")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig
