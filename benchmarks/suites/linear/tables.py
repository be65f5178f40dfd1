"""The tables of docs/results/layers.md: one linear layer in 8 bits, from the records of linear."""

from benchmarks.records import Rows, grouped, on_gpus, select
from benchmarks.render import Rendered, Table, target

PLAIN = "bf16"
CODES = {"int8": "int8", "e4m3": "fp8"}  # as operations are called -> as the table says
# implementation -> times faster than bf16 that were asked for, of the shapes of a pair together
ASKED = {
    ("16384x4096x16384", "16384x16384x4096"): {"switchback-int8": 1.25, "switchback-fp8": 1.35},
    ("32768x1280x5120", "32768x5120x1280"): {"switchback-int8": 1.10, "switchback-fp8": 1.10},
}


def values(rows: Rows, metric: str) -> tuple[Rows, dict[str, dict[str, float]]]:
    """The records on GPUs, and shape -> implementation -> value, in stored order."""
    used = on_gpus(select(rows, bench="linear"))
    found = grouped(select(used, metric=metric), "case", "impl")
    return used, {
        shape: {name: row["value"] for name, row in of.items()} for shape, of in found.items()
    }


def layers(rows: Rows) -> Table:
    (used, times), (_, kept) = values(rows, "device_ms"), values(rows, "saved_bytes")
    times = {shape: own for shape, own in times.items() if PLAIN in own}
    names = list(dict.fromkeys(name for own in times.values() for name in own if name != PLAIN))

    def faster(own: dict[str, float], name: str) -> str:
        return f"{own[name]:.3g} ({own[PLAIN] / own[name]:.2f} x)" if name in own else ""

    def share(name: str) -> str:
        """The largest share of bf16's bytes, over shapes."""
        found = [own[name] / own[PLAIN] for own in kept.values() if {name, PLAIN} <= own.keys()]
        return f"{max(found):.2f}" if found else ""

    head = ["tokens x in x out", "bf16, ms", *(f"{name} (x bf16)" for name in names)]
    body = [[shape, f"{own[PLAIN]:.3g}", *(faster(own, name) for name in names)]
            for shape, own in times.items()]  # fmt: skip
    body += [["kept for backward, x bf16", "1", *map(share, names)]] if body else []
    return head, body, used


def targets(rows: Rows) -> Table:
    (used, times), body = values(rows, "device_ms"), []
    for shapes, asked in ASKED.items():
        for name, least in asked.items():
            own = [times.get(shape, {}) for shape in shapes]
            if all({name, PLAIN} <= one.keys() for one in own):
                ratio = sum(one[PLAIN] for one in own) / sum(one[name] for one in own)
                layer, *cells = target(" and ".join(shapes), "≥ {:.2f} x", least, ratio)
                body.append([layer, name, *cells])
    return ["layers", "implementation", "asked", "measured", "reached"], body, used


def operations(rows: Rows) -> Table:
    """Each operation of SwitchBack alone, and the share of quantizing (Figure 6)."""
    (used, times), body = values(rows, "operation_ms"), []
    for shape, own in times.items():
        for codes, name in CODES.items():
            if f"{codes} forward" in own:
                products = [own[f"{codes} forward"], own[f"{codes} input gradient"]]
                products.append(own[f"{PLAIN} weight gradient"])
                operands = ("x", "g", "w", "w transposed")
                quantizing = sum(own[f"{codes} quantize {operand}"] for operand in operands)
                share = f"{quantizing / (quantizing + sum(products)):.0%}"
                cells = [f"{one:.3g}" for one in (*products, quantizing)]
                body.append([shape, name, *cells, share])
    head = ["tokens x in x out", "format", "forward, ms", "input gradient", "weight gradient, bf16",
            "quantizing, all four", "share of the sum"]  # fmt: skip
    return head, body, used


TABLES = {
    "linear": Rendered(layers, "linear --alone"),
    "linear_targets": Rendered(targets, "linear --alone"),
    "linear_operations": Rendered(operations, "linear --alone"),
}
