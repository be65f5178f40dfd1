"""Device time, compile time and memory of an optimizer step: ours and others', in one run."""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import records, timing
from benchmarks.peers import device_loop, in_jax, in_torch, processes
from benchmarks.peers.cases import LEAF_SETS, OPTIMIZERS
from benchmarks.suites.step.tables import BASE

ON_CPU = (BASE, "lowmem.update", "lowmem.update-nearest")
ON_GPU = (
    *(BASE, "optax-bf16", "lowmem.step", "lowmem.update", "lowmem.step-xla", "flashoptim-jax"),
    *in_torch.IMPLEMENTATIONS,
)
EVERY = (*in_jax.NAMES, *in_torch.IMPLEMENTATIONS)
# 32-bit words, and passes over them in one call: 2 GiB on a GPU
COPY_ON_CPU, COPY_ON_GPU = (2**25, 5), (2**29, 100)
UNITS = {"device_ms": "ms", "compile_s": "s", "temp_bytes": "bytes", "peak_bytes": "bytes"}
RATIOS = ("device_ms", "compile_s")  # to optax; all that is recorded on a CPU
# fields that say more about a metric, where an outcome has them
DETAILS = {
    "device_ms": ("steps", "moved_bytes", "loop_temp_bytes", "call_ms", "wall_ms", "version"),
    "temp_bytes": ("unaliased_bytes", "live_bytes"),
    "peak_bytes": ("live_bytes", "setup_peak_bytes"),
}
Found = tuple[processes.Case, str, dict[str, Any]]  # case, implementation, outcome


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def on_a_cpu(args: argparse.Namespace, tbps: float) -> Iterator[Found]:
    """Every case, its implementations held at once and interleaved: others use a CPU too."""
    for case in args.cases:
        runners: dict[str, device_loop.Runner] = {}
        for name in args.impl:
            try:
                made = in_jax.make(name, *case)
                shapes = LEAF_SETS[case[0]]()
                runners[name] = device_loop.Runner(made, shapes, lambda moved: args.steps or 5)
                runners[name].start()
            except Exception as error:  # the other implementations are still worth their time
                yield case, name, processes.failure(error)
        for name, times in timing.in_turns(runners, args.repeats).items():
            yield case, name, {"times": times, **runners[name].found}


def on_a_gpu(args: argparse.Namespace, tbps: float) -> Iterator[Found]:
    """Every case and implementation, each in a process of its own."""
    for case in args.cases:
        for name in args.impl:
            job = processes.job(name, case, args.repeats, args.steps, tbps)
            yield case, name, processes.outcome(job)


def rows_of(
    case: str, name: str, outcome: dict[str, Any], tbps: float, base: dict[str, Any]
) -> records.Rows:
    """Return the records of an outcome, of a copy's speed and the outcome of `BASE`, if any."""
    found = []
    for metric in (metric for metric in UNITS if metric in outcome):
        more = {key: outcome[key] for key in DETAILS.get(metric, ()) if key in outcome}
        if metric == "device_ms":
            times = outcome["times"]
            more |= {"median": statistics.median(times), "spread": [min(times), max(times)]}
        if metric in RATIOS and metric in base:
            more["ratio_to_optax"] = outcome[metric] / base[metric]
        value = outcome[metric], UNITS[metric]
        found.append(records.record("step", case, name, metric, *value, **more))
    bound = outcome["moved_bytes"] / tbps / 1e9  # the time that the bytes alone would take
    more = {"bound_ms": bound, "moved_bytes": outcome["moved_bytes"], "copy_tbps": tbps}
    share = bound / outcome["device_ms"]
    return [*found, records.record("step", case, name, "bound_share", share, "1", **more)]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--leaf-set", nargs="+", default=["ten-million"], choices=LEAF_SETS)
    add("--optimizer", nargs="+", default=["adamw"], choices=OPTIMIZERS)
    add("--impl", nargs="+", default=list(ON_CPU if on_cpu() else ON_GPU), choices=EVERY)
    add("--steps", type=int, help="in one jit; default: 5 on a CPU, 0.6 s at copy speed on a GPU")
    add("--repeats", type=int, default=9 if on_cpu() else 5)
    args = parser.parse_args(argv)
    if args.record and "tiny" in args.leaf_set:
        parser.error("the leaf set tiny is there to try the benchmark: it is not recorded")
    if args.record and on_cpu() and BASE not in args.impl:
        parser.error(f"records of a CPU are relative to {BASE}: add it to --impl")
    args.impl.sort(key=lambda name: name != BASE)  # first, as the others' ratios are to it
    args.cases = [(leaf_set, name) for leaf_set in args.leaf_set for name in args.optimizer]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    # or JAX takes most of the device before the processes can have any of it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args, failed, base = arguments(argv), False, {}
    measure, best, copy = (
        (on_a_cpu, min, COPY_ON_CPU) if on_cpu() else (on_a_gpu, statistics.median, COPY_ON_GPU)
    )
    rates = device_loop.copy_tbps(*copy, repeats=5)
    tbps, spread = statistics.median(rates), [min(rates), max(rates)]

    def keep(rows: records.Rows) -> None:
        """Store records as they come: a run that is cut off loses none."""
        records.show(rows)
        records.keep([r for r in rows if not on_cpu() or r["metric"] in RATIOS], args.record)

    for case in map("/".join, args.cases):
        keep([records.record("step", case, "copy", "copy_tbps", tbps, "TB/s", spread=spread)])
    for case, name, outcome in measure(args, tbps):
        if "times" not in outcome:
            failed |= "failed" in outcome
            print("/".join(case), name, *(f"{why}: {says}" for why, says in outcome.items()))
            continue
        outcome["device_ms"] = best(outcome["times"])
        if name == BASE:
            base[case] = outcome
        keep(rows_of("/".join(case), name, outcome, tbps, base.get(case, {})))
    return int(failed)
