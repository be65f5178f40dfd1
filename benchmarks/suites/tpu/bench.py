"""Steps of every optimizer, and the library's other programs, compiled for TPUs without one.

JAX_PLATFORMS=cpu python -m benchmarks.run tpu --record

Nothing is run, and no time is measured but that of the compiler. The `device` of a record is the
chip that was compiled for. The bundles of Pallas' kernels are read in a process of their own.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.tpu import bundles, cases, chips, parts
from benchmarks.suites.tpu.program import Program

BENCH = "tpu"
BY_XLA, BY_BUNDLES = "XLA's estimate", "static bundles of its kernels"


def measured(program: Any, seconds: float, ideal: int) -> dict[str, tuple[float, str]]:
    """Read what a program says of itself: metric -> value and unit."""
    found, memory = Program(program.as_text()), program.memory_analysis()
    return {
        "traffic_bytes": (found.traffic(), "B"),
        "ideal_bytes": (ideal, "B"),
        "traffic_ratio": (found.traffic() / ideal, "x ideal"),
        "temp_bytes": (memory.temp_size_in_bytes, "B"),
        "alias_bytes": (memory.alias_size_in_bytes, "B"),
        "xla_cycles": (found.cycles(), "cycles"),
        "kernels": (found.kernels(), ""),
        "collectives": (sum(found.collectives().values()), ""),
        "compile_s": (seconds, "s"),
    }


def step_rows(chip: str, case: str, impl: str) -> Rows:
    """The records of a step."""
    program, seconds = cases.compile_case(chip, case, impl)
    ideal, rewritten = cases.ideal_bytes(chip, case, impl)
    values = measured(program, seconds, ideal)
    if twice := cases.read_twice(chip, case, impl):
        values["passes_ratio"] = (values["traffic_bytes"][0] / (ideal + twice), "x ideal")
    values["unaliased_bytes"] = (max(0.0, rewritten - values["alias_bytes"][0]), "B")
    cycles_of = BY_XLA
    if values["kernels"][0]:
        kernels = bundles.of_case(chip, case, impl)
        values["kernel_cycles"] = (kernels, "cycles")
        cycles_of = f"{BY_BUNDLES}, the rest {BY_XLA}"
    values["cycles"] = (
        values["xla_cycles"][0] + values.get("kernel_cycles", (0, ""))[0],
        "cycles",
    )
    return _rows(f"step/{case}", impl, values, chip, cycles_of=cycles_of)


def part_rows(chip: str, case: str, impl: str) -> Rows:
    """The records of one of the library's other programs."""
    program, seconds = parts.compile_part(chip, case, impl)
    values = measured(program, seconds, parts.ideal_bytes(case, impl))
    values["cycles"] = values["xla_cycles"]
    return _rows(f"part/{case}", impl, values, chip, cycles_of=BY_XLA)


def _rows(
    case: str, impl: str, values: dict[str, tuple[float, str]], chip: str, **more: Any
) -> Rows:
    device = chips.CHIPS[chip].device
    return records.records_of(BENCH, case, impl, values, device=device, **more)


@records.suite(
    chip={"nargs": "+", "default": list(chips.CHIPS), "choices": list(chips.CHIPS)},
    case={"nargs": "*", "default": list(cases.LEAVES), "choices": list(cases.LEAVES)},
    impl={"nargs": "+", "default": list(cases.IMPLEMENTATIONS), "choices": cases.IMPLEMENTATIONS},
    part={"nargs": "*", "default": list(parts.PARTS), "choices": list(parts.PARTS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if reason := chips.missing_reason():
        sys.exit(reason)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are recorded
    for chip in args.chip:
        for case in args.case:
            for impl in args.impl:
                yield step_rows(chip, case, impl)
        for part in args.part:
            for impl in parts.PARTS[part]:
                yield part_rows(chip, part, impl)
