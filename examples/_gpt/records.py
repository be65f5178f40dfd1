"""Benchmark records of a run, in the format of the repository's benchmarks/."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from .config import OPTIMIZERS, PRESETS, Settings
from .train import F32

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the repository, beside the library
from benchmarks import records as stored  # noqa: E402

_UNITS = {
    "val_loss": "nats/token",
    "tokens_per_s": "tokens/s",
    "bytes_per_param": "bytes",
    "peak_bytes": "bytes",
}


def case(settings: Settings) -> str:
    """The preset and the optimizer, with what the run has of its own: "demo steps=1000/adamw"."""
    preset = PRESETS[settings.preset]
    usual = {"learning_rate": preset.learning_rate * OPTIMIZERS[settings.optimizer].rate_factor}
    names = ["context", "batch", "steps", "tokenizer", "text"]
    names += ["vocab"] if settings.tokenizer == "bpe" else []
    usual |= {name: getattr(preset, name) for name in names}
    own = {name: getattr(settings, name) for name in usual}
    changed = [f"{name}={value}" for name, value in own.items() if value != usual[name]]
    return " ".join([settings.preset, *changed]) + f"/{settings.optimizer}"


def recorded_as(impl: str, implementation: str) -> str:
    """Return a run's name in records: lowmem-xla where lowmem.step was told to use XLA."""
    return impl if impl == F32 or implementation == "auto" else f"{impl}-{implementation}"


def records(
    settings: Settings, corpus: dict[str, Any], seed: int, runs: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Benchmark records of one seed, one an implementation and metric."""
    flags = dataclasses.asdict(settings)
    del flags["preset"], flags["optimizer"]
    flags |= {"text": corpus["source"], "train_tokens": corpus["train_tokens"]}
    found = []
    for impl, run in runs.items():
        flags["parameters"] = run["parameters"]
        values = {
            "val_loss": run["val_loss"],
            "tokens_per_s": run["tokens_per_s"],
            "bytes_per_param": run["bytes_by_slot"]["total"] / run["parameters"],
            "peak_bytes": run["peak_bytes"],
        }
        name = recorded_as(impl, settings.implementation)
        measured = functools.partial(stored.record, "train", case(settings), name)
        found += [
            measured(metric, value, _UNITS[metric], seed=seed, flags=dict(flags))
            for metric, value in values.items()
        ]
    return found


def append(
    settings: Settings,
    corpus: dict[str, Any],
    seed: int,
    runs: dict[str, dict[str, Any]],
    file: Path,
) -> None:
    """Appends the records of one seed to a file of JSON lines."""
    stored.append(records(settings, corpus, seed, runs), file)
