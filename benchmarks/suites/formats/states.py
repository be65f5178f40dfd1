"""The stored states of `formats`: a compressed .npz, with what the run was."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.curves import read, write
from benchmarks.suites.formats.errors import Correction, Errors, errors
from benchmarks.suites.formats.formats import Copy
from optax_lowmem import codecs


@dataclasses.dataclass
class States:
    """A sample of AdamW's state after training, in f32 and as each copy stored it."""

    about: dict[str, Any]  # the run's settings, where it ran, and the leaves' paths and sizes
    true: dict[str, np.ndarray]  # slot -> f32 [chunks, length]
    leaf_of_chunk: np.ndarray  # index of each chunk's leaf
    stored: dict[Copy, tuple[np.ndarray, np.ndarray]]  # codes [chunks, length], and scales
    histograms: dict[str, np.ndarray]  # name -> counts over the whole state
    curves: dict[str, np.ndarray]  # name -> one value a look; `step` is the abscissa

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
        write(path, self.about, arrays)


@functools.partial(jax.jit, static_argnums=0)
def _decode(copies: tuple[Copy, ...], stored: list[Any]) -> list[jax.Array]:
    return [codecs.decode_array(c.codec, *x, c.group) for c, x in zip(copies, stored, strict=True)]


def load(path: Path) -> States:
    about, arrays = read(path)
    leaf_of_chunk = arrays.pop("leaf_of_chunk")
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        kind, _, name = key.partition("/")
        parts.setdefault(kind, {})[name] = values
    stored = {Copy.of(key): (codes, parts["scales"][key]) for key, codes in parts["codes"].items()}
    return States(about, parts["true"], leaf_of_chunk, stored, parts["histograms"], parts["curves"])
