"""Parts of the records that notebooks carry in a cell: `python -m tools.notebooks` writes them."""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import curves, records
from benchmarks.claims.gaussws import MATRICES
from benchmarks.claims.stable_adamw import point
from benchmarks.suites import spikes
from benchmarks.suites.activations import tables as activation_tables
from benchmarks.suites.activations.bytes import by_column, kept
from benchmarks.suites.activations.layers import Shape
from benchmarks.suites.fit import tables as fit_tables
from benchmarks.suites.gaussws.training import STATISTICS
from benchmarks.suites.pairs import figures
from benchmarks.suites.pairs.differences import differences

WIDTH = 96
RECORDED = "Recorded by `python -m {}` in the repository: {device}, jax {jax}, commit {commit}."
# a dict of lists of numbers: its name, comments, entries, and the digits of numbers
Part = tuple[str, list[str], Mapping[str, Any], int]


def number(x: Any, digits: int) -> str:
    """Return a number as Python writes it: a whole one, or another with so many digits."""
    if isinstance(x, str):
        return f'"{x}"'
    return f"{x:.0f}" if float(x).is_integer() else f"{float(x):.{digits}g}"


def cell(*parts: Any) -> str:
    """Return a cell of parts, whose numbers have 5 digits where nothing else is said."""
    lines, how = [], {"initial_indent": 8 * " ", "subsequent_indent": 8 * " "}
    for name, comment, entries, *digits in parts:
        lines += [*(f"# {line}" for line in comment), f"{name} = {{"]
        for key, values in entries.items():
            text = ", ".join(number(x, *(digits or [5])) for x in values)
            line = f'    "{key}": [{text}],'
            if len(line) > WIDTH:  # broken between numbers
                lines += [f'    "{key}": [']
                lines += textwrap.wrap(f"{text},", WIDTH, break_on_hyphens=False, **how) + [
                    "    ],"
                ]
            else:
                lines.append(line)
        lines.append("}  # fmt: skip")
    return "\n".join(lines)


def q_adam_mini() -> str:
    stored = curves.load()
    about, of_runs = stored.about, stored.runs
    names = [name for name in of_runs if name != "q_adam_mini-case1"]
    losses = {"step": of_runs["adam_mini"]["val_step"]}
    losses |= {name: of_runs[name]["val_loss"] for name in names}
    step, every, tenth = of_runs["adam_mini"]["step"], slice(9, None, 10), slice(None, None, 10)
    norms = {"step": step[every]} | {
        f"{of} {name}": of_runs[name][f"{of}_norm"][every]
        for of in ("embedding", "mlp", "mu", "nu")
        for name in names
        if name != "q_adam_mini-case1-guarded"
    }
    case_1 = {"step": step[tenth], "loss": of_runs["q_adam_mini-case1"]["train_loss"][tenth]}
    what = [
        RECORDED.format("benchmarks.run adam_mini", **about),
        f"A GPT of {about['parameters']:,} weights, {about['steps']:,} steps, one seed.",
    ]
    return cell(
        ("LOSSES", [*what, "Held-out losses"], losses),
        ("NORMS", ["Norms of the embedding, of a kernel of a middle layer, and of the embedding's "
                   "moments"], norms, 4),
        ("CASE_1", ["Training losses with 8-bit v by equation 1"], case_1, 4),
    )  # fmt: skip


def stable_adamw() -> str:
    stored, usual = spikes.stored(), point().split(" ")[1:]
    row = records.last(records.all_records(), bench="spikes", metric="loss_spikes")
    assert row is not None
    last = {name: np.median(of[0, :, -1000:], axis=-1) for name, of in stored.items()}
    found, change = {}, {}
    for name, of in stored.items():
        optimizer, _, where = name.partition("/")
        key = " ".join([optimizer, *(one for one in where.split(" ") if one not in usual)])
        events = spikes.predicted(of[0], of[1])
        found[key] = [events.spikes.size, events.follows.sum(), spikes.rise(of[0])]
        if where.endswith(" ".join(usual)):
            change[key] = last[name] - last[f"adamw/{point()}"]
    at, closely = int(spikes.arrivals(0)[0]), {"step": np.arange(-6, 19)}
    for b2 in (0.999, 0.99):
        curve = stored[f"adamw/{point(b2)}"][:, 0, at - 6 : at + 19]
        layers = zip(("loss", "patch", "middle"), curve, strict=True)
        closely |= {f"{layer} {b2}": one for layer, one in layers}
    what = [
        RECORDED.format("benchmarks.run spikes", **row),
        f"{row['steps']:,} steps and {row['seeds']} seeds each, 12 changes of the data a run.",
    ]
    return cell(
        ("SPIKES", [*what, "Loss spikes of all seeds; those that an RMS spike precedes; mean rise "
                    "of the loss after a change"], found, 4),
        ("LAST_LOSS", ["Last loss less that of AdamW at b2 = 0.999, by seed"], change, 3),
        ("CLOSELY", ["Around a change, by b2: loss, RMS of the patch embedding and of a middle "
                     "layer"], closely, 3),
    )  # fmt: skip


def of_part(stored: curves.Curves, part: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the runs of a part of stored curves by their variant."""
    return {k.partition("/")[2]: v for k, v in stored.runs.items() if k.startswith(f"{part}/")}


def settings(suite: str, about: Mapping[str, Any], unit: str) -> list[str]:
    return [
        RECORDED.format(f"benchmarks.run {suite}", **about),
        f"A Llama of {about['parameters']:,} weights, {about['steps']:,} steps of "
        f"{about['tokens']:,} {unit}, one seed.",
    ]


def held_out(of_runs: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    first = next(iter(of_runs.values()))
    return {"step": first["val_step"]} | {name: of["val_loss"] for name, of in of_runs.items()}


def switchback() -> str:
    stored = curves.load(records.RESULTS / "switchback.npz")
    run, large = of_part(stored, "run"), of_part(stored, "large")
    names = ("standard", "standard-layer-scale", "tensorwise-unit", "tensorwise-unit-layer-scale")
    features = {f"{name}, {when}": run[name]["features"][at] for name in names
                for when, at in (("init", 0), ("end", -1))}  # fmt: skip
    what = settings("switchback", stored.about["run"], "bytes")
    return cell(
        ("LOSSES", [*what, "Held-out losses"], held_out(run)),
        ("LARGE", ["The same with a batch eight times as large: "
                   f"{stored.about['large']['steps']} steps"], held_out(large)),
        ("FEATURES", ["Mean magnitude E|x| below each layer"], features, 3),
    )  # fmt: skip


def gaussws() -> str:
    stored = curves.load(records.RESULTS / "gaussws.npz")
    run, of_rates = of_part(stored, "run"), of_part(stored, "rates")
    noisy = {f"{name}, with noise": of["sampled_loss"] for name, of in run.items()
             if "sampled_loss" in of}  # fmt: skip
    every, mean = run["gaussws[all]"], STATISTICS.index("mean")
    by_step = {kind: every[f"bits_{kind}"][..., mean] for kind in MATRICES}
    bits = {"step": every["val_step"]} | {kind: of.mean(1) for kind, of in by_step.items()}
    casts: dict[str, Any] = {"format": ("safe", "e3m4", "e3m3", "e3m2", "e3m1", "e2m1")}
    for name in ("no noise", "gaussws[all]"):
        losses = [float(run[name][f"cast_all {to}"][0]) for to in casts["format"]]
        casts[name] = [100 * (one / float(run[name]["cast_clean"][0]) - 1) for one in losses]
    rates: dict[str, dict[float, float]] = {}
    for label, of in of_rates.items():
        name, _, factor = label.rpartition(" x")
        rates.setdefault("factor", {})[float(factor)] = float(factor)
        rates.setdefault(name, {})[float(factor)] = of["val_loss"][-1]
    what = settings("gaussws", stored.about["run"], "bytes")
    return cell(
        ("LOSSES", [*what, "Held-out losses"], held_out(run) | noisy),
        ("BITS", ["gaussws[all]: mean b_t of each kind of matrix, over the run"], bits, 4),
        ("BLOCKS", ["and of each of the eight blocks, at the end"],
         {kind: of[-1] for kind, of in by_step.items()}, 4),
        ("CASTS", ["Held-out loss of the trained weights, cast to a format, over that without a "
                   "cast, in %"], casts, 3),
        ("RATES", [f"Held-out loss after {stored.about['rates']['steps']} steps, by factor on the "
                   "learning rate"], {name: [*of.values()] for name, of in rates.items()}),
    )  # fmt: skip


def coat_activations() -> str:
    stored = curves.load(records.RESULTS / "coat_activations.npz")
    about, rows = stored.about["run"], records.newest(records.all_records())
    shape = Shape.parse(activation_tables.TWO_THIRDS)
    units = {name: [own[-1]] for name, own in activation_tables.PRINTED.items()}
    for name, layer in (("bf16", activation_tables.BF16), ("FP8", activation_tables.OURS)):
        units[f"ours, {name}"] = [sum(by_column(kept(shape, layer, "cudnn")).values())]
    found, printed = activation_tables.speedups(rows), activation_tables.PRINTED_SPEED
    times = {case: [faster, printed[case]] for case, (faster, _) in found.items()}
    timed, names = next(iter(found.values()))[1][0], ("flash_adamw", "coat_adamw", fit_tables.COAT)
    fits = {
        case: [of[name]["max_batch"] for name in (fit_tables.BASE, *names)]
        for case, of in fit_tables.fits(rows).items()
        if all("max_batch" in of.get(name, {}) for name in (fit_tables.BASE, *names))
    }
    batches = {case: [row["value"] for row in of] for case, of in fits.items()}
    *_, (*_, fitted) = fits.values()
    where = "{device}, jax {jax}, commit {commit}".format
    what = settings("activation_training", about, f"{about['tokenizer']} tokens")
    return cell(
        ("UNITS", ["U that a layer keeps: the paper's; ours, from shapes"], units, 4),
        ("SPEEDUPS", ["Speed of a layer (h: width, s: length, b: batch) over bf16's, and the "
                      "paper's", where(**timed)], times, 3),
        ("BATCHES", ["Largest batch on one GPU: optax.adamw, flash_adamw, coat_adamw, and that "
                     "with FP8 activations", where(**fitted)], batches),
        ("LOSSES", [*what, "Held-out losses"], held_out(of_part(stored, "run"))),
    )  # fmt: skip


def pairs(name: str, path: Path, base: str, variants: Iterable[str]) -> Part:
    """Return differences of paired runs: means, and intervals of 90 % where seeds give one."""
    stored, entries, seeds = curves.load(path), {}, 0
    for variant in variants:
        own = differences(stored, base, variant)
        seeds, entries["step"] = len(own.each), own.steps
        entries[variant] = own.mean
        if own.interval:
            entries[f"{variant}, low"], entries[f"{variant}, high"] = own.interval
    about = stored.about
    what = [
        RECORDED.format("benchmarks.run pairs", **about),
        f"{about['preset']}, {about['parameters']:,} weights, {about['steps']:,} steps of "
        f"{about['batch'] * about['context']:,} tokens, seeds: {seeds}.",
        f"Held-out losses over those of {base}, %, and the interval of 90 % of the mean",
    ]
    return name, what, entries, 3


# notebook's cell -> the pairs in it, of GPTs, of a Llama, and of a GPT again
_F32 = [name for name, (base, *_) in figures.COAT.items() if base == "adamw"]
PAIRED = {
    "paired_flashoptim": [
        ("LONG_ADAM", figures.LONG["adam"], "adamw", ["flash_adamw"]),
        ("LONG_LION", figures.LONG["lion"], "lion", ["flash_lion"]),
        ("MIDDLE_ADAM", figures.MIDDLE["adam"], "adamw", ["flash_adamw"]),
        ("MIDDLE_LION", figures.MIDDLE["lion"], "lion", ["flash_lion"]),
        ("SHORT", figures.SHORT, "adamw", figures.CONTROL),
    ],
    "paired_coat": [
        ("F32_WEIGHTS", figures.LLAMA, "adamw", _F32),
        ("SPLIT_WEIGHTS", figures.LLAMA, "split", ["coat_adamw", "split+fp8", "coat_adamw+fp8"]),
    ],
    "paired_coat_states": [("PAIRS", figures.MIDDLE["adam"], "adamw", figures.FORTY["adam"])],
}
EXCERPTS: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (coat_activations, gaussws, switchback, q_adam_mini, stable_adamw)
} | {
    name: lambda every=every: cell(*(pairs(*one) for one in every))
    for name, every in PAIRED.items()
}  # fmt: skip
