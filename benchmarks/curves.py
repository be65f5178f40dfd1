"""Stored curves of training runs: a compressed .npz of f32, with what the runs were."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import records

CURVES = records.RESULTS / "q_adam_mini.npz"
_ABOUT = "about"


def write(path: Path, about: Any, arrays: dict[str, Any], save: Any = np.savez_compressed) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, **{_ABOUT: np.array(json.dumps(about))}, **arrays)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what `write` wrote: what arrays are of, and the arrays."""
    with np.load(path) as stored:
        arrays = {key: stored[key] for key in stored.files if key != _ABOUT}
        return json.loads(str(stored[_ABOUT])), arrays


def alike(stored: Any, now: Any) -> bool:
    """Compare settings that were read with those that would be written: JSON has no tuples."""
    return bool(stored == json.loads(json.dumps(now)))


WHERE = ("device", "jax", "commit")  # of runs; all else that is said of them are their settings
MERGED = "merged"  # where runs other than the first ones ran


def merged(
    stored: dict[str, Any], now: dict[str, Any], labels: Iterable[str], staying: Collection[str]
) -> dict[str, Any] | None:
    """Return what is said of stored runs, of which some are `staying`, and of those that join.

    None if no stored run stays, or the settings of both differ.
    """

    def settings(of: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key not in (*WHERE, MERGED)}

    def where(of: dict[str, Any]) -> dict[str, Any]:
        return {key: of[key] for key in WHERE if key in of}

    if not staying or not alike(settings(stored), settings(now)):
        return None
    others = {json.dumps(where(one)): one["variants"] for one in stored.get(MERGED, [])}
    if where(now) != where(stored):
        place = json.dumps(where(now))
        variants = {label.partition(" seed ")[0] for label in labels}
        others[place] = sorted(variants.union(others.get(place, ())))
    entries = [json.loads(place) | {"variants": own} for place, own in others.items()]
    return settings(stored) | where(stored) | ({MERGED: entries} if entries else {})


@dataclasses.dataclass
class Curves:
    about: dict[str, Any]  # the settings that the runs share, and where they ran
    runs: dict[str, dict[str, np.ndarray]]  # variant -> {curve: values}; `step` is an abscissa

    def save(self, path: Path) -> None:
        """Writes the runs beside stored ones of the same settings; of others, it starts anew."""
        if path.exists():
            stored = load(path)
            staying = stored.runs.keys() - self.runs.keys()
            about = merged(stored.about, self.about, self.runs, staying)
            if about is not None:
                self.about, self.runs = about, stored.runs | self.runs
        arrays = {
            f"{variant}/{name}": values.astype(np.int32 if "step" in name else np.float32)
            for variant, curves in self.runs.items()
            for name, values in curves.items()
        }
        write(path, self.about, arrays)


def load(path: Path = CURVES) -> Curves:
    about, arrays = read(path)
    runs: dict[str, dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        variant, name = key.rsplit("/", 1)
        runs.setdefault(variant, {})[name] = values
    return Curves(about, runs)


def store(path: Path, part: str | None, flags: dict[str, Any], runs: dict[str, Any]) -> None:
    """Writes a part's curves beside those of the others; of other settings, it starts anew.

    Without a part, they are all that the file has.
    """
    if part is None:
        return Curves(flags, dict(runs)).save(path)
    found = load(path) if path.exists() else Curves({}, {})
    added = {f"{part}/{name}": curves for name, curves in runs.items()}
    own = {label for label in found.runs if label.partition("/")[0] == part}
    about = merged(found.about.get(part, {}), flags, runs, own - added.keys())
    kept = {label: run for label, run in found.runs.items() if about or label not in own}
    return Curves(found.about | {part: about or flags}, kept | added).save(path)
