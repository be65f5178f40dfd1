"""The picture of docs/ on loss spikes, from the curves of `spikes`."""

from typing import Any

import numpy as np

from benchmarks.style import BLUE, GREY, VERMILION, headline, plt
from benchmarks.suites.spikes import bench, runs
from optax_lowmem import diagnostics
from optax_lowmem.diagnostics.spikes import IGNORE, RMS_THRESHOLD

SEED = 0  # stable_adamw has no spike with it


def run() -> Any:
    """Draw the loss and the embedding's RMS_t of AdamW and stable_adamw with one seed."""
    with np.load(bench.CURVES) as file:
        curves = {name: file[f"{name}/{bench.point()}"].astype(np.float64)
                  for name in ("adamw", "stable_adamw")}  # fmt: skip
    found = runs.predicted(*curves["adamw"][:2])
    left = sum(one.size for one in runs.found_spikes(curves["stable_adamw"][0]))
    fig, axes = plt.subplots(2, 1, figsize=(7.2, 4.6), sharex=True)
    steps = np.arange(curves["adamw"].shape[-1])[IGNORE:]
    for (name, of), color in zip(curves.items(), (VERMILION, BLUE), strict=True):
        for ax, one in zip(axes, of[:2, SEED, IGNORE:], strict=True):
            ax.plot(steps, one, color=color, lw=1.3 if name == "adamw" else 0.7)
    spikes = diagnostics.loss_spikes(curves["adamw"][0, SEED])
    top = curves["adamw"][0, SEED, IGNORE:].max()
    axes[0].plot(spikes, np.full(spikes.shape, 1.08 * top), "v", color=GREY, ms=5)
    axes[0].text(IGNORE, 1.15 * top, "loss spikes of AdamW:", size=8, color=GREY, va="bottom")
    axes[0].text(3150, 0.72 * top, "AdamW", color=VERMILION, size=9)
    axes[0].text(2700, 0.06 * top, "stable_adamw", color=BLUE, size=9)
    axes[0].set(ylim=(0, 1.3 * top), title="loss")
    axes[1].axhline(RMS_THRESHOLD, color=GREY, lw=1, ls="--")
    axes[1].set(
        xlabel="step", title=f"RMS of the patch embedding; dashed: an RMS spike, {RMS_THRESHOLD}"
    )
    headline(fig, f"All {found.spikes.size} loss spikes of AdamW follow an RMS "
                  f"spike; update clipping leaves {left}")  # fmt: skip
    assert found.follows.all() and left < 3
    return fig


FIGURES = {"stable_adamw_run": run}
