"""The table of docs/guides/sharding.md: FSDP on several GPUs, for benchmarks.tables."""

from collections.abc import Sequence
from typing import Any

from benchmarks.records import Rows, newest, on_gpus
from benchmarks.render import NOTHING, markdown, source

Values = dict[tuple[int, str, str], dict[str, Any]]  # (devices, impl, metric) -> record

OURS, OPTAX = "lowmem.step", "optax-f32"
LIMIT = 1.15  # of n x time / time(1)
HEAD = [
    *("`lowmem.step`, ms", f"n x time / time(1), asked: ≤ {LIMIT}"),
    *("optax in f32, ms", "n x time / time(1)"),
    *("tokens/s", "loss, at most off by", "optax's"),
    *("weights and state, GiB a device", "optax's", "peak of training, GiB a device"),
]


def loss_difference(losses: Sequence[float], one: Sequence[float]) -> float:
    """The largest difference of a step's loss from one device's, relative to it."""
    pairs = list(zip(losses, one, strict=True))
    return max(abs(a - b) / abs(b) for a, b in pairs)


def times_the_devices(values: Values, devices: int, impl: str) -> float | None:
    """n x time / time(1): 1 where n devices take an nth of the time."""
    here, one = (values.get((n, impl, "device_ms")) for n in (devices, 1))
    return devices * here["value"] / one["value"] if here and one else None


def fsdp(rows: Rows) -> str:
    """A table for each model, kind of GPU and version of JAX."""
    found = on_gpus(newest(rows, bench="mesh"))
    parts = []
    for own in _groups(found):
        parts.append(_table(own) + _protocol(own) + source(own))
    return "\n".join(parts) or NOTHING


def of_a_run(rows: Rows) -> str:
    """The same of what a run measured, wherever it ran."""
    return "\n".join(map(_table, _groups(rows))) or NOTHING


def _groups(rows: Rows) -> list[Rows]:
    def of(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["model"], row["device"], row["jax"]

    return [[row for row in rows if of(row) == one] for one in sorted(set(map(of, rows)))]


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
    def cell(impl: str, metric: str, form: str, unit: float = 1.0) -> str:
        found = values.get((devices, impl, metric))
        return format(found["value"] / unit, form) if found else ""

    gib = 2.0**30
    ours, theirs = (times_the_devices(values, devices, impl) for impl in (OURS, OPTAX))
    return [
        str(devices),
        cell(OURS, "device_ms", ".2f"),
        "" if ours is None else f"{ours:.2f}" if ours <= LIMIT else f"**{ours:.2f}**",
        cell(OPTAX, "device_ms", ".2f"),
        "" if theirs is None else f"{theirs:.2f}",
        cell(OURS, "tokens_per_s", ",.0f"),
        cell(OURS, "loss_difference", ".1e"),
        cell(OPTAX, "loss_difference", ".1e"),
        cell(OURS, "device_bytes", ".2f", gib),
        cell(OPTAX, "device_bytes", ".2f", gib),
        cell(OURS, "train_peak_bytes", ".2f", gib),
    ]


TABLES = {"fsdp": fsdp}
