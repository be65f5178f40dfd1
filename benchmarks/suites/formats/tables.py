"""Tables of docs/guides/choosing.md, from the records of `formats`, for benchmarks.tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.records import Rows, newest, select
from benchmarks.render import NOTHING, markdown, source
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """The records of the run that was stored last."""

    preset: str
    rows: Rows

    def of(self, table: str, **wanted: Any) -> Rows:
        """Of one of the benchmark's tables."""
        return select(self.rows, case=f"{self.preset}/{table}", **wanted)

    def matrix(self, table: str, metric: str) -> dict[tuple[str, str], float]:
        """(format of m, format of v) -> error."""
        return {
            (row["impl"], nu): value
            for row in self.of(table, metric=metric)
            for nu, value in row["over"].items()
        }

    def values(self, table: str) -> dict[tuple[str, str], float]:
        """(implementation, metric) -> value."""
        return {(row["impl"], row["metric"]): row["value"] for row in self.of(table)}


def measured(rows: Rows) -> Measured | None:
    """None without records."""
    found = select(rows, bench="formats")
    if not found:
        return None
    last = found[-1]
    preset = last["case"].partition("/")[0]
    same = select(found, device=last["device"], jax=last["jax"], seed=last["seed"])
    return Measured(preset, [row for row in same if row["case"].startswith(f"{preset}/")])


def _table(rows: Rows, head: list[str], write) -> str:
    """Lines of `write(measured)` under a head, with what run they are of."""
    found = measured(newest(rows, bench="formats"))
    if found is None:
        return NOTHING
    flags = found.rows[0]["flags"]
    run = f"{found.preset}, {flags['parameters']:,} weights, {flags['steps']} steps; "
    return markdown(head, write(found)) + "\n" + run + source(found.rows).lstrip()


def number(x: float) -> str:
    """Two digits, with a power of ten."""
    return "0" if x == 0 else f"{x:.1e}".replace("e-0", "e-").replace("e+00", "")


def paper(rows: Rows) -> str:
    """Tables 1 and 9 in the paper's form: MSE over E4M3's for both, the paper's in brackets."""

    def write(found: Measured) -> list[list[str]]:
        ours, base = found.matrix("once at 128", "mse"), (formats.E4M3, formats.E4M3)
        lines = []
        for mu in _SECONDS:
            line = [mu]
            for nu in _SECONDS:
                printed = PAPER.get((mu, nu))
                theirs = f" ({printed / PAPER[base]:.2f})" if printed else ""
                line.append(f"{ours[mu, nu] / ours[base]:.2f}{theirs}")
            lines.append(line)
        return lines

    return _table(rows, ["m \\ v", *_SECONDS], write)


def slots(rows: Rows, metric: str = "median_nmse") -> str:
    """Each format in one slot, at equal bytes: its error with the other slot in f32."""

    def write(found: Measured) -> list[list[str]]:
        lines = []
        for budget in BUDGETS:
            by_loop = {n: found.matrix(f"{n} at {budget}", metric) for n in LOOPS}
            for name in formats.FORMATS:
                line = [f"{budget - 1:.5f}", name]
                for slot in (MU, NU):
                    line += [_alone(by_loop[loop], slot, name) for loop in LOOPS]
                lines += [line] if any(line[2:]) else []
        return lines

    head = ["scales", "format", *(f"{s}, {n}" for s in "mv" for n in LOOPS)]
    return _table(rows, head, write)


def slots_of_model(rows: Rows) -> str:
    """The same as MSE over the model."""
    return slots(rows, "mse")


def _alone(matrix: dict[tuple[str, str], float], slot: str, name: str) -> str:
    exact = EXACT[slot].format
    value = matrix.get((name, exact) if slot == MU else (exact, name))
    return "" if value is None else number(value)


def _pairs(loop: str, budget: float):
    def table(rows: Rows) -> str:
        """Every pair at equal bytes."""
        how = NEAREST if loop == "once" else loop
        mus, nus = ([c.format for c in formats.column(slot, budget, how)] for slot in (MU, NU))

        def write(found: Measured) -> list[list[str]]:
            matrix = found.matrix(f"{loop} at {budget}", "median_nmse")
            return [[mu, *(number(matrix[mu, nu]) for nu in nus)] for mu in mus]

        return _table(rows, ["m \\ v", *nus], write)

    return table


def optimizers(rows: Rows) -> str:
    """Return the table of the optimizers' states, with their own group sizes and roundings."""

    def write(found: Measured) -> list[list[str]]:
        lines = []
        for name, pair in formats.OPTIMIZERS.items():
            both = [
                found.of("optimizers", impl=name, metric=f"{m}_{loop}")[-1]["value"]
                for m in ("median_nmse", "mse")
                for loop in ("once", "closed")
            ]
            size = sum(copy.bytes for copy in pair)
            lines.append([name, *(_called(c) for c in pair), f"{size:.5g}", *map(number, both)])
        return lines

    head = ["optimizer", "m", "v", "bytes of both", "median NMSE, once", "closed loop",
            "MSE, once", "closed loop"]  # fmt: skip
    return _table(rows, head, write)


def _called(copy: Copy) -> str:
    return f"{copy.format}, groups of {copy.group}, {copy.rounding}"


def best(rows: Rows) -> str:
    """The best pairs of at most so many bytes, beside the paper's FlashOptim pair of 2.125."""

    def write(found: Measured) -> list[list[str]]:
        theirs = found.values("optimizers")
        nmse, mse = (theirs["FlashOptim", f"{m}_closed"] for m in ("median_nmse", "mse"))
        pair = formats.OPTIMIZERS["FlashOptim"]
        size = f"{sum(copy.bytes for copy in pair):.5g}"
        lines = [["FlashOptim", size, *map(_called, pair), number(nmse), "1", number(mse), "1"]]
        for row in found.rows:
            table = row["case"].partition("/")[2]
            if table.startswith("best ") and row["impl"] == "#1":
                one = row["pair"]
                _, search, _, metric, _, budget = table.split()
                lines.append([
                    f"{_SEARCHES[search]}, at most {2 * float(budget):.5g}, by {_BY[metric]}",
                    f"{one['bytes']:.5g}",
                    *(_called(Copy.of(one[slot])) for slot in (MU, NU)),
                    number(one["median_nmse"]), f"{nmse / one['median_nmse']:.2f}",
                    number(one["mse"]), f"{mse / one['mse']:.2f}",
                ])  # fmt: skip
        return lines

    head = ["search", "bytes of both", "m", "v", "median NMSE", "x better", "MSE", "x better"]
    return _table(rows, head, write)


_SEARCHES = {
    "package": "one group size and rounding",
    "trials": "the same, with trial formats",
    "mixed": "sizes and roundings mixed",
}
_BY = {"median_nmse": "NMSE", "mse": "MSE"}


def floor(rows: Rows) -> str:
    """Codes of v, with m in f32, encoded once."""

    def write(found: Measured) -> list[list[str]]:
        tables = dict.fromkeys(row["case"].partition("/")[2] for row in found.rows)
        by_step = {t: found.values(t) for t in tables if t.startswith("floor at ")}
        return [
            [
                step.rpartition(" ")[2],
                name,
                *(number(values[name, m]) for m in ("lost_share", "groups_share", "nmse",
                                                    "nmse_elsewhere")),
                f"{values[name, 'largest_step']:.1f}",
            ]
            for step, values in by_step.items()
            for name in dict.fromkeys(name for name, _ in values)
        ]  # fmt: skip

    head = ["step", "codec of v", "code 0 though v > 0, share of elements", "groups with such",
            "NMSE of the step", "without these elements", "largest step / lr"]  # fmt: skip
    return _table(rows, head, write)


def spans(rows: Rows) -> str:
    """Return the table of the spans of groups of 128: percentiles of max / min, and of k."""

    def write(found: Measured) -> list[list[str]]:
        values = found.values("spans")
        wide = np.log10(1 / formats.FORMATS[formats.E4M3].mu.smallest)
        return [
            [
                name,
                *(f"{10 ** values[slot, f'p{p}']:.1e}" for p in (5, 50, 95, 99)),
                *(f"{wide / values[slot, f'p{p}']:.1f}" for p in (95, 50, 5)),
                f"{100 * values[slot, 'over_e4m3']:.2f} %",
            ]
            for name, slot in (("m", MU), ("v", NU))
        ]

    head = ["", *(f"max / min, {p} %" for p in (5, 50, 95, 99)),
            *(f"k, {p} %" for p in (5, 50, 95)), "wider than E4M3 (k < 1)"]  # fmt: skip
    return _table(rows, head, write)


TABLES = {
    "formats_paper": paper,
    "formats_slots": slots,
    "formats_slots_mse": slots_of_model,
    **{f"formats_{loop}": _pairs(loop, BUDGETS[0]) for loop in LOOPS},
    "formats_optimizers": optimizers,
    "formats_best": best,
    "formats_floor": floor,
    "formats_spans": spans,
}
