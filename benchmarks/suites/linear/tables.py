"""The tables of docs/guides/layers.md: one linear layer in 8 bits, from the records of linear."""

from collections.abc import Sequence

from benchmarks.records import Rows, on_gpus, select
from benchmarks.render import Rendered, Table

PLAIN = "bf16"
CODES = ("int8", "e4m3")
_FORMAT = {"int8": "int8", "e4m3": "fp8"}
# implementation -> times faster than bf16 that were asked for, of the shapes of a pair together
ASKED = {
    ("16384x4096x16384", "16384x16384x4096"): {"switchback-int8": 1.25, "switchback-fp8": 1.35},
    ("32768x1280x5120", "32768x5120x1280"): {"switchback-int8": 1.10, "switchback-fp8": 1.10},
}


def measured(rows: Rows) -> Rows:
    """The benchmark's records on GPUs."""
    return on_gpus(select(rows, bench="linear"))


def values(rows: Rows, metric: str) -> dict[str, dict[str, float]]:
    """Shape -> implementation -> value, in stored order."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["metric"] == metric:
            found.setdefault(row["case"], {})[row["impl"]] = row["value"]
    return found


def _faster(times: dict[str, float], name: str) -> str:
    if name not in times:
        return ""
    return f"{times[name]:.3g} ({times[PLAIN] / times[name]:.2f} x)"


def layers(rows: Rows) -> Table:
    """Forward and backward of a layer in every implementation."""
    rows = measured(rows)
    times, kept = values(rows, "device_ms"), values(rows, "saved_bytes")
    times = {shape: own for shape, own in times.items() if PLAIN in own}
    names = list(dict.fromkeys(name for own in times.values() for name in own if name != PLAIN))
    head = ["tokens x in x out", "bf16, ms", *(f"{name} (x bf16)" for name in names)]
    body = [
        [shape, f"{own[PLAIN]:.3g}", *(_faster(own, name) for name in names)]
        for shape, own in times.items()
    ]
    shares = ["kept for backward, x bf16", "1", *(_kept(kept, name) for name in names)]
    return head, [*body, shares] if body else [], rows


def _kept(kept: dict[str, dict[str, float]], name: str) -> str:
    """The largest share of bf16's bytes, over shapes."""
    shares = [own[name] / own[PLAIN] for own in kept.values() if name in own and PLAIN in own]
    return f"{max(shares):.2f}" if shares else ""


def targets(rows: Rows) -> Table:
    """Return the table of targets for the two linear layers of an MLP."""
    rows = measured(rows)
    times, body = values(rows, "device_ms"), []
    for shapes, asked in ASKED.items():
        for name, least in asked.items():
            own = [times.get(shape, {}) for shape in shapes]
            if not all(name in one and PLAIN in one for one in own):
                continue
            ratio = sum(one[PLAIN] for one in own) / sum(one[name] for one in own)
            reached = "yes" if ratio >= least else "**no**"
            body.append([" and ".join(shapes), name, f"≥ {least:.2f} x", f"{ratio:.2f} x", reached])
    return ["layers", "implementation", "asked", "measured", "reached"], body, rows


def operations(rows: Rows) -> Table:
    """Each operation of SwitchBack alone, and the share of quantizing (Figure 6)."""
    rows = measured(rows)
    head = ["tokens x in x out", "format", "forward, ms", "input gradient", "weight gradient, bf16",
            "quantizing, all four", "share of the sum"]  # fmt: skip
    body = []
    for shape, own in values(rows, "operation_ms").items():
        for codes in CODES:
            if f"{codes} forward" in own:
                body.append([shape, _FORMAT[codes], *_alone(own, codes)])
    return head, body, rows


def _alone(own: dict[str, float], codes: str) -> Sequence[str]:
    products = [own[f"{codes} forward"], own[f"{codes} input gradient"]]
    products.append(own[f"{PLAIN} weight gradient"])
    what = ("x", "g", "w", "w transposed")
    quantising = sum(own[f"{codes} quantize {name}"] for name in what)
    share = quantising / (quantising + sum(products))
    return [*(f"{one:.3g}" for one in (*products, quantising)), f"{share:.0%}"]


TABLES = {
    "linear": Rendered(layers, "linear --alone"),
    "linear_targets": Rendered(targets, "linear --alone"),
    "linear_operations": Rendered(operations, "linear --alone"),
}
