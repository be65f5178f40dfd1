"""The style of every figure; `python -m tools.notebooks` writes it into the notebooks."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours, which colour-blind readers tell apart
BLACK, ORANGE, SKY, GREEN, BLUE = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE, GREY, PALE = "#D55E00", "#CC79A7", "#6B6B6B", "#E4E4E4"
plt.rcParams.update({
    "axes.axisbelow": True, "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlelocation": "left", "axes.titlesize": 10, "axes.titleweight": "bold",
    "figure.constrained_layout.use": True, "figure.dpi": 76, "figure.figsize": (7, 3),
    "figure.titlesize": 11, "figure.titleweight": "bold", "font.size": 9, "grid.color": PALE,
    "legend.frameon": False, "lines.linewidth": 1.6, "savefig.facecolor": "white",
})  # fmt: skip


def headline(fig, words):
    """Write a figure's message over it, at the left, in lines as wide as the figure."""
    fig.suptitle(textwrap.fill(words, int(11 * fig.get_figwidth())), x=0.01, ha="left")


def name_lines(ax, gap=10, size=8):
    """Write the label of each line of axes beside its end, at least `gap` points apart."""
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    ends = [np.asarray(line.get_xydata(), float) for line in lines]
    ends = [xy[np.isfinite(xy).all(axis=1)][-1] for xy in ends]
    low, high = ax.get_ylim()
    points = ax.transData.transform([(x, np.clip(y, low, high)) for x, y in ends])
    points = points[:, 1] * 72 / ax.figure.dpi
    order, blocks = np.argsort(points), []
    for wanted in points[order] - gap * np.arange(len(points)):
        blocks.append([wanted, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:  # too close: around their mean
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    places = np.repeat([at for at, _ in blocks], [n for _, n in blocks])
    places = (places + gap * np.arange(len(points)))[np.argsort(order)]
    for line, (x, y), point, place in zip(lines, ends, points, places, strict=True):
        ax.annotate(line.get_label(), (x, np.clip(y, low, high)), (6, place - point), va="center",
                    textcoords="offset points", color=line.get_color(), fontsize=size,
                    annotation_clip=False)  # fmt: skip


def band(ax, x, low, high, color, words=None):
    """Shade what lies between two curves, and say what it is at its left end."""
    ax.fill_between(x, low, high, color=color, alpha=0.18, lw=0)
    if words:
        top = np.broadcast_to(high, np.shape(x))[0]
        ax.annotate(words, (x[0], top), (3, 2), textcoords="offset points", color=GREY, fontsize=8)


def differences(ax, x, losses, lines, base, again, words="what another start does"):
    """Draw losses over a baseline's, in per cent, with the band of a run that differs by chance."""
    x, plain = np.asarray(x)[1:], np.asarray(losses[base], float)
    over = {
        name: 100 * (np.asarray(of, float) / plain[: len(of)] - 1) for name, of in losses.items()
    }
    chance = np.abs(over[again][1:]).max()
    ax.axhline(0, color=BLACK, lw=1)
    band(ax, x, -chance, chance, GREY, words)
    for name, (label, color) in lines.items():
        ax.plot(x[: len(over[name]) - 1], over[name][1:], color=color, label=label)
    name_lines(ax)
    return over, chance
