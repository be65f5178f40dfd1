"""State of unfinished runs in a folder, to go on from: written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

Arrays = dict[str, np.ndarray]
_ABOUT = "about"


def write(path: Path, about: dict[str, Any], arrays: Arrays) -> None:
    """Write arrays of any dtype, and what is to be known of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtypes = {name: str(x.dtype) for name, x in arrays.items()}
    # NumPy's files have no bf16
    raw = {name: np.ascontiguousarray(x)[None].view(np.uint8) for name, x in arrays.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    stored = {"own": about, "dtypes": dtypes, "shapes": shapes}
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **{_ABOUT: np.array(json.dumps(stored))}, **raw)
    unfinished.replace(path)


def read(path: Path) -> tuple[dict[str, Any], Arrays] | None:
    """Return what `write` wrote, or None."""
    if not path.exists():
        return None
    with np.load(path) as file:
        stored = json.loads(str(file[_ABOUT]))
        arrays = {
            name: file[name].view(np.dtype(dtype)).reshape(stored["shapes"][name])
            for name, dtype in stored["dtypes"].items()
        }
    return stored["own"], arrays


def flattened(name: str, tree: Any) -> Arrays:
    """The leaves of a tree as arrays with names."""
    return {f"{name}:{i}": np.asarray(x) for i, x in enumerate(jax.device_get(leaves(tree)))}


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def restored(name: str, arrays: Arrays, like: Any) -> Any:
    """The tree of `flattened`, on the device; `like` has its shapes."""
    found = [arrays[f"{name}:{i}"] for i in range(len(leaves(like)))]
    for array, leaf in zip(found, leaves(like), strict=True):
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise SystemExit(
                f"{name}: stored {array.dtype}{array.shape}, the run has {leaf.dtype}{leaf.shape}; "
                "choose another --folder for another run"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(x) for x in found])
