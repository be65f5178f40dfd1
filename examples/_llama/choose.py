"""Values of `auto`: the attention and rematerialisation that suit a model and its machine."""

import dataclasses
import math
from typing import Any

import jax

from .config import AUTO, CUDNN, DOTS, FP8, FULL, LEAN, NONE, STANDARD, XLA, Settings

_OF_MEMORY = 0.9  # what an estimate may take of a device; it leaves out what operations need
# Dense FLOP/s of 16-bit products and bytes/s of memory, by name of the device, from the vendors'
# data sheets
_SHEETS = {
    "H100 PCIe": (756e12, 2.0e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.0e12), "B200": (2250e12, 8.0e12), "L40S": (362e12, 0.86e12),
    "RTX 4090": (165e12, 1.0e12), "TPU v4": (275e12, 1.2e12), "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5e": (197e12, 0.82e12), "TPU v5p": (459e12, 2.77e12), "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12), "TPU v6e": (918e12, 1.64e12),
}  # fmt: skip
_OF_PEAK, _OF_BANDWIDTH = 0.7, 0.85  # what a step's products, and its copies, reach of these
_PASSES = 2  # over what is kept; once more for each where it is copied to and from a scan's stack
_MOST_UNROLLED = 32  # layers, which compile in half a minute
_SLOWER = 1.03  # than the fastest policy, for which a leaner one is taken


def _sheet(device: str) -> tuple[float, float] | None:
    return next((sheet for name, sheet in _SHEETS.items() if name in device), None)


def peak_flops(device: str) -> float | None:
    """Of one device in 16 bits; None where its data sheet is not known."""
    sheet = _sheet(device)
    return sheet and sheet[0]


def attention(settings: Settings) -> str:
    """cuDNN's where it takes the model's heads, which is faster and keeps no scores."""
    if settings.attention != AUTO:
        return settings.attention
    head = settings.shape.head_width
    takes = settings.compute in ("bfloat16", "float16") and head <= 128 and head % 8 == 0
    return CUDNN if takes and _capability(jax.local_devices()[0]) >= 8.0 else XLA


def activations(settings: Settings) -> str:
    """The lean layer, which is as exact as the standard one, where a device's memory is short."""
    if settings.activations != AUTO:
        return settings.activations
    return STANDARD if jax.default_backend() == "cpu" else LEAN


def _capability(device: Any) -> float:
    """CUDA's compute capability; 0 of what is no NVIDIA GPU."""
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def unroll(settings: Settings) -> int:
    """All layers, which then are not copied to and from stacks, where that soon compiles."""
    layers = settings.shape.layers
    if settings.unroll != AUTO:
        return min(int(settings.unroll), layers)
    backend = jax.default_backend()
    soon = backend == "gpu" or (settings.devices == 1 and backend != "cpu")
    return layers if soon and not settings.release and layers <= _MOST_UNROLLED else 1


def stacked(settings: Settings) -> bool:
    """Weights of all layers in one array where a scan, or gradient release, goes along them."""
    if settings.stacked != AUTO:
        return bool(settings.stacked)
    return settings.release or unroll(settings) < settings.shape.layers


def step_seconds(settings: Settings, policy: str, kept_bytes: int) -> float:
    """Estimate a micro-batch's products and what it keeps, on one of the run's devices.

    Measured differences between policies are within 5 ms of it (1b on an H200); what all have in
    common, norms and the optimizer, is left out.
    """
    device = getattr(jax.local_devices()[0], "device_kind", "")
    flops, bandwidth = _sheet(device) or _SHEETS["H100"]
    shape, sequence = settings.shape, settings.sequence
    tokens = settings.batch / settings.accumulate * sequence / settings.devices
    work = shape.flops_per_token(sequence)
    if policy == FULL:  # the layers' forward pass once more: a third of their part
        work += (work - 6.0 * shape.width * shape.vocab) / 3
    passes = _PASSES if unroll(settings) >= shape.layers else 2 * _PASSES
    return tokens * work / (_OF_PEAK * flops) + passes * kept_bytes / (_OF_BANDWIDTH * bandwidth)


def _room(fixed_bytes: int) -> float:
    """Bytes that an estimate may take of a device beside what is fixed; inf of a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return math.inf if limit is None else _OF_MEMORY * limit - fixed_bytes


def remat(settings: Settings, fixed_bytes: int, kept_bytes: Any) -> str:
    """The leanest policy that is estimated within 3 % of the fastest, or one that fits.

    Args:
      settings: the run, with its attention and activations.
      fixed_bytes: of weights, state and gradients on one device.
      kept_bytes: policy -> bytes that the layers keep on one device.
    """
    if settings.release:
        return FULL
    if settings.remat != AUTO:
        return settings.remat
    if jax.default_backend() == "cpu":
        return NONE
    room = _room(fixed_bytes)
    # what is computed anew without a product costs more than it saves where layers are lean
    own = (NONE, FULL) if settings.activations != STANDARD else (NONE, DOTS, FULL)
    kept = {policy: kept_bytes(policy) for policy in own}
    seconds = {policy: step_seconds(settings, policy, kept[policy]) for policy in own}
    fitting = [policy for policy in own if kept[policy] <= room] or [FULL]
    fastest = min(seconds[policy] for policy in fitting)
    near = [policy for policy in fitting if seconds[policy] <= _SLOWER * fastest]
    return min(near, key=kept.__getitem__)


def may_quantize_once(settings: Settings) -> bool:
    """Return whether several micro-batches quantize the same weights for products of the layers."""
    alone = settings.activations == FP8 and settings.linear == STANDARD
    return alone and settings.accumulate > 1


def quantize_once(settings: Settings, fixed_bytes: int, kept_bytes: Any, codes_bytes: int) -> bool:
    """Return whether the weights' codes fit into the memory that the other choices leave.

    They save 1 to 2 % of a step, for which no layer is computed anew. `codes_bytes` are theirs on
    one device; the rest as of `remat`.
    """
    if settings.quantize_once != AUTO:
        return bool(settings.quantize_once)
    if not may_quantize_once(settings):
        return False
    room = _room(fixed_bytes)
    return room == math.inf or codes_bytes + kept_bytes(settings.remat) <= room


def resolved(
    settings: Settings, fixed_bytes: int, kept_bytes: Any, codes_bytes: int = 0
) -> Settings:
    """The run with what `auto` has become."""
    choices = (attention, activations, unroll, stacked)
    settings = dataclasses.replace(settings, **{f.__name__: f(settings) for f in choices})
    settings = dataclasses.replace(settings, remat=remat(settings, fixed_bytes, kept_bytes))
    once = quantize_once(settings, fixed_bytes, kept_bytes, codes_bytes)
    return dataclasses.replace(settings, quantize_once=once)
