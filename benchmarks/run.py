"""Runs a benchmark: `python -m benchmarks.run step --record`; without a name, lists them all."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

# name -> module below benchmarks.suites, and its function that measures, if that is not `main`
_ALONE = (
    "checkpoint choose digits finetune kernels memory nf4 offload other_gpus plan qlora "
    "release report spikes"
)
SUITES = {name: name for name in _ALONE.split()}
SUITES |= {
    name: f"{name}.bench" for name in (
        "activations", "end_to_end", "fit", "flashoptim", "formats", "gaussws",
        "linear", "mesh", "noise", "step", "switchback", "tpu",
    )
} | {
    "activation_passes": "activations.bytes:passes",
    "activation_training": "activations.training",
    "adam_mini": "adam_mini.training",
    "call": "step.many_leaves:call",
    "compile": "step.many_leaves:compile",
    "four_bits": "formats.four_bits",
    "pairs": "pairs.training",
    "reshard": "mesh.reshard",
    "scaling": "mesh.scaling",
    "scaling_memory": "mesh.compiled",
    "tune": "step.tune",
}  # fmt: skip


def suite(name: str) -> Callable[..., Any]:
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
