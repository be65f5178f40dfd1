"""What `auto` means: the attention and the rematerialisation that suit a model and its machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .config import AUTO, CUDNN, DOTS, FP8, FULL, NONE, XLA, Settings

_OF_MEMORY = 0.9  # what an estimate may take of a device; it leaves out what operations need
# Dense FLOP/s of 16-bit products by name of the device, from the vendors' data sheets
_PEAKS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12,
    "L40S": 362e12, "RTX 4090": 165e12, "TPU v4": 275e12, "TPU v5 lite": 197e12,
    "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """Of one device in 16 bits; None where its data sheet is not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device), None)


def attention(settings: Settings) -> str:
    """cuDNN's where it takes the model's heads, which is faster and keeps no scores."""
    if settings.attention != AUTO:
        return settings.attention
    head = settings.shape.width // settings.shape.heads
    takes = settings.compute in ("bfloat16", "float16") and head <= 128 and head % 8 == 0
    return CUDNN if takes and _capability(jax.local_devices()[0]) >= 8.0 else XLA


def _capability(device: Any) -> float:
    """CUDA's compute capability; 0 of what is no NVIDIA GPU."""
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def remat(settings: Settings, fixed_bytes: int, kept_bytes: Any) -> str:
    """The policy that is fastest for its memory, or one that fits.

    Args:
      settings: the run, with its attention.
      fixed_bytes: of weights, state and gradients on one device.
      kept_bytes: policy -> bytes that the layers keep on one device.
    """
    if settings.release:
        return FULL
    if settings.remat != AUTO:
        return settings.remat
    if jax.default_backend() == "cpu":
        return NONE
    # keeping the products alone is faster than keeping all, which costs more to write and read
    first = NONE if settings.activations == FP8 else DOTS
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None or fixed_bytes + kept_bytes(first) <= _OF_MEMORY * limit:
        return first
    return FULL


def resolved(settings: Settings, fixed_bytes: int, kept_bytes: Any) -> Settings:
    """The run with what `auto` has become."""
    settings = dataclasses.replace(settings, attention=attention(settings))
    return dataclasses.replace(settings, remat=remat(settings, fixed_bytes, kept_bytes))
