"""The pictures of docs/ on GaussWS, from the curves of `gaussws`."""

from typing import Any

import numpy as np

from benchmarks import curves, style
from benchmarks.claims.gaussws import ALL, BASE, DIFFQ, MATRICES, OD, OTHER_START
from benchmarks.excerpts import held_out, of_part
from benchmarks.style import plt
from benchmarks.suites.gaussws.bench import CURVES
from benchmarks.suites.gaussws.training import STATISTICS

_COLORS = dict(zip(MATRICES, (style.SKY, style.BLUE, style.PURPLE, style.ORANGE, style.GREY,
                           style.BLACK, style.VERMILION), strict=True))  # fmt: skip


def losses() -> Any:
    runs = of_part(curves.load(CURVES), "run")
    found = held_out(runs)
    steps = found.pop("step")
    noisy = {name: runs[name]["sampled_loss"] for name in (OD, ALL, DIFFQ)}
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    lines = {OD: ("GaussWS [od]", style.BLUE), ALL: ("GaussWS [all]", style.GREEN),
             DIFFQ: ("DiffQ [all]", style.VERMILION)}  # fmt: skip
    over, _ = style.differences(axes[0], steps, found, lines, BASE, OTHER_START)
    kept = {BASE: found[BASE], OTHER_START: found[OTHER_START]}
    style.differences(axes[1], steps, kept | noisy, lines, BASE, OTHER_START, None)
    axes[0].set(title="weights without noise", xlabel="step",
                ylabel="held-out loss, % over no noise")  # fmt: skip
    axes[1].set(title="weights with noise, as trained", xlabel="step")
    style.headline(fig, f"Training on noisy weights costs {over[OD][-1]:.1f} % of the loss for "
                        f"[od], {over[ALL][-1]:.1f} % for [all]")  # fmt: skip
    return fig


def bits() -> Any:
    run, mean = of_part(curves.load(CURVES), "run")[ALL], STATISTICS.index("mean")
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    for kind, color in _COLORS.items():
        of = run[f"bits_{kind}"][..., mean]
        axes[0].plot(run["val_step"], of.mean(1), color=color, label=kind)
        axes[1].plot(of[-1], "o-", color=color, ms=4, label=kind)
    style.name_lines(axes[1])  # at the left they end in each other's places
    axes[0].set(title="mean b_t, colours as at the right", xlabel="step", ylabel="bits")
    axes[1].set(title="at the end, by block", xlabel="block")
    whole = np.mean([run[f"bits_{kind}"][..., mean] for kind in MATRICES], axis=(0, 2))
    style.headline(fig, f"Bitwidths fall from {whole[0]:.0f} to {whole[-1]:.1f}; "
                  "which matrices keep more depends on the model")  # fmt: skip
    return fig


FIGURES = {"gaussws_losses": losses, "gaussws_bits": bits}
