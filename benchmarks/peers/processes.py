"""Measurements in processes of their own, so that the memory of a step is its own.

Several compile at the same time; one at a time has the device (`benchmarks.peers.turns`).
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import ROOT
from benchmarks.peers import cases, device_loop, in_jax, in_torch, turns
from optax_lowmem._src.update import tuning

IN_TORCH = ["-m", "benchmarks.peers.in_torch"]
IN_JAX = ["-m", "benchmarks.peers.processes"]
Case = tuple[str, str]  # leaf set, optimizer
Job = dict[str, Any]


def job(implementation: str, case: Case, repeats: int, steps: int | None, tbps: float) -> Job:
    """Describe one measurement for its process; `steps` of a call fill it at `tbps` if None."""
    leaf_set, optimizer = case
    return {
        "implementation": implementation,
        "leaf_set": leaf_set,
        "optimizer": optimizer,
        "repeats": repeats,
        "steps": steps,
        "tbps": tbps,
        # for in_torch, which imports no jax, and takes no function of the parameters
        "hyper": {n: v for n, v in cases.OPTIMIZERS[optimizer].items() if not callable(v)},
        "shapes": cases.shapes(leaf_set),
        "weight_scale": cases.WEIGHT_SCALE,
        "gradient_scale": cases.GRADIENT_SCALE,
    }


def outcomes(jobs: Sequence[Job], at_once: int) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each job, in order, `at_once` processes at a time.

    Those of a round compile together, then take turns on the device while nothing compiles: what
    else a host does shows in times. With more than one there are no compile times.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        for first in range(0, len(jobs), at_once):
            turn = f"{folder}/turn"
            told = [
                {**one, "turn": turn, "compiling": turns.compiling(turn)}
                for one in jobs[first : first + at_once]
            ]
            for outcome in pool.map(in_a_process, told):
                if at_once > 1:
                    outcome.pop("compile_s", None)
                yield outcome


def in_a_process(one: Job) -> dict[str, Any]:
    """The JSON that a process prints, given a job on its standard input."""
    torch = one["implementation"] in in_torch.IMPLEMENTATIONS
    process = subprocess.Popen(
        [sys.executable, *(IN_TORCH if torch else IN_JAX)],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        pass_fds=[one["compiling"]],
    )
    os.close(one["compiling"])  # now the process has it
    output, _ = process.communicate(json.dumps(one))
    printed = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not printed:
        return {"failed": f"its process ended with status {process.returncode}"}
    return json.loads(printed[-1])


def measure(one: Job) -> dict[str, Any]:
    """Measure a JAX implementation in one case, or return why it is skipped or fails."""

    def steps(moved: int) -> int:
        return one["steps"] or device_loop.steps_for(moved, one["tbps"])

    tuned = tuning.parse(one["tuned"]) if "tuned" in one else None
    try:
        with tuning.trying(tuned):
            made = in_jax.make(one["implementation"], one["leaf_set"], one["optimizer"])
            runner = device_loop.Runner(made, cases.LEAF_SETS[one["leaf_set"]](), steps)
        turns.take(one["turn"], one["compiling"])
        runner.start()
        return {"times": [runner.time() for _ in range(one["repeats"])], **runner.found}
    except Exception as error:  # the others are still worth their time
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """The outcome of what is not available, or failed, whose trace is printed."""
    if isinstance(error, in_jax.Unavailable):
        return {"skipped": str(error)}
    traceback.print_exception(error)
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
