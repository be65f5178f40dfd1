"""The table of docs/guides/sharding.md: FSDP on several GPUs, for benchmarks.tables."""

from collections.abc import Sequence
from typing import Any

from benchmarks.records import Rows, newest, on_gpus
from benchmarks.render import GIB, by_machine, cell, markdown, source

Values = dict[tuple[int, str, str], dict[str, Any]]  # (devices, impl, metric) -> record

OURS, OPTAX, COAT = "lowmem.step", "optax-f32", "coat_adamw+fp8"
LIMIT = 1.15  # of n x time / time(1)
HEAD = [
    *("`lowmem.step`, ms", f"n x time / time(1), asked: ≤ {LIMIT}"),
    *("optax in f32, ms", "n x time / time(1)"),
    *("tokens/s", "loss, at most off by", "optax's"),
    *("weights and state, GiB per device", "optax's", "peak of training, GiB per device"),
]


def loss_difference(losses: Sequence[float], one: Sequence[float]) -> float:
    """The largest difference of a step's loss from one device's, relative to it."""
    pairs = list(zip(losses, one, strict=True))
    return max(abs(a - b) / abs(b) for a, b in pairs)


def fsdp(rows: Rows) -> str:
    """A table for each model, kind of GPU and version of JAX."""
    found = on_gpus(newest(rows, bench="mesh"))
    return by_machine(found, lambda own: _table(own) + _protocol(own) + source(own), "model")


def of_a_run(rows: Rows) -> str:
    """The same of what a run measured, wherever it ran."""
    return by_machine(rows, _table, "model")


def _protocol(rows: Rows) -> str:
    runs = [r["run"] for r in rows if r["metric"] == "train_loss"]
    if not runs:
        return ""
    run = runs[-1]
    steps = f"{run['steps']} steps, each of {run['batch']} x {run['sequence']} tokens"
    return f"\nLosses and tokens/s: {steps} on all devices together.\n"


def _table(rows: Rows) -> str:
    values: Values = {(r["devices"], r["impl"], r["metric"]): r for r in rows}
    body = [_row(values, devices) for devices in sorted({r["devices"] for r in rows})]
    return markdown([f"{rows[0]['model']}, devices", *HEAD], body)


def _row(values: Values, devices: int) -> list[str]:
    def of(impl: str, metric: str, form: str, unit: float = 1.0) -> str:
        return cell(values.get((devices, impl, metric)), form, unit)

    def times(impl: str, most: float = float("inf")) -> str:
        """n x time / time(1): 1 where n devices take an nth of the time; bold where over `most`."""
        here, one = (values.get((n, impl, "device_ms")) for n in (devices, 1))
        ratio = devices * here["value"] / one["value"] if here and one else None
        return "" if ratio is None else f"{ratio:.2f}" if ratio <= most else f"**{ratio:.2f}**"

    return [
        str(devices),
        of(OURS, "device_ms", "{:.2f}"),
        times(OURS, LIMIT),
        of(OPTAX, "device_ms", "{:.2f}"),
        times(OPTAX),
        of(OURS, "tokens_per_s", "{:,.0f}"),
        *(of(impl, "loss_difference", "{:.1e}") for impl in (OURS, OPTAX)),
        *(of(impl, "device_bytes", "{:.2f}", GIB) for impl in (OURS, OPTAX)),
        of(OURS, "train_peak_bytes", "{:.2f}", GIB),
    ]


TABLES = {"fsdp": fsdp}
