"""Tables of the step benchmark, and its targets on each GPU, for benchmarks.tables."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks.peers import cases
from benchmarks.records import Rows, alike, grouped, newest, on_gpus, select
from benchmarks.render import Rendered, Table, by_machine, cell, markdown, source, target

Values = dict[str, Any]  # case -> implementation -> metric -> record

BASE = "optax-f32"
OURS, UPDATE, FLASHOPTIM = "lowmem.step", "lowmem.update", "flashoptim"
TRITON, NEAREST = "lowmem.step-triton", "lowmem.step-nearest"
ORDER = ("lowmem", "optax", "flashoptim", "torch", "bitsandbytes")  # of implementations' names
TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
GPUS = ("NVIDIA H100", "NVIDIA H200")  # of the targets, each with its own limits
LLAMA, GPT2, ONE = "llama-3.2-1b", "gpt2-124m", "one-16384"
MIB = 2.0**20


def cpu_step(rows: Rows) -> Table:
    found = [r for r in select(rows, bench="step") if r["device"].startswith("cpu")]
    kinds = {"device_ms": "step", "compile_s": "compilation"}
    body = [
        [r["case"], r["impl"], r["jax"], kinds[r["metric"]], f"{r['value']:.1f} {r['unit']}",
         f"{r['ratio_to_optax']:.2f}"]
        for r in found
    ]  # fmt: skip
    return ["case", "implementation", "jax", "of", "time", "x optax"], body, found


def cpu_compile(rows: Rows) -> Table:
    """CPU time and temporaries of compiling steps of many leaves."""
    found, body = select(rows, bench="compile"), []
    for case, impl, version in dict.fromkeys((r["case"], r["impl"], r["jax"]) for r in found):
        of = grouped(select(found, case=case, impl=impl, jax=version), "metric")
        ms, size = of["cpu_ms_per_leaf"], of["temp_bytes"]
        body.append([case, impl, version, cell(ms, "{:.1f} ms"), cell(size, "{:.2f} MiB", MIB)])
    return ["leaves", "step", "jax", "CPU time a leaf", "temporaries"], body, found


def call(rows: Rows) -> Table:
    found, body = select(rows, bench="call"), []
    for device, of_cases in grouped(found, "device", "case", "impl", "metric").items():
        for case, of_impls in of_cases.items():
            base = of_impls["optax.adamw"]["host_ms"]["value"]
            for impl, of in of_impls.items():
                ms = of["host_ms"]
                cells = cell(of["arrays"], "{:,.0f}"), cell(ms, "{:.1f} ms")
                body.append([device, case, impl, *cells, cell(ms, "{:.2f} x", base)])
    return ["host of", "leaves", "step", "arrays in and out", "a call", "x optax"], body, found


def launches(rows: Rows) -> Table:
    found = select(rows, bench="launches")
    body = [
        [case.split("/")[1], cell(of["launches"], "{:.0f}"),
         cell(of["moved_bytes_per_param"], "{:.2f}")]
        for case, of in grouped(found, "case", "metric").items()
    ]  # fmt: skip
    head = ["a step of Llama-3.2-1B", "launches", "bytes per parameter, read and written"]
    return head, body, found


def gpu_step(rows: Rows) -> str:
    """For each optimizer, implementations by leaf sets: milliseconds, of the bound, x optax-f32."""
    return by_machine(on_gpus(newest(rows, bench="step")), lambda own: _page(own, _summaries))


def gpu_step_details(rows: Rows) -> str:
    """Everything that was measured of each case and implementation, a line each."""
    return by_machine(on_gpus(newest(rows, bench="step")), lambda own: _page(own, _details))


def _page(rows: Rows, write: Callable[[Values], str]) -> str:
    """The tables of a machine's records, where they are from, and what a copy moves there."""
    timed = [row for row in rows if row["metric"] != "copy_tbps"]
    text = write(grouped(timed, "case", "impl", "metric")) + source(rows)
    rates = sorted(f"{r['value']:.2f}" for r in rows if r["metric"] == "copy_tbps")
    span = " to ".join(dict.fromkeys(rates[:1] + rates[-1:]))
    return f"{text}A copy moves {span} TB/s, read and written.\n" if rates else text


def _summaries(values: Values) -> str:
    texts = []
    for optimizer in dict.fromkeys(case.split("/")[1] for case in values):
        found = {case: of for case, of in values.items() if case.endswith(f"/{optimizer}")}

        def shown(of_case: Values, impl: str) -> str:
            of = of_case.get(impl, {})
            share = cell(of.get("bound_share"), "{:.0%}"), _ratio(of_case, impl)
            return cell(of.get("device_ms"), f"{{:.2f}} ({', '.join(filter(None, share))})")

        head = [f"{TITLES.get(optimizer, optimizer)}, ms (of bound, x {BASE})"]
        body = [[impl, *(shown(of, impl) for of in found.values())]
                for impl in _sorted({impl for of in found.values() for impl in of})]  # fmt: skip
        texts.append(markdown(head + [case.split("/")[0] for case in found], body))
    return "\n".join(texts)


def _details(values: Values) -> str:
    body = []
    for case, of_case in values.items():
        for impl in _sorted(of_case):
            of = of_case[impl]
            ms = of.get("device_ms", {})
            body.append([
                case, impl, cell(ms, "{:.2f}"),
                " to ".join(f"{t:.2f}" for t in ms.get("spread", ())),
                f"{ms['wall_ms']:.1f}" if "wall_ms" in ms else "",
                cell(of.get("bound_share"), "{:.0%}"), _ratio(of_case, impl),
                cell(of.get("temp_bytes"), "{:,.0f}", MIB),
                cell(of.get("peak_bytes"), "{:,.0f}", MIB), cell(of.get("compile_s"), "{:.1f}"),
            ])  # fmt: skip
    head = ["case", "implementation", "ms", "spread", "wall ms", "of bound", f"x {BASE}"]
    return markdown([*head, "temp MiB", "peak MiB", "compile s"], body)


def _ratio(of_case: Values, impl: str) -> str:
    base = of_case.get(BASE, {}).get("device_ms")
    return cell(of_case.get(impl, {}).get("device_ms"), "{:.2f} x", base["value"]) if base else ""


def _sorted(impls: Iterable[str]) -> list[str]:
    """Ours first, then the peers."""

    def place(impl: str) -> tuple[int, str]:
        return next((i for i, start in enumerate(ORDER) if impl.startswith(start)), 9), impl

    return sorted(impls, key=place)


Value = Callable[..., float]  # of a record: (case, implementation, metric, field="value")
Measure = Callable[[Value], float]
Limits = tuple[float | None, float | None]  # of `GPUS`; None where nothing was asked


def _of(case: str, metric: str, impl: str = OURS, unit: float = 1.0) -> Measure:
    return lambda value: value(case, impl, metric) / unit


def _times(case: str, slower: str, faster: str, metric: str = "device_ms") -> Measure:
    return lambda value: value(case, slower, metric) / value(case, faster, metric)


def targets() -> list[tuple[str, str, Limits, Measure]]:
    """All of them: of what, how they are printed, the limits, and the measure."""
    llama, gpt2, bound, step = f"{LLAMA}/adamw", f"{GPT2}/adamw", "bound_share", "device_ms"
    largest = max(leaf.size for leaf in jax.tree.leaves(cases.LEAF_SETS[LLAMA]()))
    share, times, temp = "≥ {:.1%}", "≤ {:.2f} x", "temp_bytes"

    def peak(value: Value) -> float:
        live = value(llama, OURS, "peak_bytes", "live_bytes")
        return value(llama, OURS, "peak_bytes") / live - 1

    found: list[tuple[str, str, Limits, Measure]] = [
        ("Llama-3.2-1B, AdamW, a step", "≤ {:.2f} ms", (5.8, 4.45), _of(llama, step)),
        ("the same, of its byte bound", share, (0.90, 0.82), _of(llama, bound)),
        ("codes rounded to nearest, of the bound", share, (None, 0.90), _of(llama, bound, NEAREST)),
        ("times faster than flashoptim", "≥ {:.2f} x", (1.9, None),
         _times(llama, FLASHOPTIM, OURS)),
        ("times faster than optax in f32", "≥ {:.2f} x", (2.0, 1.9), _times(llama, BASE, OURS)),
        ("GPT-2 124M, AdamW, a step", "≤ {:.2f} ms", (0.95, 0.52), _of(gpt2, step)),
        ("one leaf of 16384 x 16384, of the bound", share, (0.95, 0.93),
         _of(f"{ONE}/adamw", bound)),
        ("Llama-3.2-1B, Lion, of the bound", share, (0.90, 0.92), _of(f"{LLAMA}/lion", bound)),
        ("Llama-3.2-1B, SGD, of the bound", share, (0.90, 0.92), _of(f"{LLAMA}/sgd", bound)),
        ("Llama-3.2-1B, AdamW, `update` and `apply_updates`", "≤ {:.2f} ms", (8.5, None),
         _of(llama, step, UPDATE)),
        ("its temporaries, bytes per parameter of the largest leaf", "≤ {:.2f}", (4.0, 4.0),
         _of(llama, temp, UPDATE, largest)),
        ("temporaries of the step, MB", "≤ {:.2f}", (1.0, 1.0), _of(llama, temp, unit=1e6)),
        ("peak over weights, state and gradients", "≤ {:.2%}", (0.01, 0.01), peak),
        ("compile time, times optax's", times, (2.0, 2.0), _times(llama, OURS, BASE, "compile_s")),
        ("GPT-2 124M, the same", times, (2.0, 2.0), _times(gpt2, OURS, BASE, "compile_s")),
        ("Llama-3.2-1B, coat_adamw, of the bound", share, (0.80, 0.60),
         _of(f"{LLAMA}/coat_adamw", bound)),
    ]  # fmt: skip
    for name, limits in (("q_adam_mini", (0.85, None)), ("flash_adam_mini", (0.85, 0.82))):
        case = f"{LLAMA}/{name}"  # the gradient counts twice where a block spans rows
        found += [
            (f"Llama-3.2-1B, {name}, of the bound", share, limits, _of(case, bound)),
            ("its time, times flash_adamw's", "≤ {:.3f} x", (1.0, None),
             lambda value, case=case: value(case, OURS, step) / value(llama, OURS, step)),
            ("stochastic rounding, times nearest (Q-Adam-mini's Table 5: 1.88 x)", times,
             (1.1, None), _times(case, f"{OURS}-stochastic", f"{OURS}-nearest")),
        ]  # fmt: skip
    return found


def _reached(known: Values, triton: bool, asked: str, limit: float, measure: Measure) -> str:
    """Return what a GPU's records have of the step, and whether that reaches the limit."""

    def value(case: str, impl: str, metric: str, field: str = "value") -> float:
        if triton and (impl == UPDATE or impl.startswith(f"{OURS}-")):
            raise KeyError(impl)  # which are of the default backend alone
        return known[case][TRITON if triton and impl == OURS else impl][metric][field]

    try:
        _, _, text, reached = target("", asked, limit, measure(value))
    except KeyError:
        return "not measured"
    return f"{text}, {reached}"


def gpu_targets(rows: Rows) -> str:
    """Asked of each GPU, found by either backend, and whether that reaches it."""
    every = newest(on_gpus(rows), bench="step")
    found = [alike([r for r in every if r["device"].startswith(gpu)], "jax") for gpu in GPUS]
    values, body = [grouped(own, "case", "impl", "metric") for own in found], []
    for what, asked, limits, measure in targets():
        line = [what]
        for limit, known in zip(limits, values, strict=True):
            line += [""] * 3 if limit is None else [asked.format(limit), *(
                _reached(known, triton, asked, limit, measure) for triton in (False, True)
            )]  # fmt: skip
        body.append(line)
    head = ["AdamW with default storage"]
    for gpu in GPUS:
        head += [f"asked on an {gpu.removeprefix('NVIDIA ')}", "Pallas", "generated Triton"]
    used = [row for own in found for row in own]
    return markdown(head, body) + (source(used) if used else "")


TABLES: dict[str, Callable[[Rows], str]] = {
    "cpu_step": Rendered(cpu_step, "step --leaf-set ten-million demo-gpt"),
    "cpu_compile": Rendered(cpu_compile, "compile"),
} | {
    make.__name__: Rendered(make, make.__name__)
    for make in (call, launches)
} | {make.__name__: make for make in (gpu_step, gpu_step_details, gpu_targets)}  # fmt: skip
