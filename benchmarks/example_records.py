"""Records of runs of the examples: `examples/train_gpt.py --record FILE`, and so on."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import _gpt.config
import _llama.config
from _gpt.train import F32, LOWMEM
from _llama.config import AUTO, PLAIN, STANDARD
from _llama.optimizer import RATE_FACTORS

from benchmarks import records
from optax_lowmem.memory import Report

_OF_GPT = {
    "val_loss": "nats/token",
    "tokens_per_s": "tokens/s",
    "bytes_per_param": "bytes",
    "peak_bytes": "bytes",
}
_OF_LLAMA = {
    "train_loss": "nats/token",
    "tokens_per_s": "tokens/s",
    "step_ms": "ms",
    "bytes_per_param": "bytes",
    "device_bytes": "bytes",
    "peak_bytes": "bytes",
    "fits": "yes or no",
    "mfu": "of the peak in 16 bits",
    "optimizer_share": "of a step",
    "compile_s": "s",
    "planned_bytes": "bytes",
    "limit_bytes": "bytes",
    "argument_bytes": "bytes",
    "temporary_bytes": "bytes",
    "backward_bytes": "bytes",
    "beside_backward": "bytes per parameter",
}


def recorded_as(impl: str, implementation: str) -> str:
    """Return a run's name in records: lowmem-xla where lowmem.step was told to use XLA."""
    return impl if impl == F32 or implementation == "auto" else f"{impl}-{implementation}"


def case_of_gpt(settings: _gpt.config.Settings) -> str:
    """Return preset and optimizer, with what differs from the preset: "demo steps=1000/adamw"."""
    preset = _gpt.config.PRESETS[settings.preset]
    rate_factor = _gpt.config.OPTIMIZERS[settings.optimizer].rate_factor
    usual = {"learning_rate": preset.learning_rate * rate_factor}
    names = ["context", "batch", "steps", "tokenizer", "text"]
    names += ["vocab"] if settings.tokenizer == "bpe" else []
    usual |= {name: getattr(preset, name) for name in names}
    own = {name: getattr(settings, name) for name in usual}
    changed = [f"{name}={value}" for name, value in own.items() if value != usual[name]]
    return " ".join([settings.preset, *changed]) + f"/{settings.optimizer}"


def append_gpt(
    settings: _gpt.config.Settings,
    corpus: dict[str, Any],
    seed: int,
    runs: dict[str, dict[str, Any]],
    file: Path,
) -> None:
    """Append the records of one seed to a file of JSON lines."""
    flags = dataclasses.asdict(settings)
    del flags["preset"], flags["optimizer"]
    flags |= {"text": corpus["source"], "train_tokens": corpus["train_tokens"]}
    rows = []
    for impl, run in runs.items():
        values = {
            "val_loss": run["val_loss"],
            "tokens_per_s": run["tokens_per_s"],
            "bytes_per_param": run["bytes_by_slot"]["total"] / run["parameters"],
            "peak_bytes": run["peak_bytes"],
        }
        name = recorded_as(impl, settings.implementation)
        measured = functools.partial(records.record, "train", case_of_gpt(settings), name)
        of_run = flags | {"parameters": run["parameters"]}
        rows += [
            measured(metric, value, _OF_GPT[metric], seed=seed, flags=of_run)
            for metric, value in values.items()
        ]
    records.append(rows, file)


def case_of_llama(settings: _llama.config.Settings, allocator: str | None = None) -> str:
    """Return preset and optimizer, with what differs from the preset: `1b fsdp=4/flash_adamw`."""
    preset, changed = _llama.config.PRESETS[settings.preset], []
    rate = preset.learning_rate * RATE_FACTORS.get(settings.optimizer, 1.0)
    usual: dict[str, Any] = {"learning_rate": rate, "clip": 1.0, "zero": False, "release": False}
    usual |= dict.fromkeys(("data", "fsdp", "tensor"), 1)
    usual |= dict.fromkeys(("linear", "head"), STANDARD)
    usual |= {n: getattr(preset, n) for n in ("sequence", "batch", "steps", "text", "remat")}
    usual |= {"noise": None, "attention": AUTO, "activations": AUTO, "unroll": AUTO}
    usual |= {"accumulate": 1, "f32_weights": False, "offload": None}
    for name, value in usual.items():
        own = getattr(settings, name)
        changed += [f"{name}={own}"] if own != value else []
    changed += [f"allocator={allocator}"] if allocator else []
    return " ".join([f"llama-{settings.preset}", *changed]) + f"/{settings.optimizer}"


def append_llama(
    settings: _llama.config.Settings,
    ran: _llama.config.Settings,
    report: Report,
    found: dict[str, float],
    file: Path,
) -> None:
    """Append the records of a run, as asked for and as it ran, to a file of JSON lines."""
    flags = dataclasses.asdict(ran) | {"parameters": report.parameters}
    if allocator := os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR"):
        flags["allocator"] = allocator
    del flags["preset"], flags["optimizer"], flags["seed"]
    plain = settings.optimizer == PLAIN
    impl = "optax-f32" if plain else recorded_as(LOWMEM, settings.implementation)
    measured = functools.partial(records.record, "train", case_of_llama(settings, allocator), impl)
    rows = [
        measured(metric, value, _OF_LLAMA[metric], seed=settings.seed, flags=flags)
        for metric, value in found.items()
    ]
    records.append(rows, file)
