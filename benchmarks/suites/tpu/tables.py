"""Tables of programs compiled for TPUs: what they move and hold, and estimates of their cycles."""

from benchmarks.records import Rows, grouped, select
from benchmarks.render import Rendered, Table, cell
from benchmarks.suites.tpu.cases import BASE
from benchmarks.suites.tpu.parts import PLAIN

_COMMAND = "tpu"
_HEAD = ["HBM traffic, x ideal", "temporaries", "cycles, million", "of which"]


def _chip(device: str) -> str:
    return device.split()[1]


def _cells(of: dict) -> list[str]:
    cycles, traffic = of["cycles"], cell(of["traffic_ratio"], "{:.2f}")
    if "passes_ratio" in of:
        traffic += f" ({cell(of['passes_ratio'], '{:.2f}')} of two passes)"
    return [
        traffic,
        cell(of["temp_bytes"], "{:.1f} MB", 1e6),
        cell(cycles, "{:.2f}", 1e6),
        cycles["cycles_of"],
    ]


def _ratio(of: dict, base: dict | None) -> str:
    return f"{of['cycles']['value'] / base['cycles']['value']:.2f}" if base else ""


def steps(rows: Rows) -> Table:
    """Each case and implementation on each chip, relative to `optax.adamw` in f32."""
    found = [row for row in select(rows, bench="tpu") if row["case"].startswith("step/")]
    body = []
    for device, of_cases in grouped(found, "device", "case", "impl", "metric").items():
        for case, of_impls in of_cases.items():
            for impl, of in of_impls.items():
                name = f"`{impl}`" + (", f32" if impl == BASE else "")
                ratio = _ratio(of, of_impls.get(BASE))
                shown = [_chip(device), case.removeprefix("step/"), name, *_cells(of), ratio]
                body.append(shown)
    return ["chip", "leaves", "step", *_HEAD, f"cycles, x `{BASE}`"], body, found


def parts(rows: Rows) -> Table:
    """The library's other programs on each chip, layers relative to the one in bf16."""
    found = [row for row in select(rows, bench="tpu") if row["case"].startswith("part/")]
    body = []
    for device, of_cases in grouped(found, "device", "case", "impl", "metric").items():
        for case, of_impls in of_cases.items():
            for impl, of in of_impls.items():
                shown = [_chip(device), case.removeprefix("part/"), f"`{impl}`", *_cells(of)[:-1]]
                body.append([*shown, _ratio(of, of_impls.get(PLAIN))])
    return ["chip", "what", "program", *_HEAD[:-1], "cycles, x bf16"], body, found


TABLES = {
    "tpu_steps": Rendered(steps, _COMMAND),
    "tpu_parts": Rendered(parts, _COMMAND),
}
