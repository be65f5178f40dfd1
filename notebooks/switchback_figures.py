"""The pictures of switchback.ipynb, in Okabe and Ito's colours."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, log_log
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.suites.switchback.training import VARIANTS

Runs = dict[str, dict[str, np.ndarray]]
_LINES = {  # colour, line
    "standard": (BLACK, "-"),
    "standard-other-start": (BLACK, ":"),
    "switchback-int8": (BLUE, "-"),
    "switchback-fp8": (SKY, "-"),
    "switchback_m-int8": (BLUE, "--"),
    "switchback_q-int8": (BLUE, ":"),
    "llm_int8": (VERMILION, "-"),
    "tensorwise-fp8": (GREEN, "-"),
    "tensorwise-unit": (ORANGE, "-"),
    "tensorwise-unit-clipped": (ORANGE, "--"),
    "tensorwise-unit-kq-norm": (ORANGE, ":"),
    "tensorwise-unit-layer-scale": (PURPLE, "-"),
    "standard-layer-scale": (GREY, "-"),
}
_PRODUCTS = {"forward": BLUE, "input gradient": GREEN, "weight gradient": VERMILION}
_DRAWS = {"normal": "-", "student-t(4)": "--"}


def _titled(ax: Axes, title: str, label: str) -> None:
    ax.set_title(title, loc="left", fontsize=9)
    ax.set_xlabel(label)


def _legend(fig: Figure, ax: Axes, columns: int = 3) -> None:
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def variance_figure(spreads: dict[tuple[str, str], dict[int, object]]) -> Figure:
    """Errors of int8 products over the length of their sums, and as a share of the sums' own."""
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
    for (draw, product), of in spreads.items():
        x = list(of)
        style = {"color": _PRODUCTS[product], "ls": _DRAWS[draw], "lw": 1.4}
        if draw == "normal":
            axes[0].plot(x, [s.predicted for s in of.values()], color=GREY, lw=4, alpha=0.4)
        axes[0].plot(x, [s.error for s in of.values()], label=f"{product}, {draw}", **style)
        axes[1].plot(x, [s.relative for s in of.values()], **style)
    for ax in axes:
        log_log(ax, x)
    _titled(axes[0], "variance of the error; grey: equation 12", "length of the sums")
    _titled(axes[1], "of the sums' own variance", "length of the sums")
    _legend(fig, axes[0])
    return fig


def gradients_figure(tokens: list[int], errors: dict[str, list[float]]) -> Figure:
    """Errors of a model's gradients over the tokens of a batch."""
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for (name, values), colour in zip(errors.items(), (BLUE, VERMILION), strict=True):
        ax.plot(tokens, values, "o-", color=colour, lw=1.4, ms=4, label=name)
    log_log(ax, tokens)
    _titled(ax, "squared error of the gradient, of its own square", "tokens in a batch")
    ax.legend()
    return fig


def features_figure(runs: Runs, names: tuple[str, ...]) -> Figure:
    """Mean magnitudes through the depth, before and after training."""
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), sharey=True, layout="constrained")
    for ax, which, title in ((axes[0], 0, "at init"), (axes[1], -1, "at the end of training")):
        for name in names:
            colour, line = _LINES[name]
            sizes = runs[name]["features"][which]
            label = VARIANTS[name].says
            wide = 4 if name.startswith("standard") else 1.4  # the others lie on these
            ax.plot(range(len(sizes)), sizes, line, color=colour, lw=wide, label=label)
        ax.set(yscale="log")
        _titled(ax, f"E|x| {title} (Figure 2, right)", "layers below")
    _legend(fig, axes[0], 2)
    return fig


def losses_figure(runs: Runs, names: tuple[str, ...], base: str = "standard") -> Figure:
    """Held-out losses, and how far they are from the base's."""
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 4), layout="constrained")
    for name in names:
        of, (colour, line) = runs[name], _LINES[name]
        style = {"color": colour, "ls": line, "lw": 1.4}
        axes[0].plot(of["val_step"], of["val_loss"], label=VARIANTS[name].says, **style)
        count = len(of["val_loss"])  # a run that failed ends early
        more = 100 * (of["val_loss"] / runs[base]["val_loss"][:count] - 1)
        axes[1].plot(of["val_step"][1:], more[1:], **style)
    axes[1].axhline(0, color=BLACK, lw=0.8)
    _titled(axes[0], "held-out loss, nats a byte", "steps")
    _titled(axes[1], f"over {VARIANTS[base].says}, %", "steps")
    _legend(fig, axes[0])
    return fig
