"""Benchmark records of a run, one JSON object a line."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of the code that runs, or 'unknown' outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


_UNITS = {
    "val_loss": "nats/token",
    "tokens_per_s": "tokens/s",
    "bytes_per_param": "bytes",
    "peak_bytes": "bytes",
}


def records(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Benchmark records, one a seed, implementation and metric."""
    settings = result["settings"]
    common = {
        "device": result["machine"]["device"],
        "jax": result["versions"]["jax"],
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "flags": {k: v for k, v in settings.items() if k not in ("preset", "optimizer")}
        | {"text": result["data"]["source"]},
    }
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
            for metric, value in values.items():
                head = {"bench": "train", "case": case, "impl": impl, "metric": metric}
                tail = {"value": value, "unit": _UNITS[metric], "seed": seed}
                found.append(head | tail | common)
    return found


def append(result: dict[str, Any], file: Path) -> None:
    """Appends the records to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in records(result))
