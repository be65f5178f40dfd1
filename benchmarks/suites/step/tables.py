"""Tables of the step benchmark, for benchmarks.tables."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.records import Rows, newest, on_gpus, select
from benchmarks.render import NOTHING, Rendered, Table, markdown, source

Values = dict[tuple[str, str, str], dict[str, Any]]  # (case, implementation, metric) -> record

BASE = "optax-f32"
ORDER = ("lowmem", "optax", "flashoptim", "torch", "bitsandbytes")  # of implementations' names
TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}


def cpu_step(rows: Rows) -> Table:
    """Milliseconds and compile seconds of a step on a CPU."""
    found = [r for r in select(rows, bench="step") if r["device"].startswith("cpu")]
    body = [
        [
            r["case"],
            r["impl"],
            r["jax"],
            {"device_ms": "step", "compile_s": "compilation"}[r["metric"]],
            f"{r['value']:.1f} {r['unit']}",
            f"{r['ratio_to_optax']:.2f}",
        ]
        for r in found
    ]
    columns = ["case", "implementation", "jax", "of", "time", "x optax"]
    return columns, body, found


def cpu_compile(rows: Rows) -> Table:
    """CPU time and temporaries of compiling steps of many leaves."""
    found = select(rows, bench="compile")
    value = {(r["case"], r["impl"], r["jax"], r["metric"]): r["value"] for r in found}
    body = [
        [
            *(case, impl, version),
            f"{value[case, impl, version, 'cpu_ms_per_leaf']:.1f} ms",
            f"{value[case, impl, version, 'temp_bytes'] / 2**20:.2f} MiB",
        ]
        for case, impl, version in dict.fromkeys(key[:3] for key in value)
    ]
    columns = ["leaves", "step", "jax", "CPU time a leaf", "temporaries"]
    return columns, body, found


def masters(rows: Rows) -> Table:
    """Time of a step by how its master weights are rounded."""
    found = select(rows, bench="masters")
    body = [
        [row["case"], row["impl"], f"{row['value']:.2f} ms", f"{row['ratio_to_nearest']:.3f}"]
        for row in found
    ]
    return ["step", "kernel and rounding", "time", "to nearest"], body, found


def gpu_step(rows: Rows) -> str:
    """For each optimizer, implementations by leaf sets: milliseconds, of the bound, x optax-f32."""
    return _by_machine(rows, _summaries)


def gpu_step_details(rows: Rows) -> str:
    """Everything that was measured of each case and implementation, a line each."""
    return _by_machine(rows, _details)


def _by_machine(rows: Rows, write: Callable[[Values], str]) -> str:
    """Join what `write` returns for each device and version of JAX, each with its source."""
    found = on_gpus(newest(rows, bench="step"))
    parts = []
    for machine in sorted({(r["device"], r["jax"]) for r in found}):
        own = [r for r in found if (r["device"], r["jax"]) == machine]
        values = {(r["case"], r["impl"], r["metric"]): r for r in own}
        parts.append(write(values) + source(own) + _copies(own))
    return "\n".join(parts) or NOTHING


def _copies(rows: Rows) -> str:
    rates = [f"{r['value']:.2f}" for r in rows if r["metric"] == "copy_tbps"]
    if not rates:
        return ""
    span = min(rates) if min(rates) == max(rates) else f"{min(rates)} to {max(rates)}"
    return f"A copy moves {span} TB/s, read and written.\n"


def _summaries(values: Values) -> str:
    timed = [(case, impl) for case, impl, metric in values if metric == "device_ms"]
    texts = []
    for optimizer in dict.fromkeys(case.split("/")[1] for case, _ in timed):
        cases = list(dict.fromkeys(c for c, _ in timed if c.endswith(f"/{optimizer}")))
        impls = _sorted({impl for case, impl in timed if case in cases})
        head = [f"{TITLES.get(optimizer, optimizer)}, ms (of bound, x {BASE})"]
        body = [[impl, *(_cell(values, case, impl) for case in cases)] for impl in impls]
        texts.append(markdown(head + [case.split("/")[0] for case in cases], body))
    return "\n".join(texts)


def _cell(values: Values, case: str, impl: str) -> str:
    ms = values.get((case, impl, "device_ms"))
    if ms is None:
        return ""
    share = _text(values, (case, impl, "bound_share"), ".0%")
    return f"{ms['value']:.2f} ({', '.join(filter(None, (share, _ratio(values, case, impl))))})"


def _details(values: Values) -> str:
    cases = dict.fromkeys(case for case, impl, _ in values if impl != "copy")
    body = []
    for case in cases:
        for impl in _sorted({i for c, i, _ in values if c == case and i != "copy"}):
            ms = values.get((case, impl, "device_ms"), {})
            spread = " to ".join(f"{t:.2f}" for t in ms.get("spread", ()))
            row = [case, impl, _text(values, (case, impl, "device_ms"), ".2f"), spread]
            row.append(f"{ms['wall_ms']:.1f}" if "wall_ms" in ms else "")
            row.append(_text(values, (case, impl, "bound_share"), ".0%"))
            row.append(_ratio(values, case, impl))
            row.append(_text(values, (case, impl, "temp_bytes"), ",.0f", 2.0**20))
            row.append(_text(values, (case, impl, "peak_bytes"), ",.0f", 2.0**20))
            row.append(_text(values, (case, impl, "compile_s"), ".1f"))
            body.append(row)
    head = ["case", "implementation", "ms", "spread", "wall ms", "of bound", f"x {BASE}"]
    return markdown([*head, "temp MiB", "peak MiB", "compile s"], body)


def _ratio(values: Values, case: str, impl: str) -> str:
    ms, base = (values.get((case, name, "device_ms")) for name in (impl, BASE))
    return f"{ms['value'] / base['value']:.2f} x" if ms and base else ""


def _text(values: Values, key: tuple[str, str, str], form: str, unit: float = 1.0) -> str:
    return format(values[key]["value"] / unit, form) if key in values else ""


def _sorted(impls: Iterable[str]) -> list[str]:
    """Ours first, then the peers."""

    def place(impl: str) -> tuple[int, str]:
        found = [i for i, start in enumerate(ORDER) if impl.startswith(start)]
        return (found[0] if found else len(ORDER)), impl

    return sorted(impls, key=place)


TABLES: dict[str, Callable[[Rows], str]] = {
    "cpu_step": Rendered(cpu_step, "step --leaf-set ten-million demo-gpt"),
    "cpu_compile": Rendered(cpu_compile, "compile"),
    "masters": Rendered(masters, "masters"),
    "gpu_step": gpu_step,
    "gpu_step_details": gpu_step_details,
}
