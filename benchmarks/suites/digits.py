"""SGD on a convnet of digits (benchmarks/convnet.py), `--together` seeds of it in a program.

A record has the results of all seeds of a command.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.claims.findings import F32, OURS, Pair, Trained
from benchmarks.records import Rows, select

BENCH, CASE, STEPS = "digits", "digits-convnet/sgd", 3_000
UNITS = {"val_loss": "nats", "val_accuracy": "%"}


def rows_of(impl: str, seed: int, flags: dict[str, Any], found: dict[str, list[float]]) -> Rows:
    """Return a record of each metric: the mean, and the results from the first `seed` on."""
    case = CASE if flags["steps"] == STEPS else CASE.replace("/", f" steps={flags['steps']}/")
    return [
        records.record(BENCH, case, impl, metric, statistics.mean(each), UNITS[metric], seed=seed,
                       flags=flags, each=[float(f"{x:.6g}") for x in each])
        for metric, each in found.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Together(Trained):
    """A measure: our result against the baseline's, over the seeds of all commands."""

    case: str = CASE
    bench: str = BENCH

    def pair(self, rows: Rows) -> Pair:
        def seeds(impl: str) -> dict[int, dict[str, Any]]:
            own = {"bench": self.bench, "case": self.case, "metric": self.metric, "impl": impl}
            return {
                seed: row | {"seed": seed, "value": value}
                for row in select(rows, **own)
                for seed, value in enumerate(row["each"], start=row["seed"])
            }

        plain, ours = seeds(self.plain), seeds(self.ours)
        return Pair.of((plain[seed], ours[seed]) for seed in sorted(plain.keys() & ours.keys()))


def train(impl: str, digits: Any, args: argparse.Namespace) -> Rows:
    """Train from every seed; return the records."""
    from benchmarks import convnet

    tx = convnet.optimizer(impl, args.steps)
    run = convnet.trainer(impl, tx, digits, args)

    def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(*convnet.start(impl, tx, seed), jax.random.fold_in(jax.random.key(seed), 1))

    compiled, found = jax.jit(jax.vmap(one)), []
    seeds = np.arange(args.seed, args.seed + args.seeds, dtype=np.uint32)
    for some in np.split(seeds, range(args.together, len(seeds), args.together)):
        began = time.perf_counter()
        found.append(np.stack(compiled(some)))
        seconds = time.perf_counter() - began
        print(f"{impl}, seeds {some[0]} to {some[-1]}: {found[-1].mean(1)} in {seconds:.1f} s",
              flush=True)  # fmt: skip
    params, _ = jax.eval_shape(lambda: convnet.start(impl, tx, np.uint32(0)))
    flags = {name: getattr(args, name) for name in ("steps", "batch", "compute", "implementation")}
    flags["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
    both = dict(zip(UNITS, np.concatenate(found, 1).tolist(), strict=True))
    return rows_of(impl, args.seed, flags, both)


def main(arguments: list[str] | None = None) -> None:
    from _gpt.arguments import compute_dtype, positive

    from benchmarks import convnet

    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--steps", type=positive, default=STEPS, help=f"default: {STEPS}")
    add("--batch", type=positive, default=32, help="images in a batch (default: 32)")
    add("--seed", type=int, default=0, help="the first (default: 0)")
    add("--seeds", type=positive, default=10, help="how many seeds to repeat over (default: 10)")
    add("--together", type=positive, default=64, help="seeds in a program (default: 64)")
    add("--compute", choices=("auto", "float32", "bfloat16"), default="auto",
        help="dtype of products; auto: float32 on a CPU, bfloat16 elsewhere")  # fmt: skip
    args = parser.parse_args(arguments)
    # a step under vmap has no kernel
    args.compute, args.implementation = compute_dtype(args.compute), "xla"
    digits = convnet.load()
    for impl in (F32, OURS):
        records.keep(train(impl, digits, args), args.record)
