"""The tables of docs/results/activations.md: a layer with FP8 activations, and training."""

from benchmarks.claims import findings
from benchmarks.records import Rows, by_gpu, grouped, on_gpus, select
from benchmarks.render import Rendered, Table, cell
from benchmarks.suites.activations.bytes import COLUMNS
from benchmarks.suites.activations.layers import Shape

BF16, LEAN, OURS, XLA_ATTENTION = "bf16", "bf16-lean", "fp8-flow", "fp8-flow, xla attention"
TWO_THIRDS = "h3072-s2048-b4"  # the shape with the paper's MLP: 8/3 of the width
SCALES = 0.125  # of the codes that have one for 16
FLAX = "flax-fp8"
# what Table 2 and Table 14 print, in U: RMSNorm, activation, RoPE, FlashAttention, linear, total
PRINTED = {
    "the paper: BF16": (4.0, 8.0, 2.0, 3.0, 5.66, 22.66),
    "TransformerEngine": (2.0, 8.0, 2.0, 3.0, 3.33, 18.33),
    "DeepSeek-V3": (2.0, 4.0, 2.0, 3.0, 3.08, 14.08),
    "COAT": (1.0, 4.0, 2.0, 3.0, 3.33, 13.33),
}
PAPER_BF16 = PRINTED["the paper: BF16"][-1]
# Table 7: times faster than bf16
PRINTED_SPEED = {
    "h2048-s2048-b4": 1.47, "h2048-s4096-b4": 1.44, "h4096-s2048-b4": 1.57, "h4096-s4096-b4": 1.53,
}  # fmt: skip
# Table 10: forward and backward error by the size of groups; `linear alone`: per tensor
PRINTED_ERRORS = {
    "linear alone": (438, 286), "group 4": (464, 319), "group 8": (480, 334),
    "group 16": (492, 363), "group 32": (512, 361), "group 64": (520, 371),
}  # fmt: skip
# variant -> how far Table 13's loss is over bf16's with AdamW
LOSSES = {
    "fp8-coat_adamw": 3.008 / 2.995 - 1, "fp8": 2.999 / 2.995 - 1, "coat_adamw": 2.998 / 2.995 - 1,
}  # fmt: skip
BASELINE = "standard"
SAYS = {"fp8-coat_adamw": "FP8 activations and coat_adamw", "fp8": "FP8 activations",
        "coat_adamw": "coat_adamw"}  # fmt: skip


def known(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """case -> implementation -> the record of a metric that was stored last."""
    return grouped(select(rows, bench="activations", metric=metric), "case", "impl")


def scale_units(case: str) -> float:
    """U of scales of 16 neighbours, on norms' inputs, gate and up."""
    shape = Shape.parse(case)
    return SCALES * (1 + shape.hidden / shape.width)


def speedups(rows: Rows, name: str = OURS) -> dict[str, tuple[float, Rows]]:
    """case -> how many times faster forward and backward are than bf16's, and the records.

    Of several GPUs those of the one whose records come last; both times of one commit: others may
    have been timed in another way.
    """
    return {
        case: (own[BF16]["value"] / own[name]["value"], [own[BF16], own[name]])
        for case, own in known(on_gpus(rows), "device_ms").items()
        if {BF16, name} <= own.keys() and not case.startswith("norm")
        and own[BF16]["commit"] == own[name]["commit"]
    }  # fmt: skip


def paired(rows: Rows, name: str = "fp8") -> list[tuple[dict, dict]]:
    """(baseline, variant) by seed: of the runs that differ in it alone, those with the most."""
    cases = dict.fromkeys(row["case"] for row in rows if "/activations" in row["case"])
    names = ("val_loss", BASELINE, name)
    found = [list(pair.by_seed().values()) for case in cases
             for pair in findings.paired(on_gpus(rows), case, *names, least=1)]  # fmt: skip
    return max(reversed(found), key=len, default=[])


def units(rows: Rows) -> Table:
    """Table 2: U that a layer keeps."""
    found = known(rows, "saved_units").get(TWO_THIRDS, {})
    body = [[name, *(f"{u:g}" for u in own[:-1]), "", f"{own[-1]:g}", f"{PAPER_BF16 / own[-1]:.2f}"]
            for name, own in PRINTED.items()]  # fmt: skip
    own = [found[name] for name in (BF16, LEAN, OURS, XLA_ATTENTION) if name in found]
    for row in own:
        cells = [f"{row['columns'][name]:.2f}" for name in COLUMNS]
        cells += [f"**{row['value']:.2f}**", f"{PAPER_BF16 / row['value']:.2f}"]
        body.append([f"ours: {row['impl']}", *cells])
    return ["U", *COLUMNS, "total", "Table 2's BF16 / it"], body if own else [], own


def layers(rows: Rows) -> Table:
    """Table 7: times of one layer, forward and backward, and the bytes that it keeps."""
    kept, body, used = known(rows, "saved_bytes"), [], []
    for gpu, of_gpu in by_gpu(select(rows, bench="activations")).items():
        faster = {name: speedups(of_gpu, name) for name in (OURS, FLAX)}
        for case, own in known(of_gpu, "device_ms").items():
            if case.startswith("norm") or not {BF16, *faster} <= own.keys():
                continue
            ratios = [f"{cell(own[name], '{:.3g}')} ({of[case][0]:.2f} x)" if case in of else ""
                      for name, of in faster.items()]  # fmt: skip
            memory = [kept.get(case, {}).get(name) for name in (BF16, OURS)]
            sizes = " → ".join(cell(row, "{:.0f}", 2.0**20) for row in memory)
            printed = f"{PRINTED_SPEED[case]:.2f} x" if case in PRINTED_SPEED else ""
            body.append([gpu, case, cell(own[BF16], "{:.3g}"), *ratios, printed, sizes])
            used += [*(own[name] for name in (BF16, *faster)), *filter(None, memory)]
    head = ["GPU", "layer", "bf16, ms", *(f"{name} (x bf16)" for name in (OURS, FLAX)),
            "COAT in Table 7", "kept, MiB"]  # fmt: skip
    return head, body, used


def passes(rows: Rows) -> Table:
    """Bytes that a layer reads and writes and its kernels, compiled for an H100."""
    found = select(rows, bench="activation_passes")
    cases = sorted({row["case"] for row in found})
    body = []
    for name, of in grouped(found, "impl", "case", "metric").items():
        sizes = [cell(of[c]["both_traffic_bytes"], "{:,.0f}", 2.0**20) for c in cases if c in of]
        kernels = [cell(of[case]["both_launches"], "{:.0f}") for case in cases if case in of]
        body.append([name, *map(" in ".join, zip(sizes, kernels, strict=True))])
    return ["MiB in kernels", *cases], body, found


TABLES = {
    "activation_units": Rendered(units, "activations"),
    "activation_layers": Rendered(layers, "activations"),
    "activation_passes": Rendered(passes, "activation_passes"),
}
