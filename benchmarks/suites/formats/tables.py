"""Tables of docs/results/formats.md, from the records of `formats`, for benchmarks.tables."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.records import Rows, alike, newest, select
from benchmarks.render import NOTHING, Rendered, Table, markdown, source
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.errors import FLOORS
from benchmarks.suites.formats.formats import BUDGET, EXACT, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.suites.formats.four_bits import compared

LOOPS = {"once": "once", NEAREST: "closed loop, nearest", STOCHASTIC: "closed loop, stochastic"}

# COAT's tables: first order -> second order -> MSE of m / sqrt(v), in units that it does not say.
_SECONDS = (formats.E4M3, formats.E4M3_X, formats.E5M2, formats.E5M2_X, formats.DE8, formats.DE8_X)
_PRINTED = {
    formats.E4M3: (20.10, 18.08, 25.65, 18.16),
    formats.E4M3_X: (15.13, 12.31, 21.96, 12.43, 14.01, 18.84),
    formats.E5M2: (37.02, 35.96, 40.30, 36.00),
    formats.E5M2_X: (17.79, 15.48, 23.84, 15.57),
    formats.DE8: (12.11, 8.27, 20.02, 8.43, 10.54, 16.25),
    formats.DE8_X: (11.57, 7.47, 19.69, 7.65, 9.91, 15.81),
}
PAPER: dict[tuple[str, str], float] = {
    (mu, nu): value
    for mu, values in _PRINTED.items()
    for nu, value in zip(_SECONDS, values, strict=False)
}
SPAN = np.log10(1 / formats.FORMATS[formats.E4M3].mu.smallest)  # decades of E4M3


@dataclasses.dataclass(frozen=True)
class Measured:
    """The records of the run that was stored last."""

    preset: str
    rows: Rows

    def of(self, table: str, **wanted: Any) -> Rows:
        return select(self.rows, case=f"{self.preset}/{table}", **wanted)

    def matrix(self, table: str, metric: str) -> dict[tuple[str, str], float]:
        return {
            (row["impl"], nu): value
            for row in self.of(table, metric=metric)
            for nu, value in row["over"].items()
        }

    def values(self, table: str) -> dict[tuple[str, str], float]:
        return {(row["impl"], row["metric"]): row["value"] for row in self.of(table)}


def measured(rows: Rows) -> Measured | None:
    """None without records."""
    found = alike(select(rows, bench="formats"), "device", "jax", "seed")
    preset = found[-1]["case"].partition("/")[0] if found else ""
    own = [row for row in found if row["case"].startswith(f"{preset}/")]
    return Measured(preset, own) if own else None


Lines = Iterator[list[str]]


def _table(head: list[str], write: Callable[[Measured], Lines]) -> Callable[[Rows], str]:
    """A table of what `write` makes of the run, and which run it is."""

    def table(rows: Rows) -> str:
        found = measured(newest(rows, bench="formats"))
        if found is None:
            return NOTHING
        flags = found.rows[0]["flags"]
        run = f"{found.preset}, {flags['parameters']:,} weights, {flags['steps']} steps; "
        return markdown(head, list(write(found))) + "\n" + run + source(found.rows).lstrip()

    return table


def number(x: float) -> str:
    """Two digits, with a power of ten."""
    return "0" if x == 0 else f"{x:.1e}".replace("e-0", "e-").replace("e+00", "")


def _called(copy: Copy) -> str:
    if copy in EXACT.values():
        return "f32"
    return f"{copy.format.removeprefix('4 bits: ')}, groups of {copy.group}, {copy.rounding}"


def _slots(found: Measured) -> Lines:
    """Errors of each format in one slot, at equal bytes, with the other slot in f32."""
    exact = EXACT[MU].format
    ways = itertools.product((NEAREST, STOCHASTIC), _BY)
    matrices = {way: found.matrix(f"{way[0]} at {BUDGET}", way[1]) for way in ways}
    for name in formats.FORMATS:
        if name not in (formats.FINE, formats.FINE_X):
            values = [matrices[way, metric].get(pair) for pair in ((name, exact), (exact, name))
                      for metric in _BY for way in (NEAREST, STOCHASTIC)]  # fmt: skip
            cells = ["" if value is None else number(value) for value in values]
            yield from [[name, *cells]] if any(cells) else []


def _optimizers(found: Measured) -> Lines:
    value = found.values("optimizers")
    for name, pair in formats.OPTIMIZERS.items():
        size = f"{sum(copy.bytes for copy in pair):.5g}"
        both = "; ".join(dict.fromkeys(map(_called, pair)))
        yield [name, both, size, *(number(value[name, f"{metric}_closed"]) for metric in _BY)]


_BY = {"median_nmse": "NMSE", "mse": "MSE"}


def _floor(found: Measured) -> Lines:
    floors = "floor at "
    tables = {row["case"].partition("/")[2] for row in found.rows}
    steps = [int(name.removeprefix(floors)) for name in tables if name.startswith(floors)]
    if not steps:
        return
    values = found.values(f"{floors}{max(steps)}")
    for name in FLOORS:
        largest = f"{values[name, 'largest_step']:.1f}"
        yield [name, number(values[name, "lost_share"]), largest]


def four_bits(rows: Rows) -> Table:
    """Median errors of Adam's step from one moment in 4 bits, and in the 8 of `flash_adamw`."""
    run = alike(select(rows, bench="four_bits", metric="median_nmse"), "device", "jax", "case")
    values = {(row["mu"], row["nu"]): row["value"] for row in run}
    pairs = compared()
    used = [row for row in run if (row["mu"], row["nu"]) in {(m.key, n.key) for m, n in pairs}]
    body: dict[str, dict[tuple[str, str], str]] = {}
    for pair in pairs:
        (copy,) = (copy for copy in pair if copy not in EXACT.values())
        if (at := (pair[0].key, pair[1].key)) in values:
            name = f"{copy.format.removeprefix('4 bits: ')}, groups of {copy.group}"
            body.setdefault(name, {})[copy.slot, copy.rounding] = number(values[at])
    columns = list(itertools.product((MU, NU), (NEAREST, STOCHASTIC)))
    lines = [[name, *(of.get(column, "") for column in columns)] for name, of in body.items()]
    return ["map of m, of v", *(f"{'mv'[slot == NU]}, {way}" for slot, way in columns)], lines, used


TABLES = {
    "formats_slots": _table(
        ["format", *(f"{slot}: {error}, {way}" for slot in "mv" for error in _BY.values()
                     for way in (NEAREST, STOCHASTIC))], _slots,
    ),
    "formats_optimizers": _table(
        ["optimizer", "m; v", "bytes of both", "median NMSE", "MSE"], _optimizers
    ),
    "formats_floor": _table(
        ["codec of v", "elements with code 0 though v > 0", "largest step / lr"], _floor
    ),
    "four_bits": Rendered(four_bits, "four_bits"),
}  # fmt: skip
