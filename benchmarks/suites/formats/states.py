"""The stored states of `formats`: a compressed .npz, with what the run was."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.suites.formats.errors import Correction, Errors, errors
from benchmarks.suites.formats.formats import Copy
from optax_lowmem import codecs

STATES = records.RESULTS / "coat_states.npz"


@dataclasses.dataclass
class States:
    """A sample of AdamW's state after training, in f32 and as each copy stored it.

    Attributes:
      about: the settings of the run, where it ran, and the paths and sizes of the leaves.
      true: slot -> f32 [chunks, length].
      leaf_of_chunk: index of each chunk's leaf.
      stored: copy -> its codes [chunks, length] and scales [chunks, groups].
      histograms: name -> counts over the whole state (`formats_errors.histograms`).
      curves: name -> one value a look; `step` is the abscissa.
    """

    about: dict[str, Any]
    true: dict[str, np.ndarray]
    leaf_of_chunk: np.ndarray
    stored: dict[Copy, tuple[np.ndarray, np.ndarray]]
    histograms: dict[str, np.ndarray]
    curves: dict[str, np.ndarray]

    @property
    def correction(self) -> Correction:
        """Of the step after which the state was stored."""
        return Correction.after(self.about["steps"], self.about["decays"])

    def values(self) -> dict[Copy, np.ndarray]:
        found = _decode(tuple(self.stored), list(self.stored.values()))
        return dict(zip(self.stored, jax.device_get(found), strict=True))

    def errors(self, values: dict[Copy, np.ndarray]) -> Errors:
        """Of values of the sample's shape."""
        sizes = self.about["sizes"]
        return errors(self.true, values, self.leaf_of_chunk, sizes, self.correction)

    def save(self, path: Path) -> None:
        arrays = {f"true/{slot}": x for slot, x in self.true.items()}
        for c, (codes, scales) in self.stored.items():
            arrays |= {f"codes/{c.key}": codes, f"scales/{c.key}": scales}
        arrays |= {f"histograms/{name}": np.int32(x) for name, x in self.histograms.items()}
        arrays |= {f"curves/{name}": np.float32(x) for name, x in self.curves.items()}
        arrays["leaf_of_chunk"] = self.leaf_of_chunk.astype(np.int16)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, about=np.array(json.dumps(self.about)), **arrays)


@functools.partial(jax.jit, static_argnums=0)
def _decode(copies: tuple[Copy, ...], stored: list[Any]) -> list[jax.Array]:
    return [codecs.decode_array(c.codec, *x, c.group) for c, x in zip(copies, stored, strict=True)]


def load(path: Path = STATES) -> States:
    parts: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        leaf_of_chunk = file["leaf_of_chunk"]
        for key in file.files:
            kind, _, name = key.partition("/")
            if name:
                parts.setdefault(kind, {})[name] = file[key]
    stored = {Copy.of(key): (codes, parts["scales"][key]) for key, codes in parts["codes"].items()}
    return States(about, parts["true"], leaf_of_chunk, stored, parts["histograms"], parts["curves"])
