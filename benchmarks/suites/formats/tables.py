"""Tables of docs/results/formats.md, from the records of `formats`, for benchmarks.tables."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.records import Rows, alike, grouped, newest, select
from benchmarks.render import NOTHING, Rendered, Table, markdown, source
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.formats import BUDGETS, EXACT, MU, NEAREST, NU, STOCHASTIC, Copy

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


def _table(head: list[str] | None, write: Callable[[Measured], Lines]) -> Callable[[Rows], str]:
    """A table of what `write` makes of the run, its head first if none is given, and the run."""

    def table(rows: Rows) -> str:
        found = measured(newest(rows, bench="formats"))
        if found is None:
            return NOTHING
        flags = found.rows[0]["flags"]
        run = f"{found.preset}, {flags['parameters']:,} weights, {flags['steps']} steps; "
        own, *lines = ([head] if head else []) + list(write(found))
        return markdown(own, lines) + "\n" + run + source(found.rows).lstrip()

    return table


def number(x: float) -> str:
    """Two digits, with a power of ten."""
    return "0" if x == 0 else f"{x:.1e}".replace("e-0", "e-").replace("e+00", "")


def _called(copy: Copy) -> str:
    if copy in EXACT.values():
        return "f32"
    return f"{copy.format.removeprefix('4 bits: ')}, groups of {copy.group}, {copy.rounding}"


def _paper(found: Measured) -> Lines:
    """Tables 1 and 9 in the paper's form: MSE over E4M3's for both, the paper's in brackets."""
    ours, base = found.matrix("once at 128", "mse"), (formats.E4M3, formats.E4M3)

    def cell(pair: tuple[str, str]) -> str:
        theirs = f" ({PAPER[pair] / PAPER[base]:.2f})" if pair in PAPER else ""
        return f"{ours[pair] / ours[base]:.2f}{theirs}"

    for mu in _SECONDS:
        yield [mu, *(cell((mu, nu)) for nu in _SECONDS)]


def _slots(metric: str) -> Callable[[Measured], Lines]:
    """Each format in one slot, at equal bytes: its error with the other slot in f32."""
    exact = EXACT[MU].format

    def write(found: Measured) -> Lines:
        for budget in BUDGETS:
            matrices = [found.matrix(f"{loop} at {budget}", metric) for loop in LOOPS]
            for name in formats.FORMATS:
                pairs = ((name, exact), (exact, name))
                values = [matrix.get(pair) for pair in pairs for matrix in matrices]
                cells = ["" if value is None else number(value) for value in values]
                if any(cells):
                    yield [f"{budget - 1:.5f}", name, *cells]

    return write


def _pairs(loop: str) -> Callable[[Measured], Lines]:
    """Every pair at equal bytes, with the formats of v as head."""

    def write(found: Measured) -> Lines:
        matrix, exact = found.matrix(f"{loop} at {BUDGETS[0]}", "median_nmse"), EXACT[MU].format
        mus, nus = (
            dict.fromkeys(pair[at] for pair in matrix if pair[at] != exact) for at in (0, 1)
        )
        yield ["m \\ v", *nus]
        yield from ([mu, *(number(matrix[mu, nu]) for nu in nus)] for mu in mus)

    return write


def _optimizers(found: Measured) -> Lines:
    value = found.values("optimizers")
    metrics = [f"{m}_{loop}" for m in _BY for loop in ("once", "closed")]
    for name, pair in formats.OPTIMIZERS.items():
        size = f"{sum(copy.bytes for copy in pair):.5g}"
        yield [name, *map(_called, pair), size, *(number(value[name, m]) for m in metrics)]


def _best(found: Measured) -> Lines:
    """The best pairs of at most so many bytes, beside the paper's FlashOptim pair of 2.125."""
    value, base = found.values("optimizers"), "FlashOptim"
    theirs = {m: value[base, f"{m}_closed"] for m in _BY}
    pair = formats.OPTIMIZERS[base]
    own = {"bytes": sum(copy.bytes for copy in pair), "mu": pair[0].key, "nu": pair[1].key}
    lines = {base: theirs | own}
    for row in found.rows:
        table = row["case"].partition("/")[2]
        if table.startswith("best ") and row["impl"] == "#1":
            _, search, _, metric, _, budget = table.split()
            what = f"{_SEARCHES[search]}, at most {2 * float(budget):.5g}, by {_BY[metric]}"
            lines[what] = row["pair"]
    for what, one in lines.items():
        errors = ((number(one[m]), "1" if what == base else f"{theirs[m] / one[m]:.2f}")
                  for m in _BY)  # fmt: skip
        cells = itertools.chain(*errors)
        yield [what, f"{one['bytes']:.5g}", *(_called(Copy.of(one[s])) for s in (MU, NU)), *cells]


_SEARCHES = {
    "package": "one group size and rounding",
    "trials": "the same, with trial formats",
    "mixed": "sizes and roundings mixed",
}
_BY = {"median_nmse": "NMSE", "mse": "MSE"}


def _floor(found: Measured) -> Lines:
    for table in dict.fromkeys(row["case"].partition("/")[2] for row in found.rows):
        if table.startswith("floor at "):
            values = found.values(table)
            for name in dict.fromkeys(name for name, _ in values):
                metrics = ("lost_share", "groups_share", "nmse", "nmse_elsewhere")
                cells = [number(values[name, metric]) for metric in metrics]
                largest = f"{values[name, 'largest_step']:.1f}"
                yield [table.removeprefix("floor at "), name, *cells, largest]


def _spans(found: Measured) -> Lines:
    """The spans of groups of 128: percentiles of max / min, and of k."""
    values = found.values("spans")
    for name, slot in (("m", MU), ("v", NU)):
        spans = [f"{10 ** values[slot, f'p{p}']:.1e}" for p in (5, 50, 95, 99)]
        exponents = [f"{SPAN / values[slot, f'p{p}']:.1f}" for p in (95, 50, 5)]
        yield [name, *spans, *exponents, f"{100 * values[slot, 'over_e4m3']:.2f} %"]


_SLOTS = ["scales", "format", *(f"{s}, {n}" for s in "mv" for n in LOOPS)]


def four_bits(rows: Rows) -> Table:
    """Errors of Adam's step from moments in 4 bits, and in the 8 of `flash_adamw`."""
    run = alike(select(rows, bench="four_bits"), "device", "jax", "case")
    body = []
    for of in grouped(run, "impl", "metric").values():
        pair = [Copy.of(of["mse"][slot]) for slot in (MU, NU)]
        size = sum(copy.bytes for copy in pair if copy not in EXACT.values())
        errors = (number(of[metric]["value"]) for metric in _BY)
        body.append([*map(_called, pair), f"{size:.5g}", *errors])
    return ["m", "v", "bytes of what is stored", "median NMSE", "MSE"], body, run


TABLES = {
    "formats_paper": _table(["m \\ v", *_SECONDS], _paper),
    "formats_slots": _table(_SLOTS, _slots("median_nmse")),
    "formats_slots_mse": _table(_SLOTS, _slots("mse")),
    **{f"formats_{loop}": _table(None, _pairs(loop)) for loop in LOOPS},
    "formats_optimizers": _table(
        ["optimizer", "m", "v", "bytes of both", "median NMSE, once", "closed loop", "MSE, once",
         "closed loop"], _optimizers,
    ),
    "formats_best": _table(
        ["search", "bytes of both", "m", "v", "median NMSE", "x better", "MSE", "x better"], _best
    ),
    "formats_floor": _table(
        ["step", "codec of v", "code 0 though v > 0, share of elements", "groups with such",
         "NMSE of the step", "without these elements", "largest step / lr"], _floor,
    ),
    "formats_spans": _table(
        ["", *(f"max / min, {p} %" for p in (5, 50, 95, 99)),
         *(f"k, {p} %" for p in (5, 50, 95)), "wider than E4M3 (k < 1)"], _spans,
    ),
}  # fmt: skip
TABLES["four_bits"] = Rendered(four_bits, "four_bits")
