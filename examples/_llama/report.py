"""Messages of a run: headline, plan, summary, out of memory."""

import jax
from _gpt.report import device_name

import optax_lowmem as lowmem

from . import choose
from .config import NONE, STANDARD, STATE, WEIGHTS, Settings

GIB = 2.0**30


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
    weights = f"{report.params_bytes / GIB:.1f} GiB"
    if settings.offload == WEIGHTS:
        why = f"a few layers, the embedding or the head, gradients and activations need more{has}"
    elif settings.offload == STATE:
        why = f"{weights}{has} are weights; the state of a few layers, gradients and activations "
        why += "need more than the rest"
    else:
        why = (
            f"needs {report.state_bytes / GIB:.1f} GiB of state beside {weights} of weights "
            f"({report.bytes_per_param:.2f} bytes per parameter), {own_bytes / GIB:.1f} GiB{has} "
            f"on each of {settings.devices} device(s), then gradients and activations"
        )
    return f"{settings.optimizer}: out of memory: {why}\n{message}"


def _size(number: float) -> str:
    return f"{number / GIB:.3f} GiB" if number >= GIB / 10 else f"{number / 2**20:.3f} MiB"


def summary(found: dict[str, float]) -> str:
    """The numbers in lines."""
    more = f"   MFU {found['mfu']:.1%}" if "mfu" in found else ""
    peak = f"; at most {_size(found['peak_bytes'])}" if "peak_bytes" in found else ""
    return (
        f"training loss {found['train_loss']:.4f}   {found['tokens_per_s']:,.0f} tokens/s   "
        f"{found['step_ms']:.1f} ms a step{more}\n"
        f"{found['bytes_per_param']:.3f} bytes per parameter of weights and state, "
        f"{_size(found['device_bytes'])} per device"
        f"{peak + ' with gradients and activations' if peak else ''}"
    )
