"""Benchmark records of a run, in the format of the repository's benchmarks/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the repository, beside the library
from benchmarks import records as stored  # noqa: E402

_UNITS = {
    "val_loss": "nats/token",
    "tokens_per_s": "tokens/s",
    "bytes_per_param": "bytes",
    "peak_bytes": "bytes",
}


def records(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Benchmark records, one a seed, implementation and metric."""
    settings = result["settings"]
    flags = {k: v for k, v in settings.items() if k not in ("preset", "optimizer")}
    flags["text"] = result["data"]["source"]
    case = f"{settings['preset']}/{settings['optimizer']}"
    found = []
    for impl, run in result["runs"].items():
        for seed, one in zip(result["seeds"], run["by_seed"], strict=True):
            values = {
                "val_loss": one["val_loss"],
                "tokens_per_s": one["tokens_per_s"],
                "bytes_per_param": run["bytes_per_param"]["total"],
                "peak_bytes": run["peak_bytes"],
            }
            found += [
                stored.record(
                    "train", case, impl, metric, value, _UNITS[metric], seed=seed, flags=flags
                )
                for metric, value in values.items()
            ]
    return found


def append(result: dict[str, Any], file: Path) -> None:
    """Appends the records to a file of JSON lines."""
    stored.append(records(result), file)
