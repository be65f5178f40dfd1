"""Summary of the measurements of runs, and the table of it."""

import dataclasses
import functools
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from .config import Settings
from .train import F32, LOWMEM, Run

LABELS = {F32: "f32", LOWMEM: "low memory"}
_OF_PROGRAM = ("compile_s", "peak_bytes", "parameters")


def unit(settings: dict[str, Any]) -> str:
    """Return what a token of a run is, for losses: a byte or a token of its BPE."""
    return "byte" if settings["tokenizer"] == "byte" else "token"


def run_numbers(run: Run, settings: Settings) -> dict[str, Any]:
    """One run of one seed, ready for JSON."""
    return {
        "val_loss": run.val_loss[-1],
        "val_curve": [list(point) for point in zip(run.val_steps, run.val_loss, strict=True)],
        "train_loss": run.train_loss,
        "step_ms": 1e3 * run.step_s,
        "tokens_per_s": settings.batch * settings.context / run.step_s,
        **{name: getattr(run.program, name) for name in (*_OF_PROGRAM, "bytes_by_slot")},
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None for a single value."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return float(np.mean(values)), None if error is None else float(error)


def summarise(
    settings: Settings, corpus: dict[str, Any], by_seed: dict[int, dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The whole result: `by_seed` maps a seed to the numbers of each run."""
    seeds, impls = list(by_seed), list(next(iter(by_seed.values())))
    result = {
        "settings": dataclasses.asdict(settings),
        "data": corpus,
        "machine": {"device": device_name(), "backend": jax.default_backend()},
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "seconds": seconds,
        "seeds": seeds,
        "runs": {impl: _over_seeds([by_seed[s][impl] for s in seeds]) for impl in impls},
    }
    if len(impls) == 2:
        pairs = [[by_seed[s][impl]["val_loss"] for impl in (LOWMEM, F32)] for s in seeds]
        mean, error = mean_and_error([ours - plain for ours, plain in pairs])
        percent = 100 * mean / float(np.mean([plain for _, plain in pairs]))
        result["difference"] = {"val_loss": mean, "standard_error": error, "percent": percent}
    return result


def _over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    loss, error = mean_and_error([run["val_loss"] for run in runs])
    medians = {name: np.median([run[name] for run in runs]) for name in ("step_ms", "tokens_per_s")}
    first = runs[0]
    sizes = {slot: size / first["parameters"] for slot, size in first["bytes_by_slot"].items()}
    return {
        "val_loss": loss,
        "val_loss_standard_error": error,
        **{name: float(value) for name, value in medians.items()},
        **{name: first[name] for name in _OF_PROGRAM},
        "bytes_per_param": sizes,
        "by_seed": runs,
    }


def table(result: dict[str, Any]) -> Table:
    """The comparison as a table for a terminal."""
    runs, settings = result["runs"], result["settings"]
    shown = Table(title=f"{settings['preset']} / {settings['optimizer']}", title_style="bold")
    shown.add_column("")
    for impl in runs:
        shown.add_column(LABELS[impl], justify="right")

    def row(name: str, cell: Callable[[dict[str, Any]], str], end: bool = False) -> None:
        shown.add_row(name, *map(cell, runs.values()), end_section=end)

    def loss(run: dict[str, Any]) -> str:
        error = run["val_loss_standard_error"]
        return f"{run['val_loss']:.4f}" + ("" if error is None else f" ± {error:.4f}")

    def size(run: dict[str, Any], slot: str) -> str:
        sizes = run["bytes_per_param"]
        return f"{sizes[slot]:.3f}" if slot in sizes else "-"

    def megabytes(run: dict[str, Any]) -> str:
        return f"[bold]{run['bytes_per_param']['total'] * run['parameters'] / 1e6:,.1f}"

    row(f"validation loss, nats per {unit(settings)}", loss)
    if settings["tokenizer"] == "bpe":
        per_token = result["data"]["bytes_per_token"]
        row("validation loss, nats per byte", lambda r: f"{r['val_loss'] / per_token:.4f}")
    row("step, ms", lambda r: f"{r['step_ms']:.1f}")
    row("tokens a second", lambda r: f"{r['tokens_per_s']:,.0f}")
    row("compilation, s", lambda r: f"{r['compile_s']:.1f}", end=True)
    slots = dict.fromkeys(slot for r in runs.values() for slot in r["bytes_per_param"])
    slots = [slot for slot in slots if slot not in ("counters", "total")]
    for slot in slots:
        name = f"{slot}, bytes per parameter" if slot == slots[0] else slot
        row(name, functools.partial(size, slot=slot), end=slot == slots[-1])
    row("[bold]total", lambda run: f"[bold]{size(run, 'total')}")
    row("[bold]total, MB", megabytes, end=True)
    if settings["compute"] == "bfloat16":  # else the step also holds f32 copies of bf16 weights
        row("a step's peak with activations, MB", lambda r: f"{r['peak_bytes'] / 1e6:,.1f}")
    return shown


def conclusion(result: dict[str, Any]) -> str:
    """One sentence on a comparison of both runs."""
    plain, ours = (result["runs"][impl] for impl in (F32, LOWMEM))
    share = ours["bytes_per_param"]["total"] / plain["bytes_per_param"]["total"]
    difference = result["difference"]
    error = difference["standard_error"]
    of_seeds = "" if error is None else f" ± {error:.4f} over {len(result['seeds'])} seeds"
    return (
        f"Low memory trains in {share:.0%} of the bytes; its validation loss differs by "
        f"{difference['val_loss']:+.4f}{of_seeds} ({difference['percent']:+.2f} %)."
    )


def device_name() -> str:
    """The accelerator's name, or the processor's and its number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} x{os.cpu_count()}"
