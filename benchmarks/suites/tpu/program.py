"""The text of an optimized program: bytes it moves through HBM, estimated cycles.

Each instruction reads its operands from HBM and writes its results there, but for what XLA keeps in
a chip's own memory (`S(1)` in a layout). Slices count what they take, updates in place what they
write, the body of a loop as often as it runs. What a kernel of Pallas reads more than once does not
show: each of its operands counts once.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

_BITS = {
    **{"pred": 8, "bf16": 16, "token": 0},
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
}
_SHAPE = re.compile(r"(pred|token|bf16|f8e\w+|[suf]\d+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_FREE = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
_VIEWS = {"bitcast", "copy", "reshape", "transpose", "convert"}  # inside a fusion
_BITCASTS = ("ConcatBitcast", "AssignBitcast", "SplitBitcast", "AllocateBuffer")
KERNEL = "tpu_custom_call"
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program: its bytes as they are tiled, and whether they lie in HBM."""

    size: int
    in_hbm: bool

    @property
    def moved(self) -> int:
        """Bytes of HBM that reading or writing it moves."""
        return self.size if self.in_hbm else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    op: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    inner: str  # what stands in the parentheses
    rest: str  # and behind them
    is_root: bool

    def called(self, kind: str) -> str:
        """The computation that it names as its `kind`: `calls`, `body`, `condition`."""
        found = re.search(rf"\b{kind}=%([\w.\-]+)", self.rest)
        if found is None:
            raise ValueError(f"{self.name} names no {kind}: {self.rest[:200]}")
        return found[1]

    @property
    def cycles(self) -> int:
        """XLA's estimate, 0 where it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0


Computation = dict[str, Instruction]


def _array(dtype: str, dims: str, layout: str) -> Array:
    """The bytes of an array with its tiling: the tiled dimensions are padded to whole tiles."""
    sizes = [int(size) for size in dims.split(",") if size]
    space = re.search(r"S\((\d+)\)", layout)
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile and sizes:
        order = [int(axis) for axis in layout.split(":")[0].split(",")]  # the minor one first
        tiles = [int(size) for size in tile[1].split(",")][::-1]
        for axis, size in zip(order, tiles, strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    bits = _BITS.get(dtype, 8)  # floats of 8 bits have many names
    return Array(math.prod(sizes) * bits // 8, space is None or space[1] == "0")


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(_array(*found) for found in _SHAPE.findall(text))


def _parted(text: str) -> tuple[str, str]:
    """A text up to the parenthesis that closes it, and what follows."""
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:end], text[end + 1 :]
    raise ValueError(f"no closing parenthesis: {text[:200]}")


class Program:
    """The computations of an optimized program, from its text."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        now: Computation = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                now = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                root, name, shape, op, rest = found.groups()
                inner, rest = _parted(rest)
                names = tuple(re.findall(r"%([\w.\-]+)", inner))
                now[name] = Instruction(name, op, _arrays(shape), names, inner, rest, bool(root))
        if not self.entry:
            raise ValueError("the text of a program has no ENTRY computation")

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of every computation, fused ones too."""
        for computation in self.computations.values():
            yield from computation.values()

    def runs(self, computation: str | None = None, times: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield the instructions that a chip executes, with how often, and the rest of each."""
        inside = self.computations[computation or self.entry]
        for one in inside.values():
            if one.op == "while":
                yield from self.runs(one.called("body"), times * self.trips(one))
            elif one.op == "call":
                yield from self.runs(one.called("to_apply"), times)
            elif one.op == "conditional":
                yield from self.runs(self._costliest(one), times)
            else:
                yield times, (inside, one)

    def trips(self, loop: Instruction) -> int:
        """Return the trips of a loop: as XLA says, or as its condition compares a counter."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        root = next(one for one in condition.values() if one.is_root)
        limits = [condition[name].inner for name in root.operands
                  if condition[name].op == "constant"]  # fmt: skip
        if root.op != "compare" or "direction=LT" not in root.rest or len(limits) != 1:
            raise ValueError(f"the trips of {loop.name} are not known: {root}")
        return int(limits[0])

    def _costliest(self, conditional: Instruction) -> str:
        names = re.search(r"branch_computations=\{([^}]*)\}", conditional.rest)
        branches = (
            re.findall(r"%([\w.\-]+)", names[1])
            if names
            else [conditional.called(f"{kind}_computation") for kind in ("true", "false")]
        )
        return max(branches, key=self.traffic)

    def traffic(self, computation: str | None = None) -> int:
        """Bytes that the program moves to and from HBM."""
        return sum(times * self.moved(*one) for times, one in self.runs(computation))

    def cycles(self) -> int:
        """XLA's estimate of the cycles of its own instructions; Pallas' kernels count 0."""
        return sum(times * one.cycles for times, (_, one) in self.runs())

    def kernels(self) -> int:
        """The number of calls of Pallas' kernels."""
        return sum(times for times, (_, one) in self.runs() if KERNEL in one.rest)

    def collectives(self) -> dict[str, int]:
        """Return how many of each collective the program has."""
        ops = collections.Counter(one.op.removesuffix("-start") for one in self.instructions())
        return {op: ops[op] for op in COLLECTIVES if ops[op]}

    def moved(self, inside: Computation, one: Instruction) -> int:
        if one.op in _FREE or one.op.endswith("-done"):
            return 0
        if one.op == "custom-call" and any(name in one.rest for name in _BITCASTS):
            return 0
        if one.op in ("copy-start", "slice-start", "async-start"):
            return _of_async(inside, one)
        if one.op == "fusion":
            return self._of_fusion(inside, one)
        if one.op in ("dynamic-slice", "slice", "gather"):
            source = _all(inside, one.operands[:1])
            written = sum(x.moved for x in one.results)
            return written + (sum(x.size for x in one.results) if source[0].in_hbm else 0)
        if one.op == "dynamic-update-slice":
            update = _all(inside, one.operands[1:2])[0]
            return update.moved + (update.size if one.results[0].in_hbm else 0)
        read = sum(x.moved for x in _all(inside, one.operands))
        return read + sum(x.moved for x in one.results)

    def _of_fusion(self, inside: Computation, one: Instruction) -> int:
        fused = _Fused(self, one.called("calls"))
        total = 0
        for index, operand in enumerate(one.operands):
            arrays = inside[operand].results
            if any(x.in_hbm for x in arrays):
                total += min(fused.read(index), sum(x.moved for x in arrays))
        written = fused.written()
        for index, result in enumerate(one.results):
            if result.in_hbm:
                total += min(written.get(index, result.size), result.size)
        return total


class _Fused:
    """A fused computation: what it takes of its operands, and writes of its results."""

    def __init__(self, program: Program, name: str):
        self.program, self.inside = program, program.computations[name]
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for one in self.inside.values():
            for operand in one.operands:
                self.users[operand].append(one)

    def read(self, index: int) -> int:
        """Bytes read of an operand: slices of it, where nothing else is used."""
        wanted = str(index)
        return self._taken(
            next(x for x in self.inside.values() if x.op == "parameter" and x.inner == wanted)
        )

    def _taken(self, one: Instruction) -> int:
        total = 0
        for user in self.users[one.name]:
            if user.op in ("dynamic-slice", "slice"):
                total += user.results[0].size
            elif user.op == "dynamic-update-slice" and user.operands[0] == one.name:
                continue  # what stays in place is not read
            elif self._is_view(user):
                total += self._taken(user)
            else:
                return one.results[0].size
        return total

    def _is_view(self, one: Instruction) -> bool:
        """Return whether an instruction only shows its one operand in another form."""
        if one.op == "fusion":
            body = self.program.computations[one.called("calls")].values()
            return all(x.op in _VIEWS | {"parameter"} for x in body)
        return one.op in _VIEWS

    def written(self) -> dict[int, int]:
        """Bytes written of each result that is updated in place."""
        root = next(one for one in self.inside.values() if one.is_root)
        results = [self.inside[name] for name in root.operands] if root.op == "tuple" else [root]
        found = {}
        for index, one in enumerate(results):
            while self._is_view(one) and one.operands[0] in self.inside:
                one = self.inside[one.operands[0]]
            if one.op == "dynamic-update-slice":
                found[index] = self.inside[one.operands[1]].results[0].size
        return found


def _all(inside: Computation, names: tuple[str, ...]) -> list[Array]:
    return [x for name in names for x in inside[name].results]


def _of_async(inside: Computation, one: Instruction) -> int:
    """A copy that runs beside other work: what comes to HBM or from it, of the destination's size.

    Its result is a tuple of source and destination: (destination, source, ...) of a copy,
    ((source), destination, ...) of a slice.
    """
    first, second = one.results[:2]
    source, target = (second, first) if one.op == "copy-start" else (first, second)
    return target.size * (source.in_hbm + target.in_hbm)
