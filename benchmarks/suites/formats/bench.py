"""COAT's Tables 1 and 9 with every 8-bit format of this package, on the states of a real run.

    python -m benchmarks.run formats --record                    # gpt-42m: minutes on a GPU
    python -m benchmarks.run formats --preset gpt-3m --record    # minutes on a CPU
    python -m benchmarks.run formats --preset gpt-3m --steps 20  # stores nothing

A GPT is trained by optax.adamw in f32. Beside it, a sample of its m and v is kept in every format,
group size and rounding: decoded, averaged with the live gradient and encoded again at every step.
What is measured of the sample goes to the records; `--states FILE.npz` stores the sample too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats import formats
from benchmarks.suites.formats import states as formats_states
from benchmarks.suites.formats.formats import BUDGETS, EXACT, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.suites.formats.training import PRESETS, Experiment, Snapshot
from benchmarks.training import about, changed, load_text, say

B1, B2 = 0.9, 0.999
LOOKS, CALLS = 10, 30
TOP = 3  # of the best pairs
_UNITS = {"mse": "lr^2", "largest": "lr", **{f"p{p}": "decades" for p in (1, 5, 50, 95, 99)}}


def command_line(doc: str | None = __doc__) -> argparse.ArgumentParser:
    """Return a parser with the options of a run that copies follow."""
    parser = records.command_line(doc)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="gpt-42m")
    add("--steps", type=int, help="of the run (default: the preset's); a multiple of 30")
    add("--batch", type=int, help="windows of a step (default: the preset's)")
    add("--lr", type=float, help="peak learning rate (default: the preset's)")
    add("--b2", type=float, default=B2, help="decay of v (default: %(default)s)")
    add("--chunks", type=int, default=16, help="sampled of each matrix (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches, sample and rounding")
    add("--cache", type=Path, default=Path("demo_output"), help="where the tokenizer is kept")
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line()
    add = parser.add_argument
    add("--keep", type=int, default=3, help="of the chunks, stored in the file "
        "(default: %(default)s)")  # fmt: skip
    add("--states", type=Path, metavar="FILE.npz", help="where to store the sample")
    return parser.parse_args(arguments)


def make_experiment(
    args: argparse.Namespace, copies: Sequence[Copy] | None = None, gradients: bool = False
) -> Experiment:
    """The run of a command line, beside which copies are kept: by default those of 8 bits."""
    settings = changed(
        PRESETS[args.preset], steps=args.steps, batch=args.batch, learning_rate=args.lr
    )
    every = settings.steps // CALLS
    if not every or settings.steps % CALLS:
        raise SystemExit(f"--steps {settings.steps} is not a multiple of {CALLS}")
    return Experiment(
        settings, load_text(settings, args.cache), every, args.seed,
        copies=formats.copies() if copies is None else copies,
        decays={MU: B1, NU: args.b2}, chunks=args.chunks, gradients=gradients,
    )  # fmt: skip


class Looks:
    """Errors of the sample at every look; the last snapshot; what the whole state's groups span."""

    def __init__(self, experiment: Experiment):
        self.experiment, self.curves, self.steps, self.floors = experiment, [], [], {}

    def __call__(self, snapshot: Snapshot, moments: dict[str, Any]) -> None:
        """Errors of every pair of copies; the floor's effect, at the first look and the last."""
        self.last, end = snapshot, snapshot.step == self.experiment.run.steps
        self.correction = fe.Correction.after(snapshot.step, self.experiment.decays)
        values = {Copy.of(key): x for key, x in snapshot.values.items()}
        self.closed = self.errors(values)
        self.steps.append(snapshot.step)
        self.curves.append({n: self.closed.at(*p)[1] for n, p in formats.OPTIMIZERS.items()})
        leaves = {slot: self.experiment.sample.leaves(tree) for slot, tree in moments.items()}
        if end or len(self.steps) == 1:
            pairs = list(zip(leaves[MU], leaves[NU], strict=True))
            self.floors[str(snapshot.step)] = fe.floor_effect(pairs, self.correction)
        if end:
            self.spans = {
                slot: np.concatenate([fe.spans(leaf) for leaf in own])
                for slot, own in leaves.items()
            }

    def errors(self, values: dict[Copy, np.ndarray]) -> fe.Errors:
        """With the f32 moments as one more way to store each slot."""
        sample, true = self.experiment.sample, self.last.true
        values = values | {copy: true[slot] for slot, copy in EXACT.items()}
        return fe.errors(true, values, sample.leaf_of_chunk, sample.sizes, self.correction)

    def once(self) -> fe.Errors:
        """The last look's f32 moments, encoded once, to nearest."""
        copies = {dataclasses.replace(c, rounding=NEAREST) for c in self.experiment.copies}
        copies |= {*formats.papers(MU), *formats.papers(NU)}
        return self.errors(fe.encoded_once(self.last.true, sorted(copies)))

    def states(self, flags: dict[str, Any], keep: int) -> formats_states.States:
        """Return the states to store, with at most `keep` chunks per leaf."""
        leaves = self.experiment.sample.leaf_of_chunk
        rank = np.concatenate([np.arange(n) for n in np.bincount(leaves)])
        kept = rank < keep
        curves = {n: np.array([look[n] for look in self.curves]) for n in formats.OPTIMIZERS}
        return formats_states.States(
            flags | {"chunks_of_a_leaf": keep},
            {slot: x[kept] for slot, x in self.last.true.items()},
            leaves[kept],
            {c: tuple(x[kept] for x in self.last.stored[c.key]) for c in formats.stored()},
            {
                f"{slot}/{name}": counts
                for slot, spans in self.spans.items()
                for name, counts in fe.histograms(spans).items()
            },
            {"step": np.array(self.steps)} | curves,
        )


def tables_of(once: fe.Errors, closed: fe.Errors) -> Iterator[tuple[str, fe.Errors]]:
    """name -> errors with the formats as rows and columns."""
    yield "once at 128", once.select(formats.papers(MU), formats.papers(NU))
    for budget in BUDGETS:
        for rounding in (NEAREST, STOCHASTIC):
            mus, nus = ([EXACT[slot], *formats.column(slot, budget, rounding)] for slot in (MU, NU))
            if rounding == NEAREST:
                yield f"once at {budget}", once.select(mus, nus)
            yield f"{rounding} at {budget}", closed.select(mus, nus)


# What a search goes over: whether both slots share group and rounding, as in lowmem.Storage, and
# whether formats take part that the package does not have.
SEARCHES = {"package": (True, False), "trials": (True, True), "mixed": (False, False)}


def best_pairs(closed: fe.Errors, search: str, metric: str, budget: float) -> list[dict[str, Any]]:
    """Pairs of at most 2 * budget bytes for both values, the best first."""
    alike, trials = SEARCHES[search]
    left_out = {*formats.PAPERS, *(() if trials else formats.TRIALS), "f32"}
    found = []
    for (i, mu), (j, nu) in itertools.product(enumerate(closed.mus), enumerate(closed.nus)):
        same = (mu.group, mu.rounding) == (nu.group, nu.rounding)
        if left_out & {mu.format, nu.format} or (alike and not same):
            continue
        if mu.bytes + nu.bytes <= 2 * budget:
            values = {"mse": closed.of_model[i, j], "median_nmse": closed.median[i, j]}
            pair = {"mu": mu.key, "nu": nu.key, "bytes": mu.bytes + nu.bytes}
            found.append(pair | {name: float(value) for name, value in values.items()})
    return sorted(found, key=lambda pair: pair[metric])


def searched(closed: fe.Errors) -> dict[str, list[dict[str, Any]]]:
    """The first of each search, by each metric, at each size."""
    return {
        f"best {search} by {metric} at {budget}": best_pairs(closed, search, metric, budget)[:TOP]
        for budget in BUDGETS
        for search in SEARCHES
        for metric in ("median_nmse", "mse")
    }


def rows_of(looks: Looks, flags: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything that the tables and claims use."""
    about_run = {key: flags[key] for key in ("parameters", "steps", "decays", "chunks_of_a_leaf")}
    more = {"seed": flags["seed"], "flags": about_run}

    def row(table: str, impl: str, metric: str, value: float, **own: Any) -> Any:
        case, unit = f"{flags['preset']}/{table}", _UNITS.get(metric.split("_")[0])
        return records.record("formats", case, impl, metric, float(value), unit, **own, **more)

    once, closed = looks.once(), looks.closed
    for table, found in tables_of(once, closed):
        columns = [nu.format for nu in found.nus]
        for mu, mses, nmses in zip(found.mus, found.of_model, found.median, strict=True):
            for metric, values in (("mse", mses), ("median_nmse", nmses)):
                over = dict(zip(columns, map(float, values), strict=True))
                yield row(table, mu.format, metric, min(values), over=over)
    for name, (mu, nu) in formats.OPTIMIZERS.items():
        for loop, found in (("closed", closed), ("once", once)):
            pair = (mu, nu)
            if loop == "once":
                pair = tuple(dataclasses.replace(copy, rounding=NEAREST) for copy in pair)
            own = {"mu": mu.key, "nu": nu.key, "bytes": [mu.bytes, nu.bytes]}
            for metric, value in zip(("mse", "median_nmse"), found.at(*pair), strict=True):
                yield row("optimizers", name, f"{metric}_{loop}", value, **own)
    for table, pairs in flags["best"].items():
        metric = table.split()[3]
        for rank, pair in enumerate(pairs, start=1):
            yield row(table, f"#{rank}", metric, pair[metric], pair=pair)
    for step, effects in looks.floors.items():
        for name, effect in effects.items():
            for metric, value in effect.items():
                yield row(f"floor at {step}", name, metric, value)
    for slot, spans in looks.spans.items():
        for percent in (1, 5, 50, 95, 99):
            yield row("spans", slot, f"p{percent}", np.percentile(spans, percent))
        for decades in (1, 4):
            yield row("spans", slot, f"over_1e{decades}", np.mean(spans > decades))
        yield row("spans", slot, "over_e4m3", np.mean(spans > np.log10(fe.FORMAT_RANGE)))


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    args = parse_arguments(arguments)
    experiment = make_experiment(args)
    sample, flags = experiment.sample, about(experiment, experiment.parameters)
    say(
        f"{experiment.parameters:,} weights, {experiment.text.last:,} tokens; {len(sample.paths)} "
        f"matrices, {len(sample.leaf_of_chunk)} chunks of {sample.length}, "
        f"{len(experiment.copies)} copies; after {time.perf_counter() - start:.0f} s"
    )
    looks = Looks(experiment)
    experiment.train_copies(looks, LOOKS, say)
    say(f"trained after {time.perf_counter() - start:.0f} s")
    flags |= {"floors": looks.floors, "best": searched(looks.closed)}
    rows = list(rows_of(looks, flags))
    records.show(rows)
    if args.states:
        looks.states(flags, args.keep).save(args.states)
        say(f"{args.states}: {args.states.stat().st_size / 1e6:.2f} MB")
    records.keep(rows, args.record)
    say(f"done after {time.perf_counter() - start:.0f} s")
