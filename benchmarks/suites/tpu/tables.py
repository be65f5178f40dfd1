"""Tables of programs compiled for TPUs: what they move and hold, and estimates of their cycles."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.records import Rows, grouped, select
from benchmarks.render import Rendered, Table, cell, target
from benchmarks.suites.tpu.bench import BY_XLA
from benchmarks.suites.tpu.cases import BASE, LEAVES, ON_FOUR
from benchmarks.suites.tpu.parts import PLAIN

_LAYER = "llama-layer"
# the optimizers that targets are of
ASKED = ("flash_adamw", "flash_lion", "flash_sgd", "flash_adam_mini", "coat_adamw", "stable_adamw")
_Metrics = dict[str, dict[str, Any]]  # of one program on one chip
_HEAD = ["HBM traffic, x ideal", "temporaries", "cycles, million"]


def _traffic(of: _Metrics) -> str:
    two = cell(of.get("passes_ratio"), " ({:.2f} of two passes)")
    return cell(of["traffic_ratio"], "{:.2f}") + two


def _held(of: _Metrics) -> str:
    return cell(of["temp_bytes"], "{:.1f} MB", 1e6)


def _cycles(of: _Metrics) -> str:
    row = of.get("cycles")
    return cell(row, "{:.2f}", 1e6) + (" *" if row and row["cycles_of"] == BY_XLA else "")


def _table(rows: Rows, kind: str, base: str, of_base: str, head: list[str]) -> Table:
    found = [row for row in select(rows, bench="tpu") if row["case"].startswith(f"{kind}/")]
    chips, body = sorted({row["device"] for row in found}), []

    def both(of_chips: dict[str, _Metrics], shown: Callable[[_Metrics], str]) -> str:
        """A cell for all chips, once where it is the same."""
        cells = [shown(of_chips[chip]) if chip in of_chips else "-" for chip in chips]
        return cells[0] if len(set(cells)) == 1 else " / ".join(text or "-" for text in cells)

    for case, of_impls in grouped(found, "case", "impl", "device", "metric").items():
        bases = of_impls.get(base, {})

        def ratio(of: _Metrics, bases: dict[str, _Metrics] = bases) -> str:
            other = bases.get(of["temp_bytes"]["device"])
            return cell(of.get("cycles"), "{:.2f}", other["cycles"]["value"]) if other else ""

        for impl, of_chips in of_impls.items():
            name = f"`{impl}`" + (of_base if impl == base else "")
            cells = [both(of_chips, shown) for shown in (_traffic, _held, _cycles, ratio)]
            body.append([case.removeprefix(f"{kind}/"), name, *cells])
    return head, body, found


def steps(rows: Rows) -> Table:
    """Each case and implementation on each chip, relative to `optax.adamw` in f32."""
    head = ["leaves", "step", *_HEAD, f"cycles, x `{BASE}`"]
    return _table(rows, "step", BASE, ", f32", head)


def parts(rows: Rows) -> Table:
    """The library's other programs on each chip, layers relative to the one in bf16."""
    return _table(rows, "part", PLAIN, "", ["what", "program", *_HEAD, "cycles, x bf16"])


def _worst(rows: Rows, metric: str, impls: tuple[str, ...], cases: list[str]) -> Rows:
    """The largest record of each implementation over cases and chips, if none is missing."""
    wanted, chips, worst = [f"step/{case}" for case in cases], {row["device"] for row in rows}, []
    for impl in impls:
        found = [row for row in select(rows, metric=metric, impl=impl) if row["case"] in wanted]
        if found and len(found) >= len(wanted) * len(chips):
            worst.append(max(found, key=lambda row: row["value"]))
    return worst


def _lines(rows: Rows) -> Iterator[tuple[list[str], Rows]]:
    leaves = [case for case in LEAVES if not case.startswith(_LAYER) and not case.endswith(ON_FOUR)]
    for cases, what, limit in ((leaves, "large leaves", 1.05), ([_LAYER], "a layer", 1.15)):
        for impl in ASKED:
            two = _worst(rows, "passes_ratio", (impl,), cases)
            for row in _worst(rows, "traffic_ratio", (impl,), cases):
                words = f"{what}: HBM traffic, `{impl}`"
                text = cell(row, "{:.2f} x ideal") + cell(
                    two[0] if two else None, " ({:.2f} of two passes)"
                )
                line = target(words, "≤ {:.2f} x ideal", limit, row["value"], text)
                yield line, [row, *two]
        for metric, words, most in (
            ("temp_bytes", "temporaries", 1.0),
            ("unaliased_bytes", "not in place", 0.0),
        ):
            if known := _worst(rows, metric, ASKED, cases):
                value = max(row["value"] for row in known) / 1e6
                yield target(f"{what}: {words}, all six", "≤ {:.1f} MB", most, value), known
    for chip, limit in (("v5e", 0.95), ("v6e", 0.75)):
        what = f"{chip}: cycles of `flash_adamw`, 2048x8192"
        for row in select(rows, metric="cycles", impl="flash_adamw", case="step/2048x8192"):
            if row["device"].split()[1] == chip:
                yield target(what, "≤ {:.2f} million", limit, row["value"] / 1e6), [row]


def targets(rows: Rows) -> Table:
    """Bounds that steps were to keep, on both chips: the largest of all."""
    lines = list(_lines(select(rows, bench="tpu")))
    used = [row for _, known in lines for row in known]
    return ["on v5e and v6e", "target", "reached", "kept"], [line for line, _ in lines], used


TABLES = {f"tpu_{make.__name__}": Rendered(make, "tpu") for make in (steps, parts, targets)}
