"""Parts of the records that notebooks carry in a cell: `python -m tools.notebooks` writes them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import curves, records
from benchmarks.claims.stable_adamw import point
from benchmarks.suites import spikes
from benchmarks.suites.activations import tables as activation_tables
from benchmarks.suites.activations.bytes import by_column, kept
from benchmarks.suites.activations.layers import Shape
from benchmarks.suites.fit import tables as fit_tables
from benchmarks.suites.gaussws.training import KINDS, STATISTICS
from benchmarks.suites.pairs import figures
from benchmarks.suites.pairs.differences import differences

WIDTH = 96


def numbers(values: Any, digits: int = 5) -> str:
    """Return a list of numbers as Python writes it: whole ones, others with so many digits."""

    def text(x: Any) -> str:
        if isinstance(x, str):
            return f'"{x}"'
        return f"{x:.0f}" if float(x).is_integer() else f"{float(x):.{digits}g}"

    return "[" + ", ".join(map(text, values)) + "]"


def wrapped(head: str, values: str) -> list[str]:
    """Return lines of one entry, broken between numbers."""
    line, indent = f"    {head}{values},", 8 * " "
    if len(line) <= WIDTH:
        return [line]
    how = {"initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    return [f"    {head}[", *textwrap.wrap(f"{values[1:-1]},", WIDTH, **how), "    ],"]


def where(about: Mapping[str, Any]) -> str:
    """Return where and from which commit something was recorded."""
    return f"{about['device']}, jax {about['jax']}, commit {about['commit']}"


def written(name: str, comment: list[str], entries: Mapping[str, Any], digits: int = 5) -> str:
    """Return a cell: comments, and a dict of lists of numbers."""
    lines = [f"# {line}" for line in comment] + [f"{name} = {{"]
    for key, values in entries.items():
        lines += wrapped(f'"{key}": ', numbers(values, digits))
    return "\n".join([*lines, "}  # fmt: skip"])


def q_adam_mini() -> str:
    """Return the held-out losses and norms of `adam_mini`."""
    stored = curves.load()
    about, of_runs = stored.about, stored.runs
    names = [name for name in of_runs if name != "q_adam_mini-case1"]
    steps = {"step": of_runs["adam_mini"]["val_step"]}
    losses = {name: of_runs[name]["val_loss"] for name in names}
    every = slice(9, None, 10)
    norms = {"step": of_runs["adam_mini"]["step"][every]}
    norms |= {
        f"{of} {name}": of_runs[name][f"{of}_norm"][every]
        for of in ("embedding", "mlp", "mu", "nu")
        for name in names
        if name != "q_adam_mini-case1-guarded"
    }
    case_1 = of_runs["q_adam_mini-case1"]["train_loss"]
    what = [
        f"Recorded by `python -m benchmarks.run adam_mini` in the repository: {where(about)}.",
        f"A GPT of {about['parameters']:,} weights, {about['steps']:,} steps, one seed.",
    ]
    return "\n".join([
        written("LOSSES", [*what, "Held-out losses"], steps | losses),
        written("NORMS", ["Norms of the embedding, of a kernel of a middle layer, and of the "
                          "embedding's moments"], norms, 4),
        written("CASE_1", ["Training losses with 8-bit v by equation 1"],
                {"step": of_runs["adam_mini"]["step"][::10], "loss": case_1[::10]}, 4),
    ])  # fmt: skip


def stable_adamw() -> str:
    """Return the spikes and last losses of `spikes`, and one spike closely."""
    stored = spikes.stored()
    row = records.last(records.all_records(), bench="spikes", metric="loss_spikes")
    assert row is not None
    reference = np.median(stored[f"adamw/{point()}"][0, :, -1000:], axis=-1)
    found, change = {}, {}
    for name, of in stored.items():
        optimizer, _, where_ = name.partition("/")
        key = f"{optimizer} {where_}"
        for usual in (" rate=0.005", " batch=512", " width=32"):
            key = key.replace(usual, "")
        events = spikes.predicted(of[0], of[1])
        found[key] = [events.spikes.size, events.follows.sum(), spikes.rise(of[0])]
        if where_.endswith("rate=0.005 batch=512 width=32"):
            change[key] = np.median(of[0, :, -1000:], axis=-1) - reference
    at = int(spikes.arrivals(0)[0])
    closely = {"step": np.arange(-6, 19)}
    for b2 in (0.999, 0.99):
        curve = stored[f"adamw/{point(b2)}"][:, 0, at - 6 : at + 19]
        closely |= {f"{layer} {b2}": one for layer, one in
                    zip(("loss", "patch", "middle"), curve, strict=True)}  # fmt: skip
    what = [
        f"Recorded by `python -m benchmarks.run spikes` in the repository: {where(row)}.",
        f"{row['steps']:,} steps and {row['seeds']} seeds each, 12 changes of the data a run.",
    ]
    return "\n".join([
        written("SPIKES", [*what, "Loss spikes of all seeds; those that an RMS spike precedes; "
                           "mean rise of the loss after a change"], found, 4),
        written("LAST_LOSS", ["Last loss less that of AdamW at b2 = 0.999, by seed"], change, 3),
        written("CLOSELY", ["Around a change, by b2: loss, RMS of the patch embedding and of "
                            "a middle layer"], closely, 3),
    ])  # fmt: skip


def of_part(stored: curves.Curves, part: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the runs of a part of stored curves by their variant."""
    return {k.partition("/")[2]: v for k, v in stored.runs.items() if k.startswith(f"{part}/")}


def settings(command: str, about: Mapping[str, Any], unit: str) -> list[str]:
    """Return comments on what runs were, and where."""
    return [
        f"Recorded by `{command}` in the repository: {where(about)}.",
        f"A Llama of {about['parameters']:,} weights, {about['steps']:,} steps of "
        f"{about['tokens']:,} {unit}, one seed.",
    ]


def held_out(of_runs: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Return the held-out losses of runs, with their steps."""
    first = next(iter(of_runs.values()))
    return {"step": first["val_step"]} | {name: of["val_loss"] for name, of in of_runs.items()}


def switchback() -> str:
    """Return the held-out losses and the magnitudes of features of `switchback`."""
    stored = curves.load(records.RESULTS / "switchback.npz")
    run, large = of_part(stored, "run"), of_part(stored, "large")
    names = ("standard", "standard-layer-scale", "tensorwise-unit", "tensorwise-unit-layer-scale")
    features = {f"{name}, {when}": run[name]["features"][at] for name in names
                for when, at in (("init", 0), ("end", -1))}  # fmt: skip
    what = settings("python -m benchmarks.run switchback", stored.about["run"], "bytes")
    return "\n".join([
        written("LOSSES", [*what, "Held-out losses"], held_out(run)),
        written("LARGE", ["The same with a batch eight times as large: "
                          f"{stored.about['large']['steps']} steps"], held_out(large)),
        written("FEATURES", ["Mean magnitude E|x| below each layer"], features, 3),
    ])  # fmt: skip


def gaussws() -> str:
    """Return the losses, bitwidths, casts and learning rates of `gaussws`."""
    stored = curves.load(records.RESULTS / "gaussws.npz")
    run, rates = of_part(stored, "run"), of_part(stored, "rates")
    noisy = {f"{name}, with noise": of["sampled_loss"] for name, of in run.items()
             if "sampled_loss" in of}  # fmt: skip
    every, mean = run["gaussws[all]"], STATISTICS.index("mean")
    bits = {"step": every["val_step"]}
    bits |= {kind: every[f"bits_{kind}"][..., mean].mean(1) for kind in KINDS}
    by_block = {kind: every[f"bits_{kind}"][-1, :, mean] for kind in KINDS}
    formats = ("safe", "e3m4", "e3m3", "e3m2", "e3m1", "e2m1")
    casts = {"format": formats}
    for name in ("no noise", "gaussws[all]"):
        clean = float(run[name]["cast_clean"][0])
        casts[name] = [100 * (float(run[name][f"cast_all {to}"][0]) / clean - 1) for to in formats]
    last: dict[str, Any] = {}
    for label, of in rates.items():
        name, _, factor = label.rpartition(" x")
        last.setdefault("factor", {})[float(factor)] = float(factor)
        last.setdefault(name, {})[float(factor)] = of["val_loss"][-1]
    what = settings("python -m benchmarks.run gaussws", stored.about["run"], "bytes")
    return "\n".join([
        written("LOSSES", [*what, "Held-out losses"], held_out(run) | noisy),
        written("BITS", ["gaussws[all]: mean b_t of each kind of matrix, over the run"], bits, 4),
        written("BLOCKS", ["and of each of the eight blocks, at the end"], by_block, 4),
        written("CASTS", ["Held-out loss of the trained weights, cast to a format, over that "
                          "without a cast, in %"], casts, 3),
        written("RATES", [f"Held-out loss after {stored.about['rates']['steps']} steps, by "
                          "factor on the learning rate"],
                {name: list(of.values()) for name, of in last.items()}),
    ])  # fmt: skip


def coat_activations() -> str:
    """Return the bytes, times, batches and losses of FP8 activations."""
    stored = curves.load(records.RESULTS / "coat_activations.npz")
    about = stored.about["run"]
    rows = records.newest(records.all_records())
    shape = Shape.parse(activation_tables.TWO_THIRDS)
    units = {name: [own[-1]] for name, own in activation_tables.PRINTED.items()}
    for name, layer in (("bf16", activation_tables.BF16), ("FP8", activation_tables.OURS)):
        units[f"ours, {name}"] = [sum(by_column(kept(shape, layer, "cudnn")).values())]
    found = activation_tables.speedups(rows)
    printed = activation_tables.PRINTED_SPEED
    times = {case: [faster, printed[case]] for case, (faster, _) in found.items()}
    timed = next(iter(found.values()))[1][0]
    batches, fitted = {}, None
    for case, of in fit_tables.fits(rows).items():
        names = (fit_tables.BASE, "flash_adamw", "coat_adamw", fit_tables.COAT)
        if all("max_batch" in of.get(name, {}) for name in names):
            batches[case] = [of[name]["max_batch"]["value"] for name in names]
            fitted = of[fit_tables.COAT]["max_batch"]
    assert fitted is not None
    tokens = f"{about['tokenizer']} tokens"
    what = settings("python -m benchmarks.run activation_training", about, tokens)
    return "\n".join([
        written("UNITS", ["U that a layer keeps: the paper's; ours, from shapes"], units, 4),
        written("SPEEDUPS", ["Speed of a layer (h: width, s: length, b: batch) over bf16's, and "
                             "the paper's", where(timed)], times, 3),
        written("BATCHES", ["Largest batch on one GPU: optax.adamw, flash_adamw, coat_adamw, "
                            "and that with FP8 activations", where(fitted)], batches),
        written("LOSSES", [*what, "Held-out losses"], held_out(of_part(stored, "run"))),
    ])  # fmt: skip


def pairs(name: str, path: Path, base: str, variants: Sequence[str]) -> str:
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
        f"Recorded by `python -m benchmarks.run pairs` in the repository: {where(about)}.",
        f"{about['preset']}, {about['parameters']:,} weights, {about['steps']:,} steps of "
        f"{about['batch'] * about['context']:,} tokens, seeds: {seeds}.",
        f"Held-out losses over those of {base}, %, and the interval of 90 % of the mean",
    ]
    return written(name, what, entries, 3)


def paired_flashoptim() -> str:
    """Return the differences of paired runs of GPTs and of a control."""
    return "\n".join([
        pairs("LONG_ADAM", figures.LONG["adam"], "adamw", ["flash_adamw"]),
        pairs("LONG_LION", figures.LONG["lion"], "lion", ["flash_lion"]),
        pairs("MIDDLE_ADAM", figures.MIDDLE["adam"], "adamw", ["flash_adamw"]),
        pairs("MIDDLE_LION", figures.MIDDLE["lion"], "lion", ["flash_lion"]),
        pairs("SHORT", figures.SHORT, "adamw", list(figures.CONTROL)),
    ])  # fmt: skip


def paired_coat() -> str:
    """Return the differences of paired runs of a Llama whose weights are stored alike."""
    f32 = [name for name, (base, *_) in figures.COAT.items() if base == "adamw"]
    return "\n".join([
        pairs("F32_WEIGHTS", figures.LLAMA, "adamw", f32),
        pairs("SPLIT_WEIGHTS", figures.LLAMA, "split", ["coat_adamw", "split+fp8",
                                                       "coat_adamw+fp8"]),
    ])  # fmt: skip


def paired_coat_states() -> str:
    """Return the differences of paired runs of a GPT with coat_adamw and flash_adamw."""
    return pairs("PAIRS", figures.MIDDLE["adam"], "adamw", list(figures.FORTY["adam"]))


MAKERS = (paired_flashoptim, paired_coat, paired_coat_states, coat_activations, gaussws, switchback,
          q_adam_mini, stable_adamw)  # fmt: skip
EXCERPTS: dict[str, Callable[[], str]] = {make.__name__: make for make in MAKERS}
