"""Static cycles of Pallas' kernels: the instruction bundles that libtpu made of them.

A bundle takes a cycle, without what waiting for memory adds. Loops count as often as their exit
tests say. The loop over a kernel's grid has two trips more than the grid has steps: the first only
fetches, the last only stores. A branch leaves the kernel's own bundles out there, and so does this.
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

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w*)\s*:\s*(>*)")
_LOOP, _LANDING = "LB", "PF"  # labels: the first bundle of a loop, the one that a branch leads to
_EXIT = re.compile(
    r"scmp\.ge\.s32\.totalorder (\(%\w+\), |\(%\w+\) )?%\w+, (\d+) /\* loop exit test \*/"
)
_OVER = re.compile(r"sbr\.rel \((%p\w+)\) target")  # a branch forward; those of loops have a `!`
_BEHIND_A_BRANCH = 4  # bundles that run before it is taken


@dataclasses.dataclass(frozen=True)
class _Bundle:
    depth: int  # loops around it
    opens: bool  # the first of a loop
    trips: tuple[int, ...]  # of the loop whose exit test is here
    outer: tuple[int, ...]  # of the loop around it: a test that waits for the end of this one
    empty: bool
    steps: int | None  # of the grid, where they alone run it, no trip that fills or empties


def cycles(text: str) -> int:
    """Cycles of a kernel, from the text of its final bundles.

    Raises:
      ValueError: for a loop whose exit test compares with no number, or a branch that leaves out
        other bundles than those of the first and last trips of the grid's loop.
    """
    bundles: list[_Bundle] = []
    steps, since = None, 0
    for line in text.splitlines():
        if found := _BUNDLE.match(line):
            if found[1] == _LANDING:
                steps = None
            elif branch := _OVER.search(line):
                steps, since = _steps(text, branch[1]), len(bundles)
            behind = len(bundles) > since + _BEHIND_A_BRANCH
            tests = _EXIT.findall(line)
            bundles.append(
                _Bundle(
                    depth=len(found[2]),
                    opens=found[1] == _LOOP,
                    trips=tuple(int(trips) for waits, trips in tests if not waits),
                    outer=tuple(int(trips) for waits, trips in tests if waits),
                    empty=line[found.end() :].lstrip().startswith("{}"),
                    steps=steps if behind else None,
                )
            )
    return _of_loop(bundles)[0]


def _steps(text: str, condition: str) -> int:
    """Return in how many trips a branch is not taken: where first <= counter < end."""
    while (kept := _kept(text, condition)) is not None:
        condition = kept
    ends = re.search(rf"{condition} = pnand (%p\w+), (%p\w+)", text)
    bounds = [
        re.search(rf"{name} = scmp\.{than}\.s32\.totalorder (%\w+), (\d+)\s", text)
        for name, than in zip(ends.groups() if ends else (), ("ge", "lt"), strict=False)
    ]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None or bounds[0][1] != bounds[1][1]:
        raise ValueError(f"it is not known how often the branch on {condition} is taken")
    return int(bounds[1][2]) - int(bounds[0][2])


def _kept(text: str, condition: str) -> str | None:
    """Return the condition that another is, kept as a number where there were no registers."""
    number = re.search(rf"{condition} = scmp\.ne\.s32\.totalorder (%s\w+), 0\s", text)
    if number is None:
        return None
    chosen = re.search(
        rf"{number[1]} = scalar_select /\*predicate=\*/(%p\w+), /\*on_true=\*/1, "
        r"/\*on_false=\*/0\s", text,
    )  # fmt: skip
    return chosen and chosen[1]


def _of_loop(bundles: Sequence[_Bundle], level: int = 0) -> tuple[int, int, list[int], list[int]]:
    """Cycles of bundles with the loops inside; trips by exit tests, of this loop and the next.

    The test of a loop may stand among the bundles of the last one inside.

    Args:
      bundles: of the loop.
      level: of the loop; the grid's is the first.

    Returns:
      (cycles of a trip, cycles of all trips together beside these, trips, trips of the next loop)
    """
    each, together, at = 0, 0, 0
    trips: list[int] = []
    outer: list[int] = []
    while at < len(bundles):
        one, end, taken = bundles[at], at + 1, 1
        if one.opens:
            end = _end(bundles, at)
            body = [dataclasses.replace(one, opens=False), *bundles[at + 1 : end]]
            inner, beside, found, own = _of_loop(body, level + 1)
            if len(found) != 1:
                raise ValueError(f"a loop of {end - at} bundles has the exit tests {found}")
            taken = inner * found[0] + beside
            trips += own
        else:
            trips += one.trips
            outer += one.outer
        if level == 1 and one.steps is not None:
            together += one.steps * taken
        else:
            each += taken
        at = end
    return each, together, trips, outer


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
