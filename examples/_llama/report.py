"""Messages of a run (headline, plan, summary, out of memory) and its benchmark records."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
from _gpt.records import recorded_as, stored
from _gpt.report import device_name
from _gpt.train import LOWMEM

import optax_lowmem as lowmem

from . import choose
from .config import AUTO, NONE, PLAIN, PRESETS, STANDARD, Settings
from .optimizer import RATE_FACTORS

GIB = 2.0**30
_UNITS = {
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
    "beside_backward": "bytes a parameter",
}


def headline(settings: Settings, report: lowmem.memory.Report, text: str) -> str:
    """The run in a line."""
    named = ("data", "fsdp", "tensor")
    parts = [f"{name} {getattr(settings, name)}" for name in named if getattr(settings, name) > 1]
    layout = f" ({' x '.join(parts)}{', ZeRO-1' if settings.zero else ''})" if parts else ""
    linear = "" if settings.linear == STANDARD else f", {settings.linear}"
    noise = f", GaussWS noise [{settings.noise}]" if settings.noise else ""
    kept = "" if settings.activations == STANDARD else f", {settings.activations} activations"
    kept += "" if settings.head == STANDARD else f", {settings.head} head"
    kept += ", f32 weights" if settings.f32_weights else ""
    how = "" if settings.remat == NONE else f", remat {settings.remat}"
    how += f", {settings.attention} attention"
    how += f", unroll {settings.unroll}" if settings.unroll != 1 else ""
    how += f", {settings.accumulate} micro-batches" if settings.accumulate > 1 else ""
    if choose.may_quantize_once(settings):
        once = "once a step" if settings.quantize_once else "in each, for want of memory"
        how += f", weights quantized {once}"
    return (
        f"{settings.preset}: {report.parameters / 1e6:,.1f}M parameters, {settings.optimizer}, "
        f"{settings.steps} steps of {settings.batch} x {settings.sequence} tokens of {text}, "
        f"{settings.compute}{linear}{kept}{noise}{how}, "
        f"on {settings.devices} x {device_name()}{layout}"
    )


def limit() -> dict[str, int]:
    """Bytes of a device that JAX may take, where that is known (not on a CPU)."""
    found = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return {"limit_bytes": found} if found else {}


def out_of_memory(
    settings: Settings, report: lowmem.memory.Report, own_bytes: int, message: str
) -> str:
    """Format a line on a run that does not fit into memory, and XLA's message."""
    has = "".join(f" of {limit_bytes / GIB:.1f}" for limit_bytes in limit().values())
    if settings.offload == "pinned_host":
        return (
            f"{settings.optimizer}: out of memory: {report.params_bytes / GIB:.1f} GiB{has} are "
            "weights; the state of a few layers, gradients and activations need more than the "
            f"rest\n{message}"
        )
    return (
        f"{settings.optimizer}: out of memory: needs {report.state_bytes / GIB:.1f} GiB of state "
        f"beside {report.params_bytes / GIB:.1f} GiB of weights ({report.bytes_per_param:.2f} "
        f"bytes per parameter), {own_bytes / GIB:.1f} GiB{has} on each of {settings.devices} "
        f"device(s), then gradients and activations\n{message}"
    )


def summary(found: dict[str, float]) -> str:
    """The numbers in lines."""
    more = f"   MFU {found['mfu']:.1%}" if "mfu" in found else ""
    if "optimizer_share" in found:
        more += f"   optimizer {found['optimizer_share']:.1%} of a step"
    peak = f"; at most {found['peak_bytes'] / GIB:.3f} GiB" if "peak_bytes" in found else ""
    return (
        f"training loss {found['train_loss']:.4f}   {found['tokens_per_s']:,.0f} tokens/s   "
        f"{found['step_ms']:.1f} ms a step{more}\n"
        f"{found['bytes_per_param']:.3f} bytes per parameter of weights and state, "
        f"{found['device_bytes'] / GIB:.3f} GiB a device"
        f"{peak + ' with gradients and activations' if peak else ''}"
    )


def planned(found: dict[str, float]) -> str:
    """Format one line on the planned memory of a step: arguments, temporaries, backward pass."""
    gib = {n: found[f"{n}_bytes"] / GIB for n in ("argument", "temporary", "backward")}
    return (
        f"planned: {gib['argument']:.3f} GiB of weights and state and {gib['temporary']:.3f} GiB "
        f"beside, where forward and backward alone take {gib['backward']:.3f} GiB: the rest is "
        f"{found['beside_backward']:.2f} bytes per parameter"
    )


def case(settings: Settings, allocator: str | None = None) -> str:
    """The preset and the optimizer, with what the run has of its own: `1b fsdp=4/flash_adamw`."""
    preset, changed = PRESETS[settings.preset], []
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


def append(
    settings: Settings,
    ran: Settings,
    report: lowmem.memory.Report,
    found: dict[str, float],
    file: Path,
) -> None:
    """Appends benchmark records of the run, as asked for and as it ran, to a file of JSON lines."""
    flags = dataclasses.asdict(ran) | {"parameters": report.parameters}
    if allocator := os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR"):
        flags["allocator"] = allocator
    del flags["preset"], flags["optimizer"], flags["seed"]
    plain = settings.optimizer == PLAIN
    impl = "optax-f32" if plain else recorded_as(LOWMEM, settings.implementation)
    measured = functools.partial(stored.record, "train", case(settings, allocator), impl)
    rows = [
        measured(metric, value, _UNITS[metric], seed=settings.seed, flags=flags)
        for metric, value in found.items()
    ]
    stored.append(rows, file)
