"""The text of an optimized program: bytes it moves through HBM, estimated cycles.

Each instruction reads its operands from HBM and writes its results there, but for what XLA keeps in
a chip's own memory (`S(1)` in a layout). Slices count what they take, updates in place what they
write, the body of a loop as often as it runs. What a kernel of Pallas reads more than once does not
show: each of its operands counts once.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "token": 0}  # others have theirs in their names
_SHAPE = re.compile(r"(pred|token|bf16|f8e\w+|[suf]\d+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_FREE = re.compile("parameter|tuple|get-tuple-element|bitcast|constant|after-all|opt-barrier|.*-id|"
                   "add-dependency|.*-done")  # fmt: skip
_VIEWS = {"bitcast", "copy", "reshape", "transpose", "convert"}  # inside a fusion
_IN_PLACE = re.compile("ConcatBitcast|AssignBitcast|SplitBitcast|AllocateBuffer")


class Array(NamedTuple):
    """Bytes of an array as it is tiled, and those of HBM that reading or writing it moves."""

    size: int
    moved: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    op: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    inner: str  # what stands in the parentheses
    rest: str  # and behind them
    is_root: bool

    def said(self, what: str) -> str:
        """Return what the line says of a key, nothing where it says nothing."""
        found = re.search(what, self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]


def array(dtype: str, dims: str, layout: str) -> Array:
    """An array with its tiling: the tiled dimensions are padded to whole tiles."""
    sizes = [int(size) for size in dims.split(",") if size]
    if sizes and (tile := re.search(r"T\(([\d,]+)\)", layout)):
        order = map(int, layout.split(":")[0].split(","))  # the minor one first
        for axis, length in zip(order, map(int, reversed(tile[1].split(","))), strict=False):
            sizes[axis] = -(-sizes[axis] // length) * length
    bits = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
    size = math.prod(sizes) * bits // 8
    return Array(size, 0 if re.search(r"S\([1-9]", layout) else size)


def _instruction(root: str | None, shape: str, op: str, text: str) -> Instruction:
    depth, end = 1, -1  # of parentheses, at the one that closes the operands
    while depth:
        end += 1
        depth += {"(": 1, ")": -1}.get(text[end], 0)
    names = tuple(re.findall(r"%([\w.\-]+)", text[:end]))
    results = tuple(array(*found) for found in _SHAPE.findall(shape))
    return Instruction(op, results, names, text[:end], text[end + 1 :], bool(root))


class Program:
    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        now: Computation = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                now = self.computations.setdefault(head[2], {})
                self.entry = head[2]  # the last one
            elif found := _LINE.match(line):
                root, name, *own = found.groups()
                now[name] = _instruction(root, *own)

    def executed(self, name: str = "", times: int = 1) -> Iterator[tuple[int, Instruction, int]]:
        """Yield what a chip executes: how often, each instruction, the bytes that it moves."""
        inside = self.computations[name or self.entry]
        for one in inside.values():
            if one.op == "while":
                trips = int(one.said(r'"known_trip_count":\{"n":"(\d+)"'))
                yield from self.executed(one.said(r"\bbody=%([\w.\-]+)"), times * trips)
            elif one.op == "call":
                yield from self.executed(one.said(r"\bto_apply=%([\w.\-]+)"), times)
            else:
                yield times, one, self._moved(inside, one)

    def traffic(self) -> int:
        """Bytes that the program moves to and from HBM."""
        return sum(times * size for times, _, size in self.executed())

    def cycles(self) -> int:
        """XLA's estimate of its own instructions, where it has one; Pallas' kernels count 0."""
        estimate = r'"estimated_cycles":"(\d+)"'
        return sum(times * int(one.said(estimate) or 0) for times, one, _ in self.executed())

    def kernels(self) -> int:
        return sum(times for times, one, _ in self.executed() if "tpu_custom_call" in one.rest)

    def _moved(self, inside: Computation, one: Instruction) -> int:
        if _FREE.fullmatch(one.op) or (one.op == "custom-call" and _IN_PLACE.search(one.rest)):
            return 0
        operands = [x for name in one.operands if name in inside for x in inside[name].results]
        if one.op in ("copy-start", "slice-start", "async-start"):
            # beside other work: (target, source) of a copy, (source, target) of a slice
            ends = one.results[:2]
            target = ends[0 if one.op == "copy-start" else 1]
            return target.size * sum(end.moved > 0 for end in ends)
        if one.op == "fusion":
            return self._of_fusion(inside, one)
        written = sum(x.moved for x in one.results)
        if one.op in ("dynamic-slice", "slice", "gather"):
            return written + (one.results[0].size if operands[0].moved else 0)
        if one.op == "dynamic-update-slice":
            return operands[1].moved + (operands[1].size if one.results[0].moved else 0)
        return written + sum(x.moved for x in operands)

    def _of_fusion(self, outside: Computation, one: Instruction) -> int:
        inside = self.computations[one.said(r"\bcalls=%([\w.\-]+)")]
        total = 0
        for index, operand in enumerate(one.operands):
            if there := sum(x.moved for x in outside[operand].results):
                (name,) = (name for name, x in inside.items()
                           if x.op == "parameter" and x.inner == str(index))  # fmt: skip
                total += min(self._read(inside, name), there)
        (root,) = (x for x in inside.values() if x.is_root)
        last = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
        for result, made in zip(one.results, last, strict=True):
            while self._is_view(made) and made.operands[0] in inside:
                made = inside[made.operands[0]]
            if made.op == "dynamic-update-slice":  # in place
                total += min(result.moved, inside[made.operands[1]].results[0].size)
            else:
                total += result.moved
        return total

    def _read(self, inside: Computation, name: str) -> int:
        """Bytes that a fusion reads of a value: slices of it, where nothing else is used."""
        total = 0
        for other, user in inside.items():
            if name not in user.operands:
                continue
            if user.op in ("dynamic-slice", "slice"):
                total += user.results[0].size
            elif self._is_view(user):
                total += self._read(inside, other)
            elif user.op != "dynamic-update-slice" or user.operands[0] != name:
                return inside[name].results[0].size  # else what stays in place is not read
        return total

    def _is_view(self, one: Instruction) -> bool:
        """Return whether an instruction only shows its one operand in another form."""
        if one.op == "fusion":
            body = self.computations[one.said(r"\bcalls=%([\w.\-]+)")].values()
            return all(x.op in _VIEWS | {"parameter"} for x in body)
        return one.op in _VIEWS
