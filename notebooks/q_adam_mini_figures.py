"""The pictures of q_adam_mini.ipynb, in Okabe and Ito's colours."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Runs = dict[str, dict[str, np.ndarray]]
_LINES = {  # label, colour, line
    "adamw": ("AdamW, f32", GREY, "-"),
    "adam_mini": ("Adam-mini, f32", BLACK, "-"),
    "adam_mini-again": ("Adam-mini, once more", BLACK, ":"),
    "q_adam_mini-reference": ("reference quantizer: floor, nearest", VERMILION, "-"),
    "q_adam_mini-case1": ("Case 1: 8-bit v", ORANGE, "-"),
    "q_adam_mini-case1-guarded": ("Case 1 with v never 0", GREEN, "-"),
    "q_adam_mini": ("q_adam_mini: stochastic everywhere", BLUE, "-"),
    "q_adam_mini-embeddings": ("q_adam_mini, stochastic in the embedding", PURPLE, "-."),
    "q_adam_mini-nearest": ("q_adam_mini, nearest", SKY, "--"),
}
_CASES = ("q_adam_mini-case1", "q_adam_mini-case1-guarded", "q_adam_mini-reference",
          "adam_mini", "q_adam_mini")  # fmt: skip
_CLOSE = ("adamw", "q_adam_mini", "q_adam_mini-nearest", "q_adam_mini-embeddings",
          "adam_mini-again")  # fmt: skip


def _curve(ax: Axes, name: str, x: np.ndarray, y: np.ndarray) -> None:
    label, colour, line = _LINES[name]
    ax.plot(x / 1000, y, line, color=colour, lw=1.4, label=label)


def _legend(fig: Figure, axes: list[Axes]) -> None:
    """One legend of all axes, in the order of `_LINES`."""
    found: dict[str, object] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    shown = {label: found[label] for label, *_ in _LINES.values() if label in found}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2)


def _titled(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=9)
    ax.set_xlabel("thousand steps")


def losses_figure(runs: Runs) -> Figure:
    """Case 1 against Case 2, and the held-out losses against Adam-mini's."""
    fig, grid = plt.subplot_mosaic(
        [["all", "far", "close"]], figsize=(9.6, 4), layout="constrained"
    )
    mini = runs["adam_mini"]
    for name in _CASES:
        _curve(grid["all"], name, runs[name]["step"], runs[name]["train_loss"])
    grid["all"].set(yscale="log", ylim=(2, 1200))
    grid["all"].set_yticks([2, 3, 5, 10, 100, 1000], ["2", "3", "5", "10", "100", "1000"])
    grid["all"].minorticks_off()
    far = ("q_adam_mini-reference", "q_adam_mini-case1-guarded", "adamw", "q_adam_mini")
    for panel, names in (("far", far), ("close", _CLOSE)):
        for name in names:
            more = 100 * (runs[name]["val_loss"] / mini["val_loss"] - 1)
            _curve(grid[panel], name, runs[name]["val_step"], more)
        grid[panel].axhline(0, color=BLACK, lw=0.8)
    grid["close"].set(ylim=(-1.3, 1.3))
    _titled(grid["all"], "training loss (Figures 3 and 5)")
    _titled(grid["far"], "held-out loss over Adam-mini's, %")
    _titled(grid["close"], "the same, closer (Figure 8)")
    _legend(fig, list(grid.values()))
    return fig


def norms_figure(runs: Runs) -> Figure:
    """Norms of the embedding, near to Adam-mini's and on a log scale, and of a middle layer."""
    fig, axes = plt.subplots(1, 3, figsize=(9.6, 4), layout="constrained")
    stored = ("adam_mini", "q_adam_mini-reference", "q_adam_mini", "q_adam_mini-nearest",
              "q_adam_mini-embeddings")  # fmt: skip
    for ax, curve in ((axes[0], "embedding_norm"), (axes[2], "mlp_norm")):
        for name in stored:
            _curve(ax, name, runs[name]["step"], runs[name][curve])
        ax.set(yscale="log")
    for name in _CLOSE[1:]:
        more = runs[name]["embedding_norm"] / runs["adam_mini"]["embedding_norm"] - 1
        _curve(axes[1], name, runs[name]["step"], 100 * more)
    axes[1].set_ylim(-0.05, 0.05)
    _titled(axes[0], "norm of the embedding (Figures 6a, 8a)")
    _titled(axes[1], "the same over Adam-mini's, %")
    _titled(axes[2], "norm of a middle layer (Figure 6b)")
    _legend(fig, list(axes))
    return fig


def moments_figure(runs: Runs) -> Figure:
    """Norms of the embedding's m and v."""
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    titles = ("norm of m, embedding (Figure 7a)", "norm of v, embedding (Figure 7b)")
    for ax, curve, title in zip(axes, ("mu_norm", "nu_norm"), titles, strict=True):
        for name in ("adam_mini", "q_adam_mini-reference", "q_adam_mini"):
            _curve(ax, name, runs[name]["step"], runs[name][curve])
        ax.set_ylim(0, None)
        _titled(ax, title)
    _legend(fig, list(axes))
    return fig


_SLEEPERS = {
    "f32": (BLACK, "-", 3.5),
    "reference, nearest": (VERMILION, "-", 3.5),
    "ours with the floor, nearest": (ORANGE, "--", 1.4),
    "ours with the floor, stochastic everywhere": (GREEN, "o", 1.4),
    "ours, nearest": (SKY, "-", 2.5),
    "ours, stochastic in the embedding": (BLUE, "--", 1.4),
    "ours, stochastic everywhere": (PURPLE, "-.", 1.4),
}


def sleeping_figure(norms: dict[str, dict[str, np.ndarray]], asleep: int) -> Figure:
    """Norms of weights whose gradients stop, under each storage of m."""
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 4), sharey=True, layout="constrained")
    titles = {"row": "a row of the embedding, a group alone",
              "neuron": "a neuron, in groups with awake ones"}  # fmt: skip
    for ax, (what, title) in zip(axes, titles.items(), strict=True):
        for name, (colour, line, width) in _SLEEPERS.items():
            ax.plot(norms[name][what], line, color=colour, lw=width, ms=4, markevery=60, label=name)
        ax.axvline(asleep, color=GREY, lw=0.8, ls=":")
        ax.set(yscale="log", xlabel="steps; the gradients stop at the dotted line")
        ax.set_title(title, loc="left", fontsize=9)
    axes[0].set_ylabel("norm of its weights")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
