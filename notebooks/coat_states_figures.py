"""The pictures of coat_states.ipynb, in Okabe and Ito's colours."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from flashoptim_figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

_SLOTS = {"mu": ("m", BLUE), "nu": ("v", VERMILION)}
_LINES = (BLACK, GREY, BLUE, SKY, VERMILION, GREEN, PURPLE, ORANGE)
_MOST_LOG = 8.0  # a cell of a heat map is capped here, in decades over the smallest


def _titled(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=9)
    ax.set(xlabel=x, ylabel=y)


def spans_figure(
    counts: Mapping[str, np.ndarray],
    decades: np.ndarray,
    exponents: np.ndarray,
    format_range: float,
) -> Figure:
    """Figure 2: what groups span against what E4M3 spans, and k."""
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    for ax, name, edges in ((axes[0], "span", decades), (axes[1], "k", exponents)):
        for slot, (label, colour) in _SLOTS.items():
            share = 100 * counts[f"{slot}/{name}"] / counts[f"{slot}/{name}"].sum()
            ax.stairs(share, 10.0**edges, color=colour, fill=True, alpha=0.35)
            ax.stairs(share, 10.0**edges, color=colour, lw=1.2, label=label)
        ax.set(xscale="log", ylim=(0, None))
    axes[0].axvline(format_range, color=BLACK, lw=1, ls="--", label="E4M3 spans")
    axes[0].set_xlim(1, 1e9)
    axes[1].axvline(1, color=BLACK, lw=1, ls=":", label="no expansion")
    axes[1].set_xlim(0.3, 100)
    _titled(axes[0], "dynamic range (Figure 2a)", "max / min of a group of 128", "% of groups")
    _titled(axes[1], "exponent of the expansion (Figure 2c)", "k of a group", "% of groups")
    for ax in axes:
        ax.legend()
    return fig


def expansion_figure(
    usage: Mapping[str, Mapping[str, np.ndarray]],
    relative: Mapping[str, Mapping[str, np.ndarray]],
    bins: np.ndarray,
) -> Figure:
    """Figure 3: codes that are used, and the error by magnitude, with and without expansion."""
    fig, grid = plt.subplots(2, 2, figsize=(9.2, 5.6), layout="constrained")
    for row, (slot, (letter, _)) in zip(grid, _SLOTS.items(), strict=True):
        for (name, share), colour in zip(usage[slot].items(), (GREY, BLUE), strict=True):
            row[0].stairs(100 * share, np.arange(len(share) + 1) - 0.5, color=colour,
                          fill=True, alpha=0.3)  # fmt: skip
            row[0].stairs(100 * share, np.arange(len(share) + 1) - 0.5, color=colour, label=name)
            centres = 10 ** ((bins[1:] + bins[:-1]) / 2)
            row[1].plot(centres, 100 * relative[slot][name], color=colour, label=name)
        row[1].set(xscale="log", yscale="log")
        row[1].set_yticks([0.3, 1, 3, 10])
        row[1].yaxis.set_major_formatter(ScalarFormatter())
        row[1].yaxis.set_minor_formatter(NullFormatter())
        _titled(row[0], f"codes of {letter}", "code (126 is the group's maximum)",
                "% of elements")  # fmt: skip
        _titled(row[1], f"error of {letter}", f"|{letter}| over its group's maximum",
                "RMS relative error, %")  # fmt: skip
        row[0].legend()
        row[1].legend()
    return fig


def tables_figure(
    ours: Mapping[tuple[str, str], float], paper: Mapping[tuple[str, str], float], base: tuple
) -> Figure:
    """Tables 1 and 9 over E4M3's error, ours and the paper's."""
    names = list(dict.fromkeys(mu for mu, _ in ours))
    fig, axes = plt.subplots(1, 2, figsize=(9.8, 4.2), layout="constrained")
    for ax, found, title in ((axes[0], ours, "here"), (axes[1], paper, "COAT's Tables 1 and 9")):
        grid = np.array([[found.get((m, v), np.nan) / found[base] for v in names] for m in names])
        _heat(ax, grid, names, names, "{:.2f}".format)
        ax.set_title(f"{title}: MSE of the step over E4M3's", loc="left", fontsize=9)
    return fig


def _heat(
    ax: Axes,
    grid: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    write: Callable[[float], str],
) -> None:
    least = np.nanmin(grid)
    most = min(np.nanmax(grid), least * 10**_MOST_LOG)
    ax.imshow(grid, norm=LogNorm(least, most), cmap="viridis_r", aspect="auto")
    ax.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel="second order (v)", ylabel="first order (m)")
    ax.grid(visible=False)
    middle = np.sqrt(least * most)
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            colour = "white" if value > middle else "black"
            ax.text(j, i, write(value), ha="center", va="center", color=colour, fontsize=7)


def _three_digits(x: float) -> str:
    return f"{x:.3g}" if x < 999.5 else f"{x:.0f}"


def equal_bytes_figure(
    grids: Mapping[str, tuple[Sequence[str], Sequence[str], np.ndarray]], unit: float
) -> Figure:
    """Every pair at equal bytes: encoded once, and in closed loop."""
    fig, axes = plt.subplots(len(grids), 1, figsize=(8.6, 4.6 * len(grids)), layout="constrained")
    for ax, (title, (rows, columns, grid)) in zip(axes, grids.items(), strict=True):
        _heat(ax, grid / unit, rows, columns, _three_digits)
        ax.set_title(f"{title}: median NMSE of the step, in {unit:.0e}", loc="left", fontsize=9)
    return fig


def curves_figure(curves: Mapping[str, np.ndarray]) -> Figure:
    """Draw the errors of the optimizers' stored states over training."""
    fig, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    names = [name for name in curves if name != "step"]
    for name, colour in zip(names, _LINES, strict=False):
        ax.plot(curves["step"], curves[name], "o-", ms=3, lw=1.4, color=colour, label=name)
    ax.set(yscale="log")
    _titled(ax, "closed loop, each with its own groups and rounding", "steps",
            "median NMSE of the step")  # fmt: skip
    fig.legend(loc="outside right upper")
    return fig
