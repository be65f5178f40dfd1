"""Steps of optimizers compiled for TPUs on a machine without one.

Nothing is run. The `device` of a record is the chip that was compiled for.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator

import jax

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.tpu import cases
from benchmarks.suites.tpu.program import Program


def rows_of(chip: str, case: str, impl: str) -> Rows:
    program = cases.compile_case(chip, case, impl)
    found, (ideal, _) = Program(program.as_text()), cases.ideal_bytes(chip, case, impl)
    values = {
        "traffic_ratio": (found.traffic() / ideal, "x ideal"),
        "temp_bytes": (program.memory_analysis().temp_size_in_bytes, "B"),
    }
    if not found.kernels():  # XLA has no estimate of a kernel
        values["cycles"] = (found.cycles(), "cycles")
    device = f"TPU {chip} (compiled for, never run)"
    return records.records_of("tpu", case, impl, values, device=device)


@records.suite(
    chip={"nargs": "+", "default": cases.CHIPS, "choices": cases.CHIPS},
    case={"nargs": "+", "default": list(cases.LEAVES), "choices": list(cases.LEAVES)},
    impl={"nargs": "+", "default": cases.IMPLEMENTATIONS, "choices": cases.IMPLEMENTATIONS},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("libtpu is not installed: pip install -e '.[tpu-test]'")
    jax.config.update("jax_enable_compilation_cache", False)
    for chip in args.chip:
        for case in args.case:
            yield from (rows_of(chip, case, impl) for impl in args.impl)
