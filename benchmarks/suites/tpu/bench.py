"""Steps of every optimizer, and the library's other programs, compiled for TPUs without one.

Nothing is run. The `device` of a record is the chip that was compiled for.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator

import jax

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.tpu import cases, parts
from benchmarks.suites.tpu.program import Program

BY_XLA = "XLA's estimate"


def rows_of(kind: str, chip: str, case: str, impl: str) -> Rows:
    if kind == "step":
        program = cases.compile_case(chip, case, impl)
        ideal, rewritten, twice = cases.ideal_bytes(chip, case, impl)
    else:
        program, ideal = parts.compile_part(chip, case, impl)
    found, memory = Program(program.as_text()), program.memory_analysis()
    traffic = found.traffic()
    values = {
        "traffic_ratio": (traffic / ideal, "x ideal"),
        "temp_bytes": (memory.temp_size_in_bytes, "B"),
    }
    if kind == "step":
        values["unaliased_bytes"] = (max(0.0, rewritten - memory.alias_size_in_bytes), "B")
        if twice:
            values["passes_ratio"] = (traffic / (ideal + twice), "x ideal")
    if not found.kernels():  # those of kernels are not known
        values["cycles"] = (found.cycles(), "cycles")
    more = {"device": f"TPU {chip} (compiled for, never run)", "cycles_of": BY_XLA}
    return records.records_of("tpu", f"{kind}/{case}", impl, values, **more)


@records.suite(
    chip={"nargs": "+", "default": cases.CHIPS, "choices": cases.CHIPS},
    case={"nargs": "*", "default": list(cases.LEAVES), "choices": list(cases.LEAVES)},
    impl={"nargs": "+", "default": cases.IMPLEMENTATIONS, "choices": cases.IMPLEMENTATIONS},
    part={"nargs": "*", "default": list(parts.PARTS), "choices": list(parts.PARTS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("libtpu is not installed: pip install -e '.[tpu-test]'")
    jax.config.update("jax_enable_compilation_cache", False)
    for chip in args.chip:
        for case in args.case:
            yield from (rows_of("step", chip, case, impl) for impl in args.impl)
        for part in args.part:
            yield from (rows_of("part", chip, part, impl) for impl in parts.PARTS[part])
