"""Static cycles of Pallas' kernels: the instruction bundles that libtpu made of them.

A bundle takes a cycle, without what waiting for memory adds. Loops count as often as their exit
tests say; the loop over a kernel's grid has two steps more, which fill and empty its pipeline.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites.tpu.program import KERNEL, Instruction, Program

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LB)?\w*\s*:\s*(>*)")
_EXIT = re.compile(
    r"scmp\.ge\.s32\.totalorder (\(%\w+\), |\(%\w+\) )?%\w+, (\d+) /\* loop exit test \*/"
)


@dataclasses.dataclass(frozen=True)
class _Bundle:
    depth: int  # loops around it
    opens: bool  # the first of a loop
    trips: tuple[int, ...]  # of the loop whose exit test is here
    outer: tuple[int, ...]  # of the loop around it: a test that waits for the end of this one
    empty: bool


def cycles(text: str) -> int:
    """Cycles of a kernel, from the text of its final bundles.

    Raises:
      ValueError: for a loop whose exit test compares with no number.
    """
    bundles = []
    for line in text.splitlines():
        if found := _BUNDLE.match(line):
            tests = _EXIT.findall(line)
            bundles.append(
                _Bundle(
                    depth=len(found[2]),
                    opens=bool(found[1]),
                    trips=tuple(int(trips) for waits, trips in tests if not waits),
                    outer=tuple(int(trips) for waits, trips in tests if waits),
                    empty=line[found.end() :].lstrip().startswith("{}"),
                )
            )
    return _of_loop(bundles)[0]


def _of_loop(bundles: Sequence[_Bundle]) -> tuple[int, list[int], list[int]]:
    """Cycles of bundles with the loops inside; trips by exit tests, of this loop and the next.

    The test of a loop may stand among the bundles of the last one inside.
    """
    total, at = 0, 0
    trips: list[int] = []
    outer: list[int] = []
    while at < len(bundles):
        one = bundles[at]
        if not one.opens:
            total += 1
            trips += one.trips
            outer += one.outer
            at += 1
            continue
        end = _end(bundles, at)
        body = [dataclasses.replace(one, opens=False), *bundles[at + 1 : end]]
        inner, found, own = _of_loop(body)
        if len(found) != 1:
            raise ValueError(f"a loop of {end - at} bundles has the exit tests {found}")
        total += inner * found[0]
        trips += own
        at = end
    return total, trips, outer


def _end(bundles: Sequence[_Bundle], start: int) -> int:
    """Return the end of a loop, behind the last bundle as deep; others may lie before it."""
    depth = bundles[start].depth
    end = start + 1
    for at in range(start + 1, len(bundles)):
        if bundles[at].opens and bundles[at].depth <= depth:
            break
        if bundles[at].depth >= depth:
            end = at + 1
    while end < len(bundles) and bundles[end].empty:  # in which its last branch is taken
        end += 1
    return end


def of_dump(program: Program, folder: Path) -> int:
    """Cycles of all kernels of a program, from libtpu's dump of it.

    libtpu compiles equal kernels once, under the name of one of their calls.
    """
    calls = [(times, one) for times, (_, one) in program.runs() if KERNEL in one.rest]
    known: dict[str, int] = {}
    for _, one in calls:
        files = [
            file for file in folder.glob(f"*-{one.name}-*-final_bundles.txt")
            if "schedule-analysis" not in file.name
        ]  # fmt: skip
        for file in files:
            known[_body(one)] = cycles(file.read_text("utf-8"))
    missing = [one.name for _, one in calls if _body(one) not in known]
    if missing:
        raise ValueError(f"no file in the dump has the bundles of {', '.join(missing)}")
    return sum(times * known[_body(one)] for times, one in calls)


def _body(call: Instruction) -> str:
    """The kernel of a call, as compiled code in its configuration."""
    found = re.search(r'"body":"([^"]*)"', call.rest)
    if found is None:
        raise ValueError(f"{call.name} has no body")
    return found[1]


def of_case(chip: str, case: str, impl: str) -> int:
    """Cycles of the kernels of a case; in a process of its own, as libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder, chip, case, impl],
            env={**os.environ, "LIBTPU_INIT_ARGS": flags},
            check=True,
            capture_output=True,
            text=True,
        )
        return int(json.loads(done.stdout.splitlines()[-1])["cycles"])


def main() -> None:
    from benchmarks.suites.tpu import cases

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "chip", "case", "impl"):
        parser.add_argument(name)
    args = parser.parse_args()
    program, _ = cases.compile_case(args.chip, args.case, args.impl)
    print(json.dumps({"cycles": of_dump(Program(program.as_text()), Path(args.folder))}))


if __name__ == "__main__":
    main()
