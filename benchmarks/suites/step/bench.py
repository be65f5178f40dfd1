"""Device time, compile time and memory of an optimizer step: ours and others', in one run.

python -m benchmarks.run step --leaf-set ten-million --record
"""

import argparse
import os
import statistics
from collections.abc import Sequence

import jax

from benchmarks import records, timing
from benchmarks.peers import device_loop, in_jax, in_torch, processes
from benchmarks.peers.cases import LEAF_SETS, OPTIMIZERS
from benchmarks.peers.report import BASE, Report, Storage, say

ON_CPU = (BASE, "lowmem.update", "lowmem.update-nearest")
ON_GPU = (
    *(BASE, "optax-bf16", "lowmem.step", "lowmem.update", "lowmem.step-xla", "flashoptim-jax"),
    *in_torch.IMPLEMENTATIONS,
)
EVERY = (*in_jax.NAMES, *in_torch.IMPLEMENTATIONS)
# 32-bit words, and passes over them in one call: 2 GiB on a GPU
COPY_ON_CPU, COPY_ON_GPU = (2**25, 5), (2**29, 100)


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def on_a_cpu(args: argparse.Namespace, report: Report) -> None:
    """Every case, its implementations held at once and interleaved: others use a CPU too."""
    for case in args.cases:
        runners: dict[str, device_loop.Runner] = {}
        for name in args.impl:
            say(case, name, "compiles")
            try:
                made = in_jax.make(name, *case)
                runners[name] = device_loop.Runner(made, case[0], lambda moved: args.steps or 5)
                runners[name].start()
            except in_jax.Unavailable as reason:
                report.outcome(case, name, {"skipped": str(reason)})
            except Exception as error:  # the other implementations are still worth their time
                report.outcome(case, name, processes.failure(error))
        for name, times in timing.in_turns(runners, args.repeats).items():
            report.outcome(case, name, {"times": times, **runners[name].found})


def on_a_gpu(args: argparse.Namespace, report: Report) -> None:
    """Every case and implementation, each in a process of its own."""
    wanted = [(name, case) for case in args.cases for name in args.impl]
    tbps = statistics.median(report.tbps)
    jobs = [processes.job(*one, args.repeats, args.steps, tbps) for one in wanted]
    found = processes.outcomes(jobs, args.jobs)
    for (name, case), outcome in zip(wanted, found, strict=True):
        report.outcome(case, name, outcome)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; defaults depend on the device."""
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--leaf-set", nargs="+", default=["ten-million"], choices=LEAF_SETS)
    add("--optimizer", nargs="+", default=["adamw"], choices=OPTIMIZERS)
    add("--impl", nargs="+", default=list(ON_CPU if on_cpu() else ON_GPU), choices=EVERY)
    add("--steps", type=int, help="in one jit; default: 5 on a CPU, 0.3 s at copy speed on a GPU")
    add("--repeats", type=int, default=9 if on_cpu() else 5)
    add("--jobs", type=int, default=1, help="that compile at once on a GPU; without compile times")
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
    args = arguments(argv)
    best = min if on_cpu() else statistics.median
    tbps = device_loop.copy_tbps(*(COPY_ON_CPU if on_cpu() else COPY_ON_GPU), repeats=5)
    report = Report(best, tbps, Storage(args.record, on_cpu()))
    for case in args.cases:
        report.copy(case)
    (on_a_cpu if on_cpu() else on_a_gpu)(args, report)
    print(report.table())
    return int(report.failed)
