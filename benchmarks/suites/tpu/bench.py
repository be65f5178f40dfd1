"""Steps of every optimizer, and the library's other programs, compiled for TPUs without one.

JAX_PLATFORMS=cpu python -m benchmarks.run tpu --record

Nothing is run, and no time is measured but that of the compiler. The `device` of a record is the
chip that was compiled for.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.tpu import cases, chips, parts
from benchmarks.suites.tpu.program import Program

BY_XLA = "XLA's estimate"


def rows_of(kind: str, chip: str, case: str, impl: str) -> Rows:
    """The records of a step or of one of the library's other programs."""
    of_step = kind == "step"
    compiled = cases.compile_case if of_step else parts.compile_part
    program, seconds = compiled(chip, case, impl)
    found, memory = Program(program.as_text()), program.memory_analysis()
    ideal, rewritten = (
        cases.ideal_bytes(chip, case, impl) if of_step else (parts.ideal_bytes(case, impl), 0)
    )
    traffic, aliased = found.traffic(), memory.alias_size_in_bytes
    values: dict[str, tuple[float, str]] = {
        "traffic_bytes": (traffic, "B"),
        "ideal_bytes": (ideal, "B"),
        "traffic_ratio": (traffic / ideal, "x ideal"),
        "temp_bytes": (memory.temp_size_in_bytes, "B"),
        "alias_bytes": (aliased, "B"),
        "xla_cycles": (found.cycles(), "cycles"),
        "kernels": (found.kernels(), ""),
        "collectives": (sum(found.collectives().values()), ""),
        "compile_s": (seconds, "s"),
    }
    if of_step:
        values["unaliased_bytes"] = (max(0.0, rewritten - aliased), "B")
        if twice := cases.read_twice(chip, case, impl):
            values["passes_ratio"] = (traffic / (ideal + twice), "x ideal")
    if not found.kernels():  # those of kernels are not known
        values["cycles"] = values["xla_cycles"]
    more: dict[str, Any] = {"device": f"TPU {chip} (compiled for, never run)", "cycles_of": BY_XLA}
    return records.records_of("tpu", f"{kind}/{case}", impl, values, **more)


@records.suite(
    chip={"nargs": "+", "default": list(chips.CHIPS), "choices": list(chips.CHIPS)},
    case={"nargs": "*", "default": list(cases.LEAVES), "choices": list(cases.LEAVES)},
    impl={"nargs": "+", "default": list(cases.IMPLEMENTATIONS), "choices": cases.IMPLEMENTATIONS},
    part={"nargs": "*", "default": list(parts.PARTS), "choices": list(parts.PARTS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("libtpu is not installed: pip install -e '.[tpu-test]'")
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are recorded
    for chip in args.chip:
        for case in args.case:
            for impl in args.impl:
                yield rows_of("step", chip, case, impl)
        for part in args.part:
            for impl in parts.PARTS[part]:
                yield rows_of("part", chip, part, impl)
