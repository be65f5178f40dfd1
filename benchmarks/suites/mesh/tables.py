"""The table of docs/guides/sharding.md: FSDP on several GPUs, for benchmarks.tables."""

from collections.abc import Sequence

from benchmarks.records import Rows, grouped, newest, on_gpus
from benchmarks.render import GIB, by_machine, cell, markdown, source

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
    for run in [r["run"] for r in rows if r["metric"] == "train_loss"][-1:]:
        steps = f"{run['steps']} steps, each of {run['batch']} x {run['sequence']} tokens"
        return f"\nTraining: {steps} on all devices together.\n"
    return ""


def _table(rows: Rows) -> str:
    values, body = grouped(rows, "impl", "metric", "devices"), []

    def of(devices: int, impl: str, metric: str, form: str = "{:.2f}", unit: float = 1.0) -> str:
        return cell(values.get(impl, {}).get(metric, {}).get(devices), form, unit)

    def times(devices: int, impl: str, most: float = float("inf")) -> str:
        """n x time / time(1): 1 where n devices take an nth of the time; bold where over `most`."""
        known = values.get(impl, {}).get("device_ms", {})
        if not {devices, 1} <= known.keys():
            return ""
        ratio = devices * known[devices]["value"] / known[1]["value"]
        return f"{ratio:.2f}" if ratio <= most else f"**{ratio:.2f}**"

    for n in sorted({r["devices"] for r in rows}):
        body.append([
            str(n), of(n, OURS, "device_ms"), times(n, OURS, LIMIT), of(n, OPTAX, "device_ms"),
            times(n, OPTAX), of(n, OURS, "tokens_per_s", "{:,.0f}"),
            *(of(n, impl, "loss_difference", "{:.1e}") for impl in (OURS, OPTAX)),
            *(of(n, impl, "device_bytes", unit=GIB) for impl in (OURS, OPTAX)),
            of(n, OURS, "train_peak_bytes", unit=GIB),
        ])  # fmt: skip
    columns = zip([f"{rows[0]['model']}, devices", *HEAD], *body, strict=True)
    head, *body = zip(*(column for column in columns if any(column[1:])), strict=True)
    return markdown(list(head), list(map(list, body)))


TABLES = {"fsdp": fsdp}
