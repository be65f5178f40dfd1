"""The pictures of stable_adamw.ipynb, in Okabe and Ito's colours."""

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optax_lowmem.diagnostics import spikes

BEFORE, AFTER = 12, 28  # steps shown around a spike
START = 600  # of the run that is shown: before, the loss falls from 3
_OPTIMIZERS = {
    "adamw": ("AdamW", VERMILION),
    "flash_adamw": ("flash_adamw (8-bit moments)", ORANGE),
    "adamw, gradients clipped": ("AdamW, gradients clipped at norm 1", SKY),
    "stable_adamw": ("stable_adamw (update clipping)", BLUE),
}
_B2S = {0.9: (GREEN, ":"), 0.99: (SKY, "--"), 0.999: (VERMILION, "-")}


def runs_figure(runs: dict[str, np.ndarray], events: np.ndarray, followed: np.ndarray) -> Figure:
    """Loss and the embedding's RMS_t of one seed; runs[optimizer] is (2, steps)."""
    fig, axes = plt.subplots(2, 1, figsize=(8.4, 4.8), sharex=True, layout="constrained")
    for i, (name, (loss, rms)) in enumerate(runs.items()):
        label, colour = _OPTIMIZERS[name]
        for ax, curve in zip(axes, (loss, rms), strict=True):
            x = np.arange(START, curve.size)
            ax.plot(x, curve[START:], color=colour, lw=(2.2, 0.7)[i], label=label)
    top = 1.1 * axes[0].get_ylim()[1]
    axes[0].set(ylabel="loss", ylim=(0, top))
    for yes, marker, label in (
        (True, "v", "loss spike of AdamW that an RMS spike preceded"),
        (False, "x", "loss spike of AdamW without one"),
    ):
        at = events[followed == yes]
        if at.size:
            heights = np.full(at.shape, 0.96 * top)
            axes[0].plot(at, heights, marker, color=GREEN if yes else GREY, ms=5, label=label)
    _threshold(axes[1], "left")
    axes[1].set(ylabel="RMS, patch embedding", xlabel="step")
    for ax in axes:
        ax.axvspan(START, spikes.IGNORE, color="#F3F3F3", zorder=0)
        ax.set_xlim(START, None)
    axes[0].text(START + 15, 0.03 * top, "no spikes counted", color=GREY, fontsize=8)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def spike_figure(curves: dict[float, np.ndarray], at: int) -> Figure:
    """Around one spike, for each b2: loss, RMS_t of the embedding and of a middle layer."""
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3), layout="constrained")
    steps = np.arange(-BEFORE, AFTER)
    titles = ("loss", "RMS, patch embedding", "RMS, a middle layer")
    for b2, (loss, embedding, middle) in curves.items():
        colour, line = _B2S[b2]
        for ax, curve in zip(axes, (loss, embedding, middle), strict=True):
            ax.plot(
                steps, curve[at - BEFORE : at + AFTER], line, color=colour, label=rf"$\beta_2$ {b2}"
            )
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=9)
        ax.axvline(0, color=GREY, lw=0.8, ls=":")
        ax.set(xlabel="steps from the change", ylim=(0, None))
    axes[2].set_ylim(axes[1].get_ylim())  # one scale for both layers
    _threshold(axes[1])
    _threshold(axes[2])
    axes[0].legend()
    return fig


def _threshold(ax: Axes, side: str = "right") -> None:
    value = spikes.RMS_THRESHOLD
    ax.axhline(value, color=GREY, lw=0.8, ls="--")
    name = f" an RMS spike: {value} "
    style = {"color": GREY, "fontsize": 7, "ha": side, "va": "bottom"}
    ax.text(float(side == "right"), value, name, transform=ax.get_yaxis_transform(), **style)


def interventions_figure(counts: dict[str, dict[float, int]], losses: dict) -> Figure:
    """Loss spikes, and the last loss of each seed less a reference's: both[optimizer][b2]."""
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    b2s = sorted({b2 for by_b2 in counts.values() for b2 in by_b2})
    width = 0.8 / len(counts)
    for i, name in enumerate(counts):
        label, colour = _OPTIMIZERS[name]
        shown = [b2 for b2 in b2s if b2 in counts[name]]
        x = np.array([b2s.index(b2) for b2 in shown]) + (i - (len(counts) - 1) / 2) * width
        bars = axes[0].bar(x, [counts[name][b2] for b2 in shown], 0.9 * width, color=colour)
        bars.set_label(label)
        axes[0].bar_label(bars, fontsize=7)
        each = np.stack([losses[name][b2] for b2 in shown])  # points x seeds
        axes[1].bar(x, each.mean(1), 0.9 * width, color=colour, alpha=0.45)
        axes[1].plot(x, each, ".", color=colour, ms=5)
    titles = ("loss spikes, all seeds", "last loss less AdamW's at 0.999; dots: seeds")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_xticks(range(len(b2s)), [rf"$\beta_2$ = {b2}" for b2 in b2s])
        ax.set_title(title, loc="left", fontsize=9)
    axes[1].axhline(0, color=GREY, lw=0.8)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def sweeps_figure(sweeps: dict[str, dict[float, dict[float, int]]], changes: int) -> Figure:
    """Loss spikes by rate, batch and width, sweeps[what][b2][value], under the changes' number."""
    fig, axes = plt.subplots(1, len(sweeps), figsize=(8.4, 2.9), sharey=True, layout="constrained")
    for ax, (what, by_b2) in zip(axes, sweeps.items(), strict=True):
        for b2, counts in by_b2.items():
            colour, line = _B2S[b2]
            x = sorted(counts)
            ax.plot(x, [counts[v] for v in x], f"o{line}", color=colour, label=rf"$\beta_2$ {b2}")
        ax.axhline(changes, color=GREY, lw=0.8, ls=":", label="changes of the data")
        ax.set(xscale="log", xlabel=what)
        ax.set_xticks(x, [f"{v:g}" for v in x])
        ax.minorticks_off()
    axes[0].set(ylabel="loss spikes, all seeds", ylim=(-2, 1.1 * changes))
    axes[-1].legend(loc="center")
    return fig
