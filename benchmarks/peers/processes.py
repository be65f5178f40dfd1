"""Measurements in processes of their own, so that the memory of a step is its own."""

import json
import os
import subprocess
import sys
import traceback
from typing import Any

from benchmarks import ROOT
from benchmarks.peers import cases, device_loop, in_jax, in_torch
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step import tuning

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


def outcome(one: Job) -> dict[str, Any]:
    """The JSON that a process of its own prints, given a job on its standard input."""
    torch = one["implementation"] in in_torch.IMPLEMENTATIONS
    done = subprocess.run(
        [sys.executable, *(IN_TORCH if torch else IN_JAX)],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        input=json.dumps(one),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        return {"failed": f"its process ended with status {done.returncode}"}
    return json.loads(printed[-1])


def measure(one: Job) -> dict[str, Any]:
    """Measure a JAX implementation in one case, or return why it is skipped or fails."""

    def steps(moved: int) -> int:
        return one["steps"] or device_loop.steps_for(moved, one["tbps"])

    tuned = tuning.parse(one["tuned"]) if "tuned" in one else None
    try:
        with step_arguments.stepping(tuning=tuned):
            made = in_jax.make(one["implementation"], one["leaf_set"], one["optimizer"])
            runner = device_loop.Runner(made, cases.LEAF_SETS[one["leaf_set"]](), steps)
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
