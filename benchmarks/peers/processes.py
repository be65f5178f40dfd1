"""Measurements in processes of their own: torch's, and the peak memory of one JAX step."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cases, device_loop, in_jax

ROOT = Path(__file__).parent.parent.parent
TORCH = ["-m", "benchmarks.peers.in_torch"]
Case = tuple[str, str]  # leaf set, optimizer


def torch_outcomes(
    implementation: str, wanted: Sequence[Case], repeats: int
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What `in_torch` finds of an implementation, case by case as it comes."""
    jobs = [
        {
            "name": f"{leaf_set}/{optimizer}",
            "implementation": implementation,
            "optimizer": optimizer,
            "hyper": cases.OPTIMIZERS[optimizer],
            "shapes": cases.shapes(leaf_set),
            "weight_scale": cases.WEIGHT_SCALE,
            "gradient_scale": cases.GRADIENT_SCALE,
            "repeats": repeats,
        }
        for leaf_set, optimizer in wanted
    ]
    left = dict(zip((job["name"] for job in jobs), wanted, strict=True))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, *TORCH], **pipes) as process:
        json.dump(jobs, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            if line.startswith('{"name"'):
                outcome = json.loads(line)
                yield left.pop(outcome.pop("name")), outcome
            else:
                print(line, end="")
    for case in left.values():
        yield case, {"failed": f"its process ended with status {process.returncode}"}


def peak_outcome(implementation: str, case: Case) -> dict[str, Any]:
    """`device_loop.peak_bytes` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.processes", implementation, *case],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        return {"failed": f"its process ended with status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The child of `peak_outcome`."""
    implementation, leaf_set, optimizer = sys.argv[1:]
    try:
        made = in_jax.make(implementation, leaf_set, optimizer)
        outcome = device_loop.peak_bytes(made, leaf_set)
    except in_jax.Unavailable as reason:
        outcome = {"skipped": str(reason)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
