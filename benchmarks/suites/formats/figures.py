"""The picture of docs/ on formats of moments, from the records of `formats`."""

from typing import Any

import numpy as np

from benchmarks.claims import some
from benchmarks.records import all_records, newest
from benchmarks.style import BLUE, GREY, ORANGE, headline, plt
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.formats import FLASH, MU, NEAREST, NU, STOCHASTIC
from benchmarks.suites.formats.tables import LOOPS, measured

_WAYS = {"once": ("|", GREY), NEAREST: ("o", ORANGE), STOCHASTIC: ("o", BLUE)}  # marker, color


def equal_bytes() -> Any:
    run = some(measured(newest(all_records(), bench="formats")))
    found = {way: run.matrix(f"{way} at {formats.BUDGET}", "median_nmse") for way in _WAYS}
    fig, axes = plt.subplots(2, 1, figsize=(7.2, 5.6), sharex=True)
    for ax, slot, title in zip(axes, (MU, NU), ("first moment", "second moment"), strict=True):
        alone = {
            way: {pair[slot == NU]: value for pair, value in of.items()
                  if pair[slot == MU] == "f32" and pair[slot == NU] != "f32"}
            for way, of in found.items()
        }  # fmt: skip
        best = alone[NEAREST] | alone[STOCHASTIC]
        names = sorted(best, key=best.get)
        for way, (marker, color) in _WAYS.items():
            values = [alone[way].get(name, np.nan) for name in names]  # as published: to nearest
            label = LOOPS[way].replace("once", "encoded once")
            ax.plot(values, range(len(names)), marker, color=color, ms=6, mew=2, label=label)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set(xscale="log", title=f"{title} in 8 bits, the other in f32")
        if slot == NU:
            assert alone[STOCHASTIC][formats.E4M3_X] < best[formats.E4M3]
            assert names.index(FLASH) < names.index(formats.E4M3_X)
            assert best[FLASH] < alone[NEAREST][FLASH]
    axes[1].set_xlabel("median normalised squared error of Adam's step; 1.03 bytes per value")
    axes[0].legend(loc="upper right", fontsize=8)
    headline(fig, "One encoding shows little: in closed loop the second moment needs stochastic "
                  "rounding, the first does not")  # fmt: skip
    return fig


FIGURES = {"coat_states_equal_bytes": equal_bytes}
