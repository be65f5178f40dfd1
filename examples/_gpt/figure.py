"""The picture of a run: loss curves, their difference, and where the bytes are."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from .report import unit  # noqa: E402
from .train import F32, LOWMEM  # noqa: E402

_INK, GREY, BLUE = "#000000", "#6B6B6B", "#0072B2"
# Okabe and Ito's colours, which colour-blind readers tell apart
_COLOURS = {F32: "#D55E00", LOWMEM: BLUE}
_NAMES = {F32: "optax, f32", LOWMEM: "optax_lowmem"}
# A slot and its scales share a hue; slots not named here take the spare ones in turn.
_SLOT_COLOURS = {
    "weights": "#0072B2", "gradients": "#CC79A7", "correction": "#56B4E9",
    "mu": "#E69F00", "nu": "#009E73", "trace": "#E69F00",
}  # fmt: skip
_SPARE = ("#E69F00", "#009E73", "#F0E442", "#999999")
_REACH = 0.5  # % of the loss: the least that the axis of differences spans
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 12, "text.color": _INK,
    "axes.labelcolor": _INK, "axes.edgecolor": "#c8ced6",
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    "grid.color": "#e6e9ee", "legend.frameon": False,
}  # fmt: skip


def draw(result: dict[str, Any], file: Path) -> None:
    """Draws the result of `report.summarise` into a PNG."""
    runs = result["runs"]
    both = len(runs) == 2
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(8, 4.8), layout="constrained")
        grid = figure.add_gridspec(
            2 if both else 1, 2, width_ratios=(1.45, 1), height_ratios=(3.4, 1) if both else (1,)
        )
        curves = figure.add_subplot(grid[0, 0])
        _draw_curves(curves, result)
        if both:
            _draw_difference(figure.add_subplot(grid[1, 0], sharex=curves), result)
            curves.tick_params(labelbottom=False)
        else:
            curves.set_xlabel("step")
        _draw_memory(figure.add_subplot(grid[:, 1]), runs)
        figure.suptitle(_message(result), x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(file, dpi=150, facecolor="white")
        plt.close(figure)


def _message(result: dict[str, Any]) -> str:
    """Say what the run shows: bytes of weights, gradients and state, and the change of the loss."""
    runs, settings = result["runs"], result["settings"]
    parameters = next(iter(runs.values()))["parameters"]
    model = f"{settings['optimizer']}, a GPT of {parameters / 1e6:.1f}M parameters"
    if len(runs) < 2:
        return f"{model}, {result['data']['source']}"
    share = runs[LOWMEM]["bytes_per_param"]["total"] / runs[F32]["bytes_per_param"]["total"]
    over = result["difference"]["percent"]
    return f"{share:.0%} of the bytes per parameter, loss {over:+.2f} %: {model}"


def _curves(run: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and validation losses [seeds, n]."""
    points = np.array([one["val_curve"] for one in run["by_seed"]])
    return points[0, :, 0], points[:, :, 1]


def _draw_curves(axes: plt.Axes, result: dict[str, Any]) -> None:
    for impl, run in result["runs"].items():
        ours = impl == LOWMEM
        steps, losses = _curves(run)
        # The wide line beneath and the thin one on top stay visible where they coincide.
        axes.plot(steps, losses.mean(0), color=_COLOURS[impl], lw=1.6 if ours else 5,
                  marker="o" if ours else None, ms=4, solid_capstyle="round",
                  label=f"{_NAMES[impl]}: {run['val_loss']:.4f}")  # fmt: skip
    seeds = len(result["seeds"])
    mean = f", mean of {seeds} seeds" if seeds > 1 else ""
    axes.set_title(f"Held-out loss, nats per {unit(result['settings'])}{mean}")
    axes.set_ylim(*_loss_limits(result))
    axes.grid(axis="y")
    axes.legend(loc="upper right", handlelength=2.4, labelcolor="linecolor")


def _loss_limits(result: dict[str, Any]) -> tuple[float, float]:
    """From below the lowest loss to the first loss after the start, which is off the scale."""
    losses = np.concatenate([_curves(run)[1] for run in result["runs"].values()])
    low, high = losses.min(), losses[:, 1:].max()
    margin = max(0.05, high - low)
    return low - 0.15 * margin, high + 0.35 * margin


def _draw_difference(axes: plt.Axes, result: dict[str, Any]) -> None:
    steps, plain = _curves(result["runs"][F32])
    difference = 100 * (_curves(result["runs"][LOWMEM])[1] - plain) / plain
    reach = max(_REACH, 1.25 * np.abs(difference).max())
    axes.axhline(0, color=_COLOURS[F32], lw=2)
    axes.fill_between(
        steps, difference.min(0), difference.max(0), color=_COLOURS[LOWMEM], alpha=0.2, lw=0
    )
    axes.plot(steps, difference.mean(0), color=_COLOURS[LOWMEM], lw=1.6, marker="o", ms=4)
    axes.grid(axis="y")
    axes.set_ylim(-reach, reach)
    seeds = "; band: all seeds" if len(difference) > 1 else ""
    axes.set_title(f"Difference from f32, %{seeds}")
    axes.set_xlabel("step")
    axes.set_xlim(0, steps[-1] * 1.02)


def _slot_order(runs: dict[str, Any]) -> list[str]:
    found = dict.fromkeys(slot for run in runs.values() for slot in run["bytes_per_param"])
    slots = [slot for slot in found if slot not in ("counters", "total")]
    first = ("weights", "gradients", "correction")
    return [s for s in first if s in slots] + sorted(s for s in slots if s not in first)


def _slot_colours(slots: list[str]) -> dict[str, str]:
    owners = dict.fromkeys(slot.removesuffix("_scale") for slot in slots)
    spare = (c for c in _SPARE if c not in {_SLOT_COLOURS.get(o) for o in owners})
    colours = {owner: _SLOT_COLOURS.get(owner) or next(spare, GREY) for owner in owners}
    return {slot: colours[slot.removesuffix("_scale")] for slot in slots}


def _draw_memory(axes: plt.Axes, runs: dict[str, Any]) -> None:
    slots = _slot_order(runs)
    colours = _slot_colours(slots)
    tallest = max(run["bytes_per_param"]["total"] for run in runs.values())
    for x, (impl, run) in enumerate(runs.items()):
        sizes, top = run["bytes_per_param"], 0.0
        for slot in slots:
            size, scales = sizes.get(slot, 0.0), slot.endswith("_scale")
            axes.bar(x, size, 0.84, top, color=colours[slot], alpha=0.55 if scales else 1,
                     edgecolor="white", linewidth=0 if scales else 0.8)  # fmt: skip
            if size > 0.03 * tallest:
                axes.text(x, top + size / 2, f"{slot}  {size:.2f}", ha="center", va="center",
                          color=_contrast(colours[slot]), fontsize=9.5)  # fmt: skip
            top += size
        share = f"  ({top / tallest:.0%})" if top < 0.999 * tallest else ""
        axes.text(x, top + 0.02 * tallest, f"{top:.2f}{share}", ha="center", va="bottom",
                  fontsize=15, fontweight="bold", color=_COLOURS[impl])  # fmt: skip
        axes.text(x, -0.02 * tallest, _NAMES[impl], ha="center", va="top", fontsize=11)
    axes.set_title("Bytes per parameter, with gradients")
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.set_ylim(0, 1.1 * tallest)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["left"]].set_visible(False)


def _contrast(colour: str) -> str:
    """Ink or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "white"
