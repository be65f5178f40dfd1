"""The four pictures; colours are Okabe and Ito's, which colour-blind readers tell apart."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_measure import CHANGE, EVERY, EXPONENTS
from flashoptim_training import Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "font.size": 9,
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


def log_log(ax: Axes, x: list[int]) -> None:
    """Logarithmic axes: ticks where the data is, and on y enough of them to read numbers from."""
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(x, [f"{value:,}" for value in x])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    if high < 100 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# ---- Figure 3 ---------------------------------------------------------------------------------

_EXACT = 1e-12  # where an error of zero is drawn
_SCHEMES = {  # label, colour, line, width
    "none": ("no correction", BLACK, "-", 1.3),
    "float": ("error in the same 16-bit float", ORANGE, "-", 1.6),
    "ulp-24": ("paper, 24 bits", SKY, "-", 3.2),
    "ulp-32": ("paper, 32 bits", BLUE, "-", 3.2),
    "bits-24": ("ours, 24 bits", VERMILION, "--", 1.6),
    "bits-32": ("ours, 32 bits", PURPLE, "--", 1.6),
}


def figure_3(errors: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Mean relative reconstruction error per exponent, bf16 above fp16."""
    fig, axes = plt.subplots(2, 1, figsize=(8, 6.4), layout="constrained")
    for ax, (target, by_scheme), limits in zip(
        axes, errors.items(), ((-150, 128), (-40, 17)), strict=True
    ):
        for name, error in by_scheme.items():
            label, colour, line, width = _SCHEMES[name]
            shown = np.maximum(error, _EXACT)
            ax.plot(EXPONENTS, shown, line, color=colour, lw=width, label=label)
        ax.set(yscale="log", ylim=(3e-13, 4), xlim=limits)
        ax.set_yticks([_EXACT, 1e-9, 1e-6, 1e-3, 1], ["exact", "1e-9", "1e-6", "1e-3", "1"])
        ax.minorticks_off()
        ax.set_ylabel("mean relative error")
        ax.set_title(f"weights in {target.upper()}", loc="left", fontweight="bold")
    _mark(axes[0], -150, -126, "denormal", "#F3F3F3")
    _mark(axes[1], -40, -24, "under fp16's range", "#E9E9E9")
    _mark(axes[1], -24, -14, "fp16\ndenormal", "#F3F3F3")
    axes[1].set_xlabel(r"exponent of the f32 weight, $\lfloor\log_2 |w|\rfloor$")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def _mark(ax: Axes, low: int, high: int, text: str, colour: str) -> None:
    ax.axvspan(low, high, color=colour, zorder=0)
    ax.axvline(high, color=GREY, ls=":", lw=1.2)
    left = low + 0.04 * (high - low)
    ax.text(left, 4e-12, text, va="bottom", color=GREY, fontsize=8)


# ---- Figure 4 ---------------------------------------------------------------------------------

_CODECS = {
    "linear, paper": (ORANGE, None),
    "companded, paper": (BLUE, None),
    "linear, ours": (ORANGE, "////"),
    "companded, ours": (BLUE, "////"),
}


def figure_4(values: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    """Box plots of NMSE over tensors and steps: values[optimizer][slot][codec]."""
    panels = [(name, slot) for slot in "mvu" for name in values if slot in values[name]]
    fig, axes = plt.subplots(1, len(panels), figsize=(8.4, 3.9), layout="constrained")
    for ax, (optimizer, slot) in zip(axes, panels, strict=True):
        columns = values[optimizer][slot]
        boxes = ax.boxplot(
            [columns[name] for name in _CODECS],
            whis=(5, 95),
            widths=0.65,
            showfliers=False,
            patch_artist=True,
            medianprops={"color": BLACK, "lw": 1.5},
        )
        for box, (colour, hatch) in zip(boxes["boxes"], _CODECS.values(), strict=True):
            box.set(facecolor=colour, alpha=0.75, hatch=hatch)
        ax.set(yscale="log", xticks=[])
        if slot != "u":  # the direction's errors are of another order
            ax.set_ylim(2e-6, 1e-3)
            ax.tick_params(labelleft=ax is axes[0])
        ax.grid(visible=False, axis="x")
        kind = {"m": "momentum $m$", "v": "variance $v$", "u": r"$m / \sqrt{v}$, $v$ stored"}[slot]
        ax.set_title(f"{optimizer}\n{kind}", fontsize=10)
    axes[0].set_ylabel("NMSE (normalised mean squared error)")
    handles = [
        Patch(facecolor=colour, alpha=0.75, hatch=hatch, edgecolor=BLACK, label=name)
        for name, (colour, hatch) in _CODECS.items()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


# ---- Figure 5 ---------------------------------------------------------------------------------

_RUNS = {  # wide below narrow, since four of them coincide
    "f32 (optax.adamw)": (BLACK, "-", 6.0),
    "linear, ours": (GREEN, "-", 4.2),
    "sqrt, paper": (SKY, "-", 2.4),
    "sqrt, ours": (BLUE, "--", 1.2),
    "linear, f32 scale, no floor": (PURPLE, "-", 1.8),
    "linear, paper": (VERMILION, "-", 1.8),
}


def _smooth(losses: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` losses (fewer at the start)."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    index = np.arange(1, len(total))
    start = np.maximum(index - window, 0)
    return (total[index] - total[start]) / (index - start)


def figure_5(runs: dict[str, Run], window: int = 10) -> Figure:
    """Training loss for each storage of the variance: all of it, and the part that trains."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained")
    for ax, closely in zip(axes, (False, True), strict=True):
        for name, (colour, line, width) in _RUNS.items():
            losses = runs[name].losses[np.isfinite(runs[name].losses)]
            curve = _smooth(losses, window) if closely else losses
            ax.plot(curve, line, color=colour, lw=width, label=name)
            if len(losses) < len(runs[name].losses) and not closely:
                ax.plot(len(losses) - 1, losses[-1], "x", color=colour, ms=8, mew=2)
        ax.set_xlabel("step")
    steps = len(runs["f32 (optax.adamw)"].losses)
    axes[0].set(yscale="log", xlim=(-0.02 * steps, steps), ylabel="training loss, nats a character")
    axes[0].set_title("every storage (x: became NaN)", fontsize=10)
    best = min(run.final() for run in runs.values())
    axes[1].set(xlim=(0, steps), ylim=(best - 0.1, best + 1.4))
    axes[1].set_title(f"closely, mean of {window} steps", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


# ---- The closed loop --------------------------------------------------------------------------

_STORAGES = (
    (SKY, "-", 2.2, 3),
    (VERMILION, "-", 1.8, 3),
    (BLACK, "--", 1.2, 4),
    (GREEN, "-", 2.2, 2),
)


def closed_loop_figure(ratios: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw sqrt(stored / true) of the second moment over the steps, for each case and storage."""
    fig, axes = plt.subplots(1, len(ratios), figsize=(8, 3.4), sharey=True, layout="constrained")
    for ax, (case, curves) in zip(axes, ratios.items(), strict=True):
        for (name, curve), style in zip(curves.items(), _STORAGES, strict=True):
            colour, line, width, above = style
            steps = EVERY * (1 + np.arange(len(curve)))
            ax.plot(steps, curve, line, color=colour, lw=width, label=name, zorder=above)
        if case != "constant gradient":
            ax.axvline(CHANGE, color=GREY, ls=":", lw=1.2)
        ax.set(yscale="log", ylim=(0.4, 20), xlabel="step")
        ax.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        ax.minorticks_off()
        ax.set_title(case.replace(" at step", "\nat step"), fontsize=9)
    axes[0].set_ylabel(r"median $\sqrt{v_{stored} / v_{true}}$")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    return fig


def closed_loop_table(ratios: dict[str, dict[str, np.ndarray]]) -> str:
    """The last value of every curve, as a Markdown table."""
    names = list(next(iter(ratios.values())))
    rows = [
        f"| {case} | " + " | ".join(f"{curves[name][-1]:.2f}" for name in names) + " |"
        for case, curves in ratios.items()
    ]
    header = "| case | " + " | ".join(names) + " |"
    return "\n".join([header, "|---" * (len(names) + 1) + "|", *rows])
