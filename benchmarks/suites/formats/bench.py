"""COAT's Tables 1 and 9 with every 8-bit format of this package, on the states of a real run.

A GPT is trained by optax.adamw in f32. Beside it, a sample of its m and v is kept in every format,
group size and rounding: decoded, averaged with the live gradient and encoded again at every step.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.formats import BUDGET, EXACT, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.suites.formats.training import PRESETS, Errors, Experiment, Snapshot
from benchmarks.training import changed, load_text, say

CALLS = 30
PERCENTILES = (5, 50, 95)
METRICS = ("mse", "median_nmse")
UNITS = {"mse": "lr^2", "largest": "lr"} | {f"p{p}": "decades" for p in PERCENTILES}


def command_line(doc: str | None = __doc__) -> argparse.ArgumentParser:
    parser = records.command_line(doc)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="gpt-42m")
    add("--steps", type=int, help="of the run (default: the preset's); a multiple of 30")
    add("--chunks", type=int, default=16, help="sampled of each matrix (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches, sample and rounding")
    add("--cache", type=Path, default=Path("demo_output"), help="where the tokenizer is kept")
    return parser


def make_experiment(args: argparse.Namespace, copies: Sequence[Copy]) -> Experiment:
    settings = changed(PRESETS[args.preset], steps=args.steps)
    every = settings.steps // CALLS
    if not every or settings.steps % CALLS:
        raise SystemExit(f"--steps {settings.steps} is not a multiple of {CALLS}")
    text = load_text(settings, args.cache)
    return Experiment(settings, text, every, args.seed, copies=copies, chunks=args.chunks)


def encoded_once(experiment: Experiment) -> Errors:
    """The last look's f32 moments, encoded once, to nearest."""
    copies = {dataclasses.replace(copy, rounding=NEAREST) for copy in experiment.copies}
    copies |= {*formats.papers(MU), *formats.papers(NU)}
    return experiment.errors(fe.encoded_once(experiment.last.true, tuple(sorted(copies))))


def tables_of() -> Iterator[tuple[str, list[Copy], list[Copy]]]:
    """name -> the formats of rows and of columns."""
    yield "once at 128", formats.papers(MU), formats.papers(NU)
    for rounding in (NEAREST, STOCHASTIC):
        mus, nus = ([EXACT[slot], *formats.column(slot, rounding)] for slot in (MU, NU))
        for loop in ("once", NEAREST) if rounding == NEAREST else (STOCHASTIC,):
            yield f"{loop} at {BUDGET}", mus, nus


def rows_of(
    experiment: Experiment, floors: dict[int, dict[str, dict[str, float]]]
) -> Iterator[dict[str, Any]]:
    more = {"seed": experiment.seed, "flags": experiment.flags()}

    def row(table: str, impl: str, metric: str, value: float, **own: Any) -> Any:
        case, unit = f"{experiment.run.preset}/{table}", UNITS.get(metric.split("_")[0])
        return records.record("formats", case, impl, metric, float(value), unit, **own, **more)

    once, closed = encoded_once(experiment), experiment.errors(experiment.last.values)
    for table, mus, nus in tables_of():
        found = once if table.startswith("once") else closed
        for mu, (at, metric) in itertools.product(mus, enumerate(METRICS)):
            over = {nu.format: found[mu, nu][at] for nu in nus}
            yield row(table, mu.format, metric, min(over.values()), over=over)
    for name, (mu, nu) in formats.OPTIMIZERS.items():
        own = {"mu": mu.key, "nu": nu.key, "bytes": [mu.bytes, nu.bytes]}
        for metric, value in zip(METRICS, closed[mu, nu], strict=True):
            yield row("optimizers", name, f"{metric}_closed", value, **own)
    for step, effects in floors.items():
        for name, effect in effects.items():
            for metric, value in effect.items():
                yield row(f"floor at {step}", name, metric, value)
    for slot, tree in experiment.last.moments.items():
        spans = np.concatenate([fe.spans(leaf) for leaf in experiment.sample.leaves(tree)])
        for percent in PERCENTILES:
            yield row("spans", slot, f"p{percent}", np.percentile(spans, percent))
        for decades in (1, 4):
            yield row("spans", slot, f"over_1e{decades}", np.mean(spans > decades))


def main(arguments: list[str] | None = None) -> None:
    args = command_line().parse_args(arguments)
    experiment = make_experiment(args, formats.copies())
    sample, floors = experiment.sample, {}

    def seen(snapshot: Snapshot) -> None:
        """The floors' effect, at the first look and the last."""
        if not floors or snapshot.step == experiment.run.steps:
            leaves = (sample.leaves(snapshot.moments[slot]) for slot in (MU, NU))
            pairs = list(zip(*leaves, strict=True))
            floors[snapshot.step] = fe.floor_effect(pairs, experiment.correction)

    experiment.seen = seen
    size = f"{len(sample.leaf_of_chunk)} chunks of {sample.length}, {len(experiment.copies)} copies"
    say(f"{experiment.parameters:,} weights, {len(sample.paths)} matrices, {size}")
    experiment.train_copies(say)
    rows = list(rows_of(experiment, floors))
    records.show(rows)
    records.keep(rows, args.record)
