"""Tables of programs compiled for TPUs: what they move and hold, and estimates of their cycles."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.records import Rows, grouped, select
from benchmarks.render import Rendered, Table, cell, target
from benchmarks.suites.tpu.bench import BY_XLA
from benchmarks.suites.tpu.cases import BASE, LEAVES, ON_FOUR
from benchmarks.suites.tpu.parts import PLAIN

_COMMAND = "tpu"
_LAYER = "llama-layer"
# the optimizers that targets are of
ASKED = ("flash_adamw", "flash_lion", "flash_sgd", "flash_adam_mini", "coat_adamw", "stable_adamw")
_Metrics = dict[str, dict[str, Any]]  # of one program on one chip


def _records(rows: Rows, kind: str) -> Rows:
    return [row for row in select(rows, bench="tpu") if row["case"].startswith(f"{kind}/")]


def _both(of_chips: dict[str, _Metrics], chips: list[str], shown: Callable[[_Metrics], str]) -> str:
    """A cell for all chips, once where it is the same."""
    cells = [shown(of_chips[chip]) if chip in of_chips else "-" for chip in chips]
    return cells[0] if len(set(cells)) == 1 else " / ".join(text or "-" for text in cells)


def _body(found: Rows, kind: str, base: str, name: Callable[[str], str]) -> list[list[str]]:
    """A line for each case and implementation, with the cells of all chips."""
    chips = sorted({row["device"] for row in found})
    body = []
    for case, of_impls in grouped(found, "case", "impl", "device", "metric").items():
        for impl, of_chips in of_impls.items():

            def ratio(of: _Metrics, of_impls: dict[str, Any] = of_impls) -> str:
                other = of_impls.get(base, {}).get(of["temp_bytes"]["device"])
                there = other and "cycles" in of
                return f"{of['cycles']['value'] / other['cycles']['value']:.2f}" if there else ""

            cells = [_both(of_chips, chips, shown) for shown in (_traffic, _held, _cycles, ratio)]
            body.append([case.removeprefix(f"{kind}/"), name(impl), *cells])
    return body


def _traffic(of: _Metrics) -> str:
    found = cell(of["traffic_ratio"], "{:.2f}")
    two = of.get("passes_ratio")
    return found + (f" ({cell(two, '{:.2f}')} of two passes)" if two else "")


def _held(of: _Metrics) -> str:
    return cell(of["temp_bytes"], "{:.1f} MB", 1e6)


def _cycles(of: _Metrics) -> str:
    by_xla = " *" if "cycles" in of and of["cycles"]["cycles_of"] == BY_XLA else ""
    return cell(of.get("cycles"), "{:.2f}", 1e6) + by_xla


_HEAD = ["HBM traffic, x ideal", "temporaries", "cycles, million"]


def steps(rows: Rows) -> Table:
    """Each case and implementation on each chip, relative to `optax.adamw` in f32."""
    found = _records(rows, "step")
    body = _body(found, "step", BASE, lambda impl: f"`{impl}`" + (", f32" if impl == BASE else ""))
    return ["leaves", "step", *_HEAD, f"cycles, x `{BASE}`"], body, found


def parts(rows: Rows) -> Table:
    """The library's other programs on each chip, layers relative to the one in bf16."""
    found = _records(rows, "part")
    body = _body(found, "part", PLAIN, lambda impl: f"`{impl}`")
    return ["what", "program", *_HEAD, "cycles, x bf16"], body, found


# ---- targets -------------------------------------------------------------------------------------


def _worst(rows: Rows, metric: str, impl: str, cases: list[str]) -> dict[str, Any] | None:
    """The largest record of a metric over cases and chips; None where one of them is missing."""
    wanted = [f"step/{case}" for case in cases]
    found = [row for row in select(rows, metric=metric, impl=impl) if row["case"] in wanted]
    chips = {row["device"] for row in rows}
    if not found or len(found) < len(wanted) * len(chips):
        return None
    return max(found, key=lambda row: row["value"])


def _lines(rows: Rows) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """Lines of the table of targets, and what each rests on."""
    leaves = [case for case in LEAVES if not case.startswith(_LAYER) and not case.endswith(ON_FOUR)]
    for cases, what, limit in ((leaves, "large leaves", 1.05), ([_LAYER], "a layer", 1.15)):
        for impl in ASKED:
            if (row := _worst(rows, "traffic_ratio", impl, cases)) is None:
                continue
            two = _worst(rows, "passes_ratio", impl, cases)
            text = f"{row['value']:.2f} x ideal" + (
                f" ({two['value']:.2f} of two passes)" if two else ""
            )
            yield (
                target(
                    f"{what}: HBM traffic, `{impl}`", "≤ {:.2f} x ideal", limit, row["value"], text
                ),
                [row, two] if two else [row],
            )
        for metric, words in (("temp_bytes", "temporaries"), ("unaliased_bytes", "not in place")):
            worst = [_worst(rows, metric, impl, cases) for impl in ASKED]
            if known := [row for row in worst if row is not None]:
                row = max(known, key=lambda row: row["value"])
                most, unit = (1.0, 1e6) if metric == "temp_bytes" else (0.0, 1e6)
                yield (
                    target(f"{what}: {words}, all six", "≤ {:.1f} MB", most, row["value"] / unit),
                    known,
                )
    for chip, limit in (("v5e", 0.95), ("v6e", 0.75)):
        what = f"{chip}: cycles of `flash_adamw`, 2048x8192"
        for row in select(rows, metric="cycles", impl="flash_adamw", case="step/2048x8192"):
            if row["device"].split()[1] == chip:
                yield target(what, "≤ {:.2f} million", limit, row["value"] / 1e6), [row]


def targets(rows: Rows) -> Table:
    """Bounds that steps were to keep, on both chips: the largest of all."""
    lines = list(_lines(_records(rows, "step")))
    used = [row for _, known in lines for row in known]
    return ["on v5e and v6e", "target", "reached", "kept"], [line for line, _ in lines], used


TABLES = {
    "tpu_steps": Rendered(steps, _COMMAND),
    "tpu_parts": Rendered(parts, _COMMAND),
    "tpu_targets": Rendered(targets, _COMMAND),
}
