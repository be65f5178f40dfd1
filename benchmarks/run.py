"""Runs a benchmark: `python -m benchmarks.run step --record`; without a name, lists them all."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

# name -> module below benchmarks.suites, and its function that measures, if that is not `main`
SUITES = {
    "activation_passes": "activations.passes",
    "activation_training": "activations.training",
    "activations": "activations.bench",
    "adam_mini": "adam_mini.training",
    "call": "step.many_leaves:call",
    "checkpoint": "checkpoint",
    "compile": "step.many_leaves:compile",
    "composition": "composition",
    "end_to_end": "end_to_end.bench",
    "fit": "fit.bench",
    "flashoptim": "flashoptim.bench",
    "formats": "formats.bench",
    "four_bits": "formats.four_bits",
    "gaussws": "gaussws.bench",
    "instructions": "step.on_h100:instructions",
    "kernels": "kernels",
    "launches": "step.on_h100:launches",
    "linear": "linear.bench",
    "masters": "step.masters",
    "memory": "memory",
    "mesh": "mesh.bench",
    "noise": "noise.bench",
    "pairs": "pairs.training",
    "release": "release",
    "spikes": "spikes",
    "step": "step.bench",
    "switchback": "switchback.bench",
    "tpu": "tpu.bench",
    "tune": "step.tune",
}


def suite(name: str) -> Callable[..., Any]:
    """Return what measures."""
    module, _, function = SUITES[name].partition(":")
    return getattr(importlib.import_module(f"benchmarks.suites.{module}"), function or "main")


def main() -> int:
    name, *rest = sys.argv[1:] or [""]
    if name not in SUITES:
        print(f"usage: python -m benchmarks.run SUITE ...; suites: {', '.join(SUITES)}")
        return 0 if name in ("-h", "--help") else 2
    sys.argv = [f"python -m benchmarks.run {name}", *rest]
    status = suite(name)()
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
