"""The pictures of gaussws.ipynb, in Okabe and Ito's colours."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from matplotlib.figure import Figure

from benchmarks.suites.gaussws.training import (
    ALL,
    BASE,
    DIFFQ,
    EDGES,
    KINDS,
    OD,
    OTHER_START,
    STATISTICS,
)

Runs = dict[str, dict[str, np.ndarray]]
LINES = {  # colour, line
    BASE: (BLACK, "-"),
    OTHER_START: (BLACK, ":"),
    OD: (BLUE, "-"),
    ALL: (GREEN, "-"),
    DIFFQ: (VERMILION, "-"),
}
_COLOURS = dict(
    zip(KINDS, (SKY, BLUE, PURPLE, ORANGE, GREY, BLACK, VERMILION), strict=True)
)  # of matrices
LEAST, MOST, MEAN, DEVIATION = (STATISTICS.index(s) for s in ("min", "max", "mean", "std"))


def _legend(fig: Figure, ax: plt.Axes, columns: int = 3) -> None:
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def _titled(ax: plt.Axes, title: str, label: str) -> None:
    ax.set_title(title, loc="left", fontsize=9)
    ax.set_xlabel(label)


def noise_figure(
    nullified: dict[int, float], most: float, shares: dict[str, dict[float, float]]
) -> Figure:
    """Near-zero values that are nullified, and noise that a cast rounds away."""
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    axes[0].plot(list(nullified), list(nullified.values()), "o-", color=BLUE, lw=1.4, ms=3)
    axes[0].axhline(most, color=BLACK, lw=0.8, ls=":")
    _titled(axes[0], "share nullified of a value (3.5); dotted: P(R ≠ 0)", "its exponent")
    for (name, of), colour in zip(shares.items(), (VERMILION, ORANGE, BLUE, SKY), strict=False):
        axes[1].plot(list(of), list(of.values()), "o-", color=colour, lw=1.4, ms=3, label=name)
    _titled(axes[1], "share of the noise that underflows (eq. 6)", "maximum of the block")
    axes[1].legend(fontsize=8)
    return fig


def losses_figure(runs: Runs) -> Figure:
    """Held-out losses on weights without noise, and how far they are from the baseline's."""
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 4), layout="constrained")
    for name, of in runs.items():
        colour, line = LINES[name]
        style = {"color": colour, "ls": line, "lw": 1.4}
        axes[0].plot(of["val_step"], of["val_loss"], label=name, **style)
        count = len(of["val_loss"])  # a run that failed ends early
        more = 100 * (of["val_loss"] / runs[BASE]["val_loss"][:count] - 1)
        axes[1].plot(of["val_step"][1:], more[1:], **style)
        if "sampled_loss" in of:
            noisy = 100 * (of["sampled_loss"] / runs[BASE]["val_loss"][:count] - 1)
            axes[1].plot(of["val_step"][1:], noisy[1:], color=colour, ls="--", lw=0.9)
    axes[1].axhline(0, color=BLACK, lw=0.8)
    _titled(axes[0], "held-out loss, nats a byte", "steps")
    _titled(axes[1], "over no noise, %; dashed: of weights with noise", "steps")
    _legend(fig, axes[0])
    return fig


def bits_figure(run: dict[str, np.ndarray]) -> Figure:
    """b_t of each layer at the end, as Figure 6 has it, and the mean of each kind over time."""
    kinds = [kind for kind in KINDS if f"bits_{kind}" in run]
    fig, axes = plt.subplots(
        1, 2, figsize=(10, 4), layout="constrained", sharey=True, width_ratios=(2, 1)
    )
    layers = run[f"bits_{kinds[0]}"].shape[1]
    at = np.arange(layers * len(kinds)).reshape(layers, len(kinds))
    last = np.stack([run[f"bits_{kind}"][-1] for kind in kinds], axis=1)  # layers, kinds, ...
    for column in (LEAST, MOST):
        axes[0].plot(at.ravel(), last[..., column].ravel(), color=GREY, lw=0.8)
        edge = last[..., column]
        whole = edge.min(1) if column == LEAST else edge.max(1)
        axes[0].step([*at[:, 0], at[-1, -1]], [*whole, whole[-1]], where="post", color=BLACK,
                     ls=":", lw=0.8)  # fmt: skip
    for k, kind in enumerate(kinds):
        own = last[:, k]
        axes[0].errorbar(at[:, k], own[:, MEAN], own[:, DEVIATION], fmt="o", ms=4, lw=1.2,
                         color=_COLOURS[kind], label=kind)  # fmt: skip
        over_time = run[f"bits_{kind}"][..., MEAN].mean(1)
        axes[1].plot(run["val_step"][: len(over_time)], over_time, color=_COLOURS[kind], lw=1.4)
    axes[0].set_xticks(at[:, 0], [str(layer) for layer in range(layers)])
    _titled(axes[0], "b_t at the end: mean ± std, min and max (dotted: of the block)", "block")
    _titled(axes[1], "mean b_t", "steps")
    _legend(fig, axes[0], 7)
    return fig


def histograms_figure(run: dict[str, np.ndarray], times: tuple[int, ...]) -> Figure:
    """Shares of b_t in each block at some times, by kind of matrix (appendix C)."""
    kinds = [kind for kind in KINDS if f"histogram_{kind}" in run]
    layers = run[f"histogram_{kinds[0]}"].shape[1]
    size = (2.4 * len(times), 0.95 * layers + 0.8)
    fig, axes = plt.subplots(
        layers, len(times), figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    middle = (EDGES[1:] + EDGES[:-1]) / 2
    for row in range(layers):
        for column, time in enumerate(times):
            for kind in kinds:
                counts = run[f"histogram_{kind}"][time, row]
                axes[row, column].plot(middle, counts / counts.sum(), color=_COLOURS[kind], lw=1,
                                       label=kind)  # fmt: skip
            axes[row, column].set_yticks([])
            axes[row, column].set_xlim(3, 7)
    for column, time in enumerate(times):
        axes[0, column].set_title(f"step {run['val_step'][time]:,}", loc="left", fontsize=9)
        axes[-1, column].set_xlabel("b_t")
    for row in range(layers):
        axes[row, 0].set_ylabel(f"block {row}", fontsize=8)
    _legend(fig, axes[0, 0], 4)
    return fig


def casts_figure(changes: dict[str, dict[str, float]]) -> Figure:
    """Losses of casts over those without, run by run."""
    fig, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
    formats = list(dict.fromkeys(to for of in changes.values() for to in of))
    width = 0.8 / len(changes)
    colours = (GREY, BLACK, BLUE, GREEN, VERMILION)
    for index, ((name, of), colour) in enumerate(zip(changes.items(), colours, strict=False)):
        at = [formats.index(to) + (index - (len(changes) - 1) / 2) * width for to in of]
        ax.bar(at, [100 * share for share in of.values()], width, color=colour, label=name)
    ax.axhline(0.5, color=BLACK, lw=0.8, ls=":")
    ax.set_xticks(range(len(formats)), formats)
    _titled(ax, "held-out loss of the cast over that without, %; dotted: 0.5 %", "format")
    _legend(fig, ax, 5)
    return fig


def rates_figure(losses: dict[str, dict[float, tuple[float, float]]]) -> Figure:
    """Held-out losses at the end, and the lowest on the way, over factors on the rate."""
    fig, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    lower = any(least < last for of in losses.values() for last, least in of.values())
    for name, of in losses.items():
        colour, _ = LINES[name]
        ax.plot(list(of), [last for last, _ in of.values()], "o-", color=colour, lw=1.4, ms=4,
                label=name)  # fmt: skip
        if lower:
            ax.plot(list(of), [least for _, least in of.values()], ":", color=colour, lw=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(of), [f"{factor:g}" for factor in of])
    words = "; dotted: the lowest on the way" if lower else ", which is the lowest of the run"
    _titled(ax, f"held-out loss at the end{words}", "factor on the rate")
    ax.legend()
    return fig
