"""The tables of docs/results/activations.md: a layer with FP8 activations, and training."""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.claims import findings
from benchmarks.records import Rows, by_gpu, grouped, last, newest, on_gpus, select
from benchmarks.render import NOTHING, Rendered, Table, cell, markdown, source, target
from benchmarks.suites.activations.bytes import COLUMNS
from benchmarks.suites.activations.layers import Shape

BF16, LEAN, OURS, XLA_ATTENTION = "bf16", "bf16-lean", "fp8-flow", "fp8-flow, xla attention"
TWO_THIRDS = "h3072-s2048-b4"  # the shape with the paper's MLP: 8/3 of the width
SCALES = 0.125  # of the codes that have one for 16
UNITS, LEAN_UNITS = 13.4, 17
# shape of Table 7 -> times faster than bf16 that were asked for
FASTER = {"h4096-s2048-b4": 1.4, "h2048-s2048-b4": 1.25}
FLAX = "flax-fp8"
PASSES = ("forward_ms", "backward_ms", "device_ms")
# commits of an H200's records before and after norms and gates wrote codes in both layouts
ONE_LAYOUT, BOTH_LAYOUTS = "eb0edc5000", "f240b367f1"
NORM, MOST_OF_A_NORM = "8192x4096", 1.3
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
SAYS = {"fp8-coat_adamw": "FP8 activations and coat_adamw", "fp8": "FP8 activations",
        "coat_adamw": "coat_adamw", OTHER: "other initial weights"}  # fmt: skip
STEPS, WEIGHTS, SEEDS = 2000, 130e6, 3  # at least, for a target


def known(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """case -> implementation -> the record of a metric that was stored last."""
    return grouped(select(rows, bench="activations", metric=metric), "case", "impl")


def runs_by_gpu(rows: Rows) -> dict[str, Rows]:
    return by_gpu(select(rows, bench="activations"))


def scale_units(case: str) -> float:
    """U of scales of 16 neighbours, on norms' inputs, gate and up."""
    shape = Shape.parse(case)
    return SCALES * (1 + shape.hidden / shape.width)


_SCALES = scale_units(TWO_THIRDS)


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


def losses(rows: Rows) -> dict[str, dict]:
    """Variant -> record of its held-out loss, in the last of the runs with the most variants."""
    found: dict[str, dict[str, dict]] = {}
    for row in select(on_gpus(rows), bench="train", metric="val_loss"):
        if "/activations" in row["case"]:
            run = json.dumps([row[key] for key in ("device", "jax", "case", "flags")])
            found.setdefault(run, {})[row["impl"]] = row
    runs = [run for run in found.values() if BASELINE in run]
    return max(reversed(runs), key=len, default={})


def paired(rows: Rows, name: str = "fp8") -> list[tuple[dict, dict]]:
    """(baseline, variant) by seed: of the runs that differ in it alone, those with the most."""
    cases = dict.fromkeys(row["case"] for row in rows if "/activations" in row["case"])
    names = ("val_loss", BASELINE, name)
    found = [list(pair.by_seed().values()) for case in cases
             for pair in findings.paired(on_gpus(rows), case, *names, least=1)]  # fmt: skip
    return max(reversed(found), key=len, default=[])


def differences(pairs: list[tuple[dict, dict]]) -> tuple[float, float]:
    """The mean relative difference of pairs, and its standard error."""
    return findings.mean_and_error([other["value"] / own["value"] - 1 for own, other in pairs])


def over(found: dict[str, dict], name: str) -> float:
    return found[name]["value"] / found[BASELINE]["value"] - 1


def _targets(rows: Rows) -> Iterator[tuple[list[str], Rows]]:
    def ratio(what: str, asked: str, limit: float, of: dict, over: dict) -> Any:
        value = of["value"] / over["value"]
        return target(what, asked, limit, value, f"{value:.2f} x"), [of, over]

    found = known(rows, "saved_units").get(TWO_THIRDS, {})
    with_scales = f"≤ {UNITS} U and {_SCALES:.2f} U of scales", UNITS + _SCALES
    for name, asked, most in (
        (OURS, *with_scales), (XLA_ATTENTION, *with_scales), (LEAN, f"≤ {LEAN_UNITS} U", LEAN_UNITS)
    ):  # fmt: skip
        if {name, BF16} <= found.keys():
            value, plain = found[name]["value"], found[BF16]["value"]
            text = "" if name == LEAN else f"Table 2's bf16 / {PAPER_BF16 / value:.2f}, "
            text = f"{value:.2f} U: {text}bf16 in JAX ({plain:.2f} U) / {plain / value:.2f}"
            used = [found[name], found[BF16]]
            yield target(f"kept by a layer, {name}", asked, most, value, text), used
    for gpu, of_gpu in runs_by_gpu(rows).items():
        times = speedups(of_gpu)
        for case, least in FASTER.items():
            if case in times:
                what = f"forward and backward, {case}, {gpu}"
                yield ratio(what, "≥ {:.2f} x bf16", least, *times[case][1])
        timed = known(of_gpu, "device_ms")
        for case, own in timed.items():
            if {OURS, FLAX} <= own.keys():
                what = f"forward and backward beside Flax's FP8 layer, {case}, {gpu}"
                yield ratio(what, "≥ {:.2f} x", 1.0, own[FLAX], own[OURS])
        plain = timed.get(f"norm-{NORM}", {}).get(BF16, {"device": None})
        kernel = {"case": f"fp8-norm/{NORM}", "metric": "device_ms", "device": plain["device"]}
        if alone := select(rows, bench="kernels", **kernel):
            what = f"a norm with its input's codes and maxima in one kernel, {NORM}, {gpu}"
            ours = min(alone, key=lambda row: row["value"])
            yield ratio(what, "≤ {:.2f} x the plain norm", MOST_OF_A_NORM, ours, plain)
    ends = losses(rows)
    for name, (most, _) in LOSSES.items():
        flags = ends.get(BASELINE, {}).get("flags", {"steps": 0, "parameters": 0})
        if name in ends and flags["steps"] >= STEPS and flags["parameters"] >= WEIGHTS:
            more, what = over(ends, name), f"held-out loss over bf16 with AdamW: {SAYS[name]}"
            line = target(what, "≤ {:.1%}", most, more, f"{more:+.2%}")
            yield line, [ends[name], ends[BASELINE]]
    pairs = paired(rows)
    if len(pairs) >= SEEDS:
        (mean, error), tokens = differences(pairs), pairs[0][0]["flags"]["tokens"]
        what = f"the same with FP8 activations, {len(pairs)} seeds, {tokens:,} tokens per step"
        line = target(what, "≤ {:.1%}", LOSSES["fp8"][0], mean, f"{mean:+.2%} ± {error:.2%}")
        yield line, [row for pair in pairs for row in pair]


def targets(rows: Rows) -> Table:
    found = list(_targets(rows))
    used = [row for _, of in found for row in of]
    return ["target", "asked", "measured", "reached"], [line for line, _ in found], used


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
    """Table 7: times and bytes of one layer."""
    kept, body, used = known(rows, "saved_bytes"), [], []
    for gpu, of_gpu in runs_by_gpu(rows).items():
        times = {metric: known(of_gpu, f"{metric}_ms") for metric in ("forward", "backward")}
        for case, own in known(of_gpu, "device_ms").items():
            if case.startswith("norm") or BF16 not in own:
                continue
            for name, row in own.items():
                memory = kept.get(case, {}).get(name)
                printed = PRINTED_SPEED.get(case) if name == OURS else None
                faster = speedups(of_gpu, name).get(case)
                body.append([
                    gpu, case, name, *(cell(times[m][case][name], "{:.3g}") for m in times),
                    cell(row, "{:.3g}"),
                    f"{faster[0]:.2f} x" if faster else "",
                    f"{printed:.2f} x" if printed else "", cell(memory, "{:.0f}", 2.0**20),
                ])  # fmt: skip
                used += [row, memory] if memory else [row]
    head = ["GPU", "layer", "implementation", "forward, ms", "backward, ms", "both, ms", "x bf16",
            "COAT in Table 7", "kept, MiB"]  # fmt: skip
    return head, body, used


def _moved(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """case -> implementation -> record of a layer compiled for an H100."""
    return grouped(select(rows, bench="activation_passes", metric=metric), "case", "impl")


def passes(rows: Rows) -> Table:
    """Bytes that a layer reads and writes by what for, and its kernels, compiled for an H100."""
    body, used, kinds = [], [], list[str]()
    for case in sorted(_moved(rows, "both_traffic_bytes")):
        for which in ("forward", "both"):
            moved = _moved(rows, f"{which}_traffic_bytes")[case]
            launches = _moved(rows, f"{which}_launches")[case]
            for name, row in moved.items():
                kinds = list(row["kinds"])
                body.append([
                    case, which, name, *(f"{row['kinds'][k] / 2**20:,.0f}" for k in kinds),
                    cell(row, "{:,.0f}", 2.0**20), f"{row['value'] / moved[BF16]['value']:.2f} x",
                    cell(launches[name], "{:.0f}"),
                ])  # fmt: skip
                used += [row, launches[name]]
    head = ["layer", "passes", "implementation", *(f"{kind}, MiB" for kind in kinds), "all, MiB",
            "relative to bf16", "kernels"]  # fmt: skip
    return head, body, used


def gap(rows: Rows) -> Table:
    """The time that a layer takes over Flax's, by pass, and what of it more bytes explain."""
    body, used, moved = [], [], _moved(rows, "both_traffic_bytes")
    for gpu, of_gpu in runs_by_gpu(rows).items():
        copy = last(on_gpus(rows), metric="copy_tbps", device=of_gpu[0]["device"])
        times = [known(of_gpu, metric) for metric in PASSES]
        for case, own in times[-1].items():
            if copy is None or not {OURS, FLAX} <= moved.get(case, {}).keys() & own.keys():
                continue
            (*more, size) = (of[case][OURS]["value"] - of[case][FLAX]["value"]
                             for of in (*times, moved))  # fmt: skip
            body.append([
                gpu, case, *(f"{ms:+.2f}" for ms in more), f"{size / 2**20:+,.0f}",
                f"{size / copy['value'] / 1e9:+.2f}",
            ])  # fmt: skip
            used += [copy, own[OURS], own[FLAX], moved[case][OURS], moved[case][FLAX]]
    head = ["GPU", "layer", "forward, ms", "backward, ms", "both, ms", "bytes of both, MiB",
            "these at a copy's speed, ms"]  # fmt: skip
    return head, body, used


def layouts(rows: Rows) -> str:
    """Times with codes in both layouts over those before, and of what did not change beside."""
    runs = [newest(rows, bench="activations", commit=c) for c in (ONE_LAYOUT, BOTH_LAYOUTS)]
    before, after = ([known(run, metric) for metric in PASSES] for run in runs)
    body, used = [], []
    for case in filter(before[-1].get, after[-1]):
        beside = BF16 if case.startswith("norm-") else FLAX
        pairs = [(old.get(case, {}).get(name), new.get(case, {}).get(name))
                 for name in (OURS, beside)
                 for old, new in zip(before, after, strict=True)]  # fmt: skip
        cells = [cell(new, "{:.3f}", old["value"]) if old else "" for old, new in pairs]
        used += [row for pair in pairs for row in pair if row]
        body.append([case, *cells, beside])
    if not body:
        return NOTHING
    head = ["of", *(f"{name}, {which}" for name in (OURS, "beside")
                    for which in ("forward", "backward", "both")), "beside is"]  # fmt: skip
    return markdown(head, body) + source(used)


def groups(rows: Rows) -> Table:
    """Table 10: errors by the size of groups."""
    forward, backward, share = (
        list(known(rows, metric).values() or [{}])[-1]
        for metric in ("forward_error", "backward_error", "scale_share")
    )
    if "linear alone" not in forward:
        return [], [], []
    body, base, parts = [], "linear alone", (forward, backward)
    for name, printed in PRINTED_ERRORS.items():
        ratios = [
            f"x {part[name]['value'] / part[base]['value']:.2f} ({own / one:.2f})"
            for part, own, one in zip(parts, printed, PRINTED_ERRORS[base], strict=True)
        ]
        cells = [cell(part[name], "{:.2e}") for part in parts]
        more = [cell(part.get(f"{name}, exact"), "{:.2e}") for part in parts]
        body.append([name, cell(share.get(name), "{:.1%}"), *cells, *ratios, *more])
    head = ["activations", "scales", "forward error", "backward error",
            "forward, of linear alone (the paper)", "backward (the paper)",
            "ours, forward", "ours, backward"]  # fmt: skip
    return head, body, [row for part in (*parts, share) for row in part.values()]


def norms(rows: Rows) -> Table:
    """Table 12 and Figure 4b: a norm, and what quantizing its result takes beside."""
    found = {
        (gpu, *map(int, case.removeprefix("norm-").split("x"))): own
        for gpu, of_gpu in runs_by_gpu(rows).items()
        for case, own in known(of_gpu, "device_ms").items()
        if case.startswith("norm-") and BF16 in own
    }
    names = list(dict.fromkeys(name for own in found.values() for name in own if name != BF16))
    body = []
    for (gpu, *size), own in sorted(found.items(), key=lambda item: item[0]):
        case, base = "x".join(map(str, size)), own[BF16]["value"]
        printed = f"{PRINTED_NORMS[case]:.2f}" if case in PRINTED_NORMS else ""
        shown = [cell(own.get(name), "{:.2f}", base) for name in names]
        body.append([gpu, case, f"{1e3 * base:.1f}", *shown, printed])
    head = ["GPU", "rows x columns", "norm, µs", *(f"x, {name}" for name in names),
            "the paper: fused"]  # fmt: skip
    return head, body, [row for own in found.values() for row in own.values()]


def training(rows: Rows) -> Table:
    """Table 13: held-out losses."""
    found = losses(rows)
    if not found:
        return [], [], []
    base = found[BASELINE]
    body = [["AdamW, activations in 16 bits", cell(base, "{:.4f}"), "", "", ""]]
    for name in filter(found.get, SAYS):
        most, theirs = LOSSES.get(name, ("", ""))
        asked = [f"{theirs:+.2%}", f"≤ {most:.1%}"] if name in LOSSES else ["", ""]
        body.append([SAYS[name], cell(found[name], "{:.4f}"), f"{over(found, name):+.2%}", *asked])
    flags = base["flags"]
    about = f"{flags['preset']}, {flags['parameters'] / 1e6:.3g}M weights, {flags['steps']} steps"
    head = [f"{about} of {flags['tokens']:,} tokens", f"held-out loss, {base['unit']}",
            "over the first", "Table 13", "asked of Llama-134m"]  # fmt: skip
    return head, body, list(found.values())


def seeds(rows: Rows) -> Table:
    """Held-out losses with FP8 activations beside those without, by seed."""
    pairs = paired(rows)
    if len(pairs) < 2:
        return [], [], []
    body = [
        [f"{own['seed']}", cell(own, "{:.4f}"), cell(other, "{:.4f}"),
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
    **{f"activation_{make.__name__}": Rendered(make, "activations")
       for make in (targets, units, layers, groups, norms)},
    "activation_passes": Rendered(passes, "activation_passes"),
    "activation_gap": Rendered(gap, "activations"),
    "activation_layouts": layouts,
    "activation_training": Rendered(training, _TRAIN),
    "activation_seeds": Rendered(seeds, f"{_TRAIN} --variants standard fp8 --batch 128 --seed N"),
}  # fmt: skip
