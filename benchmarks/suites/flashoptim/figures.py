"""The pictures of docs/ on FlashOptim: computed here, since they need no record."""

from typing import Any

import numpy as np

from benchmarks import style
from benchmarks.style import plt
from benchmarks.suites.flashoptim import bench

_EXACT = 1e-12  # where an error of zero is drawn
_SCHEMES = {
    "none": ("16 bits: no correction", style.BLACK),
    "float": ("32: same float", style.ORANGE),
    "ulp-24": ("24: paper's", style.SKY),
    "bits-24": ("24: ours", style.BLUE),
    "ulp-32": ("32: paper's", style.PURPLE),
    "bits-32": ("32: ours", style.VERMILION),
}


def reconstruction(samples: int = 2**16) -> Any:
    errors = {target: bench.reconstruction_error(target, samples) for target in bench.DTYPES}
    of_24 = errors["bf16"]["bits-24"][bench.normal_range("bf16")].max()
    assert (errors["bf16"]["bits-32"] == 0).all()
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for ax, (target, by_scheme), limits in zip(
        axes, errors.items(), ((-150, 128), (-40, 17)), strict=True
    ):
        for name, error in by_scheme.items():
            label, color = _SCHEMES[name]
            seen = (bench.EXPONENTS >= limits[0]) & (bench.EXPONENTS <= limits[1])
            shown = np.maximum(error, _EXACT)[seen]
            ax.plot(bench.EXPONENTS[seen], shown, color=color, label=label)
        ax.set(yscale="log", ylim=(4e-13, 4), xlim=limits, title=f"weights in {target.upper()}")
        ax.set_xlabel("exponent of the f32 weight")
        low = bench.NORMAL[target][0]
        ax.axvspan(limits[0], low, color=style.PALE, alpha=0.6, zorder=0, lw=0)
        ax.text(limits[0] + 1, 2, "denormal" if target == "bf16" else "denormal or below",
                color=style.GREY, size=7, va="bottom")  # fmt: skip
        ax.minorticks_off()
        style.name_lines(ax)
    axes[0].set_yticks([_EXACT, 1e-9, 1e-6, 1e-3, 1], ["exact", "1e-9", "1e-6", "1e-3", "1"])
    axes[0].set_ylabel("mean relative error")
    reason = "an FP16 number is not\nhalf an f32 number: ours\nis the paper's scheme"
    axes[1].text(-13, 2e-11, reason, size=8, color=style.GREY)
    style.headline(fig, f"8 more bits keep a weight to {1e6 * of_24:.0f} parts in a million, "
                  "16 more keep all of it")  # fmt: skip
    return fig


FIGURES = {"fig3_reconstruction": reconstruction}
