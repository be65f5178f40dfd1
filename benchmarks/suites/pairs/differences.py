"""Differences of paired runs along their curves, and the interval that their seeds give."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.claims.equivalence import Interval
from benchmarks.curves import Curves


@dataclasses.dataclass(frozen=True)
class Differences:
    """Held-out losses of a variant over those of another, from the same seeds.

    Attributes:
      steps: of the looks, but for the first, where no step was taken yet.
      each: [seeds, looks], in percent of the mean loss of the other at that look.
    """

    steps: np.ndarray
    each: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.each.mean(0)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Low and high end at each look of the interval of 90 %; None of one seed."""
        if len(self.each) < 2:
            return None
        found = [Interval.of(list(map(float, one))) for one in self.each.T]
        return np.array([one.low for one in found]), np.array([one.high for one in found])


def differences(stored: Curves, base: str, ours: str) -> Differences:
    """Return the differences over all seeds that both have run to the end."""
    runs: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for label, curve in stored.runs.items():
        name, _, seed = label.rpartition(" seed ")
        runs.setdefault(seed, {})[name] = curve
    pairs = [(own[base], own[ours]) for own in runs.values() if {base, ours} <= own.keys()]
    longest = max(len(plain["val_step"]) for plain, _ in pairs)
    pairs = [pair for pair in pairs if all(len(one["val_step"]) == longest for one in pair)]
    plain, own = (np.array([pair[i]["val_loss"] for pair in pairs], float) for i in (0, 1))
    each = 100 * (own - plain) / np.abs(plain.mean(0))
    return Differences(pairs[0][0]["val_step"][1:], each[:, 1:])
