"""The tables of docs/results/layers.md: one linear layer in 8 bits, from the records of linear."""

from benchmarks.records import Rows, grouped, on_gpus, select
from benchmarks.render import Rendered, Table

PLAIN = "bf16"
SHOWN = ("switchback-int8", "switchback-fp8", "flax-fp8", "qwix-fp8")


def values(rows: Rows, metric: str) -> tuple[Rows, dict[str, dict[str, float]]]:
    """The records on GPUs, and shape -> implementation -> value, in stored order."""
    used = on_gpus(select(rows, bench="linear"))
    found = grouped(select(used, metric=metric), "case", "impl")
    return used, {
        shape: {name: row["value"] for name, row in of.items()} for shape, of in found.items()
    }


def layers(rows: Rows) -> Table:
    """Milliseconds of each layer, and relative to bf16."""
    used, times = values(rows, "device_ms")
    times = {shape: own for shape, own in times.items() if PLAIN in own}
    names = [name for name in SHOWN if any(name in own for own in times.values())]

    def faster(own: dict[str, float], name: str) -> str:
        return f"{own[name]:.3g} ({own[PLAIN] / own[name]:.2f} x)" if name in own else ""

    head = ["tokens x in x out", "bf16, ms", *(f"{name} (x bf16)" for name in names)]
    body = [[shape, f"{own[PLAIN]:.3g}", *(faster(own, name) for name in names)]
            for shape, own in times.items()]  # fmt: skip
    return head, body, used


TABLES = {"linear": Rendered(layers, "linear --alone")}
