"""Stored curves for gaussws.ipynb, and the bounds that it asserts on them."""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.claims import gaussws as paper
from benchmarks.curves import Curves
from benchmarks.suites.gaussws import casts as gaussws_casts
from benchmarks.suites.gaussws.training import KINDS, STATISTICS
from optax_lowmem import gaussws

MOST = STATISTICS.index("max")


class Bounds(NamedTuple):
    """Bounds on the runs of one size; shares of a loss.

    Attributes:
      follows: [od] over the baseline, at most.
      follows_all: [all] over the baseline, at most.
      beside_diffq: both over DiffQ[all], at most, if chance does not do more.
      safe: a cast to the formats of Table 2 over no cast, at most.
      towards: mean b_t of [all] at the end, at most.
    """

    follows: float
    follows_all: float
    beside_diffq: float
    safe: float
    towards: float


# What is printed is whether losses are within 1 %, as the paper's are, and under DiffQ's; a tiny
# model, of a few hundred blocks, feels noise more. DiffQ's are the lower ones: what is asserted is
# that they are not far.
FULL = Bounds(paper.FOLLOWS, paper.FOLLOWS, 1.5 * paper.FOLLOWS, paper.SAFE, paper.TOWARDS)
TINY = Bounds(0.02, 0.04, 0.03, 2 * paper.SAFE, paper.TOWARDS)


def bounds(about: dict[str, Any]) -> Bounds:
    """Those of the preset that made the curves."""
    return FULL if about["preset"] == "llama-27m" else TINY


def of_part(stored: Curves, part: str) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """The runs of a part by their variant, and what they share."""
    mine = {k.partition("/")[2]: v for k, v in stored.runs.items() if k.startswith(f"{part}/")}
    return mine, stored.about[part]


def safe_formats(run: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """kind -> the format of Table 2 for each layer's largest b_t."""
    found = {}
    for kind in KINDS:
        if f"bits_{kind}" in run:
            tops = run[f"bits_{kind}"][-1][:, MOST]
            formats = [gaussws.safe_format(float(top)) for top in tops]
            found[kind] = [gaussws_casts.name_of(f.exponent, f.mantissa) for f in formats]
    return found


def casts(run: dict[str, np.ndarray], parts: str) -> dict[str, float]:
    """format, or `safe`, -> the share by which a cast of these parts is over no cast."""
    clean = float(run[f"cast_{gaussws_casts.CLEAN}"][0])
    start = f"cast_{parts} "
    return {
        name.removeprefix(start): paper.over(float(values[0]), clean)
        for name, values in run.items()
        if name.startswith(start)
    }


def of_rates(
    runs: dict[str, dict[str, np.ndarray]],
) -> dict[str, dict[float, tuple[float, float]]]:
    """variant -> factor -> (last, least) held-out loss."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for label, curves in runs.items():
        name, _, factor = label.rpartition(" x")
        losses = curves["val_loss"]
        found.setdefault(name, {})[float(factor)] = (float(losses[-1]), float(np.nanmin(losses)))
    return found
