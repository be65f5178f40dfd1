"""The tables of docs/guides/activations.md: a layer that keeps activations in FP8, and training."""

import json
import statistics

from benchmarks.records import Rows, on_gpus
from benchmarks.render import Rendered, Table
from benchmarks.suites.activations.bytes import COLUMNS
from benchmarks.suites.activations.layers import Shape

BF16, LEAN, OURS, XLA_ATTENTION = "bf16", "bf16-lean", "fp8-flow", "fp8-flow, xla attention"
TWO_THIRDS = "h3072-s2048-b4"  # the shape with the paper's MLP: 8/3 of the width
SCALES = 0.125  # of the codes that have one for 16
UNITS = 13.4
LEAN_UNITS = 17
# shape of Table 7 -> times faster than bf16 that were asked for
FASTER = {"h4096-s2048-b4": 1.4, "h2048-s2048-b4": 1.25}
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
# Table 12: a norm with quantizing over the same without
PRINTED_NORMS = {
    "4096x1024": 10.1 / 8.7, "4096x2048": 29.6 / 28.7, "4096x4096": 55.6 / 53.2,
    "4096x8192": 122.6 / 117.5,
}  # fmt: skip
# variant -> how far its loss may be over bf16's with AdamW, and what Table 13 finds
LOSSES = {
    "fp8-coat_adamw": (0.007, 3.008 / 2.995 - 1),
    "fp8": (0.003, 2.999 / 2.995 - 1),
    "coat_adamw": (0.003, 2.998 / 2.995 - 1),
}
BASELINE, OTHER = "standard", "standard-other-start"
SAYS = {
    "fp8-coat_adamw": "FP8 activations and coat_adamw",
    "fp8": "FP8 activations",
    "coat_adamw": "coat_adamw",
    OTHER: "other initial weights",
}
STEPS, WEIGHTS, SEEDS = 2000, 130e6, 3  # at least, for a target
NOT_YET = "not measured yet"


def known(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """case -> implementation -> the record of a metric that was stored last."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["bench"] == "activations" and row["metric"] == metric:
            found.setdefault(row["case"], {})[row["impl"]] = row
    return found


def scale_units(case: str) -> float:
    """U of scales of 16 neighbours, on norms' inputs, gate and up."""
    shape = Shape.parse(case)
    return SCALES * (1 + shape.hidden / shape.width)


def of_one_run(one: dict, other: dict) -> bool:
    """Return whether two times are of one commit: others may have been timed in another way."""
    return one["commit"] == other["commit"]


def speedups(rows: Rows, name: str = OURS) -> dict[str, tuple[float, Rows]]:
    """case -> how many times faster forward and backward are than bf16's, and the records."""
    found = {}
    for case, own in known(on_gpus(rows), "device_ms").items():
        if {BF16, name} <= own.keys() and not case.startswith("norm"):
            pair = [own[BF16], own[name]]
            if not of_one_run(*pair):
                continue
            found[case] = pair[0]["value"] / pair[1]["value"], pair
    return found


def trainings(rows: Rows, on_gpu: bool = True) -> list[dict[str, dict]]:
    """Variant -> record of its held-out loss, of each training run in the order of their starts."""
    found: dict[str, dict[str, dict]] = {}
    for row in on_gpus(rows) if on_gpu else rows:
        if (
            row["bench"] == "train" and row["metric"] == "val_loss"
            and "/activations" in row["case"]
        ):  # fmt: skip
            run = json.dumps([row[key] for key in ("device", "jax", "case", "flags")])
            found.setdefault(run, {})[row["impl"]] = row
    return [run for run in found.values() if BASELINE in run]


def losses(rows: Rows, on_gpu: bool = True) -> dict[str, dict]:
    """Variant -> record of its held-out loss, in the last of the runs with the most variants."""
    return max(reversed(trainings(rows, on_gpu)), key=len, default={})


def paired(rows: Rows, name: str = "fp8") -> list[tuple[dict, dict]]:
    """(baseline, variant) by seed: of the runs that differ in it alone, those with the most."""
    found: dict[str, dict[int, tuple[dict, dict]]] = {}
    for run in trainings(rows):
        if name in run:
            own = run[BASELINE]
            rest = {key: value for key, value in own["flags"].items() if key != "seed"}
            same = json.dumps([own["case"], own["device"], own["jax"], rest])
            found.setdefault(same, {})[own["seed"]] = own, run[name]
    return list(max(reversed(found.values()), key=len, default={}).values())


def differences(pairs: list[tuple[dict, dict]]) -> tuple[float, float]:
    """The mean relative difference of pairs, and its standard error."""
    each = [other["value"] / own["value"] - 1 for own, other in pairs]
    return statistics.mean(each), statistics.stdev(each) / len(each) ** 0.5


def over(found: dict[str, dict], name: str) -> float:
    """The share by which a loss is over the standard's."""
    return found[name]["value"] / found[BASELINE]["value"] - 1


# ---- tables --------------------------------------------------------------------------------------


def targets(rows: Rows) -> Table:
    """Return the table of this flow's targets, the measured values and whether they are reached."""
    body, used = [], []

    def add(what: str, asked: str, text: str, reached: bool, own: Rows) -> None:
        body.append([what, asked, text, "yes" if reached else "**no**"])
        used.extend(own)

    units = known(rows, "saved_units").get(TWO_THIRDS, {})
    for name in (OURS, XLA_ATTENTION):
        if {name, BF16} <= units.keys():
            value, plain = units[name]["value"], units[BF16]["value"]
            most = UNITS + scale_units(TWO_THIRDS)
            text = f"{value:.2f} U: Table 2's bf16 / {PAPER_BF16 / value:.2f}, "
            add(f"kept by a layer, {name}", f"≤ {UNITS} U and {most - UNITS:.2f} U of scales",
                f"{text}bf16 in JAX ({plain:.2f} U) / {plain / value:.2f}", value <= most,
                [units[name], units[BF16]])  # fmt: skip
    if {LEAN, BF16} <= units.keys():
        value, plain = units[LEAN]["value"], units[BF16]["value"]
        text = f"{value:.2f} U: bf16 in JAX ({plain:.2f} U) / {plain / value:.2f}"
        add(f"kept by a layer, {LEAN}", f"≤ {LEAN_UNITS} U", text, value <= LEAN_UNITS,
            [units[LEAN], units[BF16]])  # fmt: skip
    found = speedups(rows)
    for case, least in FASTER.items():
        if case in found:
            times, own = found[case]
            add(f"forward and backward, {case}", f"≥ {least:.2f} x bf16", f"{times:.2f} x",
                times >= least, own)  # fmt: skip
    ends = losses(rows)
    for name, (most, _) in LOSSES.items():
        flags = ends.get("standard", {}).get("flags", {"steps": 0, "parameters": 0})
        if name in ends and flags["steps"] >= STEPS and flags["parameters"] >= WEIGHTS:
            add(f"held-out loss over bf16 with AdamW: {SAYS[name]}", f"≤ {most:.1%}",
                f"{over(ends, name):+.2%}", over(ends, name) <= most,
                [ends[name], ends["standard"]])  # fmt: skip
    pairs = paired(rows)
    if len(pairs) >= SEEDS:
        (mean, error), most = differences(pairs), LOSSES["fp8"][0]
        tokens = pairs[0][0]["flags"]["tokens"]
        add(f"the same with FP8 activations, {len(pairs)} seeds, {tokens:,} tokens per step",
            f"≤ {most:.1%}", f"{mean:+.2%} ± {error:.2%}", mean <= most,
            [row for pair in pairs for row in pair])  # fmt: skip
    return ["target", "asked", "measured", "reached"], body, used


def units(rows: Rows) -> Table:
    """Table 2: U that a layer keeps."""
    found = known(rows, "saved_units").get(TWO_THIRDS, {})
    body = [[name, *(f"{u:g}" for u in own[:-1]), "", f"{own[-1]:g}", f"{PAPER_BF16 / own[-1]:.2f}"]
            for name, own in PRINTED.items()]  # fmt: skip
    own = [found[name] for name in (BF16, LEAN, OURS, XLA_ATTENTION) if name in found]
    for row in own:
        cells = [f"{row['columns'][name]:.2f}" for name in COLUMNS]
        total = row["value"]
        ratio = f"{PAPER_BF16 / total:.2f}"
        body.append([f"ours: {row['impl']}", *cells, f"**{total:.2f}**", ratio])
    return ["U", *COLUMNS, "total", "Table 2's BF16 / it"], body if own else [], own


def layers(rows: Rows) -> Table:
    """Table 7: times and bytes of one layer."""
    here = on_gpus(rows)
    times = {metric: known(here, metric) for metric in ("forward_ms", "backward_ms", "device_ms")}
    kept = known(rows, "saved_bytes")
    body, used = [], []
    for case, own in times["device_ms"].items():
        if case.startswith("norm") or BF16 not in own:
            continue
        base = own[BF16]
        for name, row in own.items():
            cells = [f"{times[m][case][name]['value']:.3g}" for m in ("forward_ms", "backward_ms")]
            memory = kept.get(case, {}).get(name)
            size = f"{memory['value'] / 2**20:.0f}" if memory else ""
            of_paper = PRINTED_SPEED.get(case) if name == OURS else None
            printed = f"{of_paper:.2f} x" if of_paper else ""
            times_bf16 = f"{base['value'] / row['value']:.2f} x" if of_one_run(base, row) else ""
            body.append([case, name, *cells, f"{row['value']:.3g}", times_bf16, printed, size])
            used += [row, memory] if memory else [row]
    head = ["layer", "implementation", "forward, ms", "backward, ms", "both, ms", "x bf16",
            "COAT in Table 7", "kept, MiB"]  # fmt: skip
    return head, body, used


def groups(rows: Rows) -> Table:
    """Table 10: errors by the size of groups."""
    parts = [known(rows, metric) for metric in ("forward_error", "backward_error", "scale_share")]
    if not parts[0]:
        return [], [], []
    case = list(parts[0])[-1]
    forward, backward, share = (part.get(case, {}) for part in parts)
    if "linear alone" not in forward:
        return [], [], []
    body = []
    for name, printed in PRINTED_ERRORS.items():
        base = PRINTED_ERRORS["linear alone"]
        cells = [f"{part[name]['value']:.2e}" for part in (forward, backward)]
        ratio = [
            f"x {part[name]['value'] / part['linear alone']['value']:.2f} ({own / one:.2f})"
            for part, own, one in zip((forward, backward), printed, base, strict=True)
        ]
        exact = f"{name}, exact"
        more = [f"{part[exact]['value']:.2e}" if exact in part else ""
                for part in (forward, backward)]  # fmt: skip
        extra = f"{share[name]['value']:.1%}" if name in share else ""
        body.append([name, extra, *cells, *ratio, *more])
    head = ["activations", "scales", "forward error", "backward error",
            "forward, of linear alone (the paper)", "backward (the paper)",
            "ours, forward", "ours, backward"]  # fmt: skip
    return head, body, [row for part in (forward, backward) for row in part.values()]


def norms(rows: Rows) -> Table:
    """Table 12 and Figure 4b: a norm, and what quantizing its result takes beside."""
    found = known(on_gpus(rows), "device_ms")
    cases = {case.removeprefix("norm-"): own for case, own in found.items()
             if case.startswith("norm-") and BF16 in own}  # fmt: skip
    names = list(dict.fromkeys(name for own in cases.values() for name in own if name != BF16))
    body = []
    for case, own in sorted(cases.items(), key=lambda item: [*map(int, item[0].split("x"))]):
        base = own[BF16]["value"]
        printed = f"{PRINTED_NORMS[case]:.2f}" if case in PRINTED_NORMS else ""
        shown = [f"{own[name]['value'] / base:.2f}" if name in own else "" for name in names]
        body.append([case, f"{1e3 * base:.1f}", *shown, printed])
    head = ["rows x columns", "norm, µs", *(f"x, {name}" for name in names), "the paper: fused"]
    return head, body, [row for own in cases.values() for row in own.values()]


def training(rows: Rows) -> Table:
    """Table 13: held-out losses; of a CPU where there is no other."""
    found = losses(rows) or losses(rows, on_gpu=False)
    if not found:
        return [], [], []
    flags = found["standard"]["flags"]
    body = [["AdamW, activations in 16 bits", f"{found['standard']['value']:.4f}", "", "", ""]]
    for name, says in SAYS.items():
        if name in found:
            most, printed = LOSSES.get(name, (None, None))
            body.append([says, f"{found[name]['value']:.4f}", f"{over(found, name):+.2%}",
                         "" if printed is None else f"{printed:+.2%}",
                         "" if most is None else f"≤ {most:.1%}"])  # fmt: skip
    about = f"{flags['preset']}, {flags['parameters'] / 1e6:.3g}M weights, {flags['steps']} steps"
    unit = found["standard"]["unit"]
    head = [f"{about} of {flags['tokens']:,} tokens", f"held-out loss, {unit}", "over the first",
            "Table 13", "asked of Llama-134m"]  # fmt: skip
    return head, body, list(found.values())


def seeds(rows: Rows) -> Table:
    """Held-out losses with FP8 activations beside those without, by seed."""
    pairs = paired(rows)
    if len(pairs) < 2:
        return [], [], []
    body = [
        [f"{own['seed']}", f"{own['value']:.4f}", f"{other['value']:.4f}",
         f"{other['value'] / own['value'] - 1:+.2%}"]
        for own, other in sorted(pairs, key=lambda pair: pair[0]["seed"])
    ]  # fmt: skip
    mean, error = differences(pairs)
    body.append(["mean ± standard error", "", "", f"{mean:+.2%} ± {error:.2%}"])
    flags = pairs[0][0]["flags"]
    head = [f"seed of weights and batches; {flags['steps']} steps of {flags['tokens']:,} tokens",
            "16-bit activations", "FP8 activations", "relative to 16 bits"]  # fmt: skip
    return head, body, [row for pair in pairs for row in pair]


_TRAIN = "activation_training"
TABLES = {
    "activation_targets": Rendered(targets, "activations"),
    "activation_units": Rendered(units, "activations"),
    "activation_layers": Rendered(layers, "activations"),
    "activation_groups": Rendered(groups, "activations"),
    "activation_norms": Rendered(norms, "activations"),
    "activation_training": Rendered(training, _TRAIN),
    "activation_seeds": Rendered(seeds, f"{_TRAIN} --variants standard fp8 --batch 128 --seed N"),
}
