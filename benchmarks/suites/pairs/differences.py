"""Differences of paired runs along their curves, and the interval that their seeds give."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.claims.equivalence import Interval
from benchmarks.curves import Curves

Run = dict[str, np.ndarray]  # curves of a run by name


@dataclasses.dataclass(frozen=True)
class Differences:
    """Held-out losses of a variant over those of another, from the same seeds."""

    steps: np.ndarray  # of the looks, but for the first, where no step was taken yet
    each: np.ndarray  # [seeds, looks], in percent of the mean loss of the other at that look

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


def _finished(stored: Curves, base: str, ours: str) -> list[tuple[Run, Run]]:
    """Return the curves of both, of all seeds that both have run to the end."""
    runs: dict[str, dict[str, Run]] = {}
    for label, curve in stored.runs.items():
        name, _, seed = label.rpartition(" seed ")
        runs.setdefault(seed, {})[name] = curve
    pairs = [(own[base], own[ours]) for own in runs.values() if {base, ours} <= own.keys()]
    longest = max(len(plain["val_step"]) for plain, _ in pairs)
    return [pair for pair in pairs if all(len(one["val_step"]) == longest for one in pair)]


def _over(pairs: list[tuple[Run, Run]], curve: str) -> np.ndarray:
    """Return ours less the baseline's in percent of the baselines' mean, [seeds, points]."""
    plain, own = (np.array([pair[i][curve] for pair in pairs], float) for i in (0, 1))
    return 100 * (own - plain) / np.abs(plain.mean(0))


def differences(stored: Curves, base: str, ours: str) -> Differences:
    """Return the differences over all seeds that both have run to the end."""
    pairs = _finished(stored, base, ours)
    return Differences(pairs[0][0]["val_step"][1:], _over(pairs, "val_loss")[:, 1:])


def early(stored: Curves, base: str, ours: str, window: tuple[int, int]) -> np.ndarray:
    """Return the differences of training losses of each seed, as `differences`.

    Each is the mean of the points whose steps, the last of those that they are means of, lie in the
    window.
    """
    pairs = _finished(stored, base, ours)
    steps = pairs[0][0]["step"]
    first, last = window
    return _over(pairs, "train_loss")[:, (first <= steps) & (steps <= last)].mean(1)
