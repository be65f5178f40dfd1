"""Tables of the step benchmark."""

from collections.abc import Iterable
from typing import Any

from benchmarks.records import Rows, by_gpu, gpu_name, grouped, on_gpus, select
from benchmarks.render import Rendered, Table, cell

BASE = "optax-f32"
UPDATE = "lowmem.update"
ORDER = ("lowmem", "optax", "flashoptim", "torch", "bitsandbytes")  # of implementations' names
TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
# columns of `gpu_step`, and what it shows of optimizers other than AdamW
SHOWN = (("H100", "llama-3.2-1b"), ("H100", "gpt2-124m"), ("H200", "llama-3.2-1b"))
OF_OTHERS = ("lowmem.step", "lowmem.step-4bit", "flashoptim")
AGAIN = "lowmem.step-stochastic"  # the default, measured once more
MIB = 2.0**20


def cpu_step(rows: Rows) -> Table:
    """A line for each case and JAX: times of a step and of its compilation, and x optax's."""
    found = [r for r in select(rows, bench="step") if r["device"].startswith("cpu")]
    body = []
    for (case, version), of in grouped(_with_place(found), "place", "impl", "metric").items():
        base, ours, nearest = (of.get(impl, {}) for impl in (BASE, UPDATE, f"{UPDATE}-nearest"))
        times = (ours.get("device_ms"), nearest.get("device_ms"), ours.get("compile_s"))
        body.append([case, version, cell(base.get("device_ms"), "{:.1f} ms"), *map(_times, times)])
    head = ["case", "jax", "step, `optax` in f32", "ours", "ours, codes to nearest", "compilation"]
    return head, body, found


def _with_place(rows: Rows) -> Rows:
    return [row | {"place": (row["case"], row["jax"])} for row in rows]


def _times(row: dict[str, Any] | None) -> str:
    """A time of ours, and relative to optax's."""
    return f"{row['value']:.1f} {row['unit']} ({row['ratio_to_optax']:.2f} x)" if row else ""


def cpu_compile(rows: Rows) -> Table:
    """CPU time and temporaries of compiling steps of many leaves."""
    found, body = select(rows, bench="compile"), []
    for (case, version), of in sorted(
        grouped(_with_place(found), "place", "impl", "metric").items()
    ):
        ms = [cell(of.get(impl, {}).get("cpu_ms_per_leaf"), "{:.1f} ms")
              for impl in ("optax.adamw", "lowmem.step")]  # fmt: skip
        size = cell(of.get("lowmem.step", {}).get("temp_bytes"), "{:.2f} MiB", MIB)
        body.append([case, version, *ms, size])
    return ["leaves", "jax", "`optax.adamw`", "`lowmem.step`", "its temporaries"], body, found


def call(rows: Rows) -> Table:
    found, body = select(rows, bench="call"), []
    for of_cases in grouped(found, "device", "case", "impl", "metric").values():
        for case, of_impls in of_cases.items():
            base = of_impls["optax.adamw"]["host_ms"]["value"]
            for impl, of in of_impls.items():
                ms = of["host_ms"]
                cells = cell(of["arrays"], "{:,.0f}"), cell(ms, "{:.1f} ms")
                gpu = gpu_name(ms)
                body.append([gpu, case, impl, *cells, cell(ms, "{:.2f} x", base)])
    return ["host of", "leaves", "step", "arrays in and out", "a call", "x optax"], body, found


def gpu_step(rows: Rows) -> Table:
    """A line for each optimizer and implementation; a cell has ms, of bound, and x optax-f32."""
    every = select(on_gpus(rows), bench="step")
    gpus = {gpu: grouped(own, "case", "impl", "metric") for gpu, own in by_gpu(every).items()}
    shown = [(gpu, model) for gpu, model in SHOWN if gpu in gpus]
    body, used = [], []
    for optimizer in dict.fromkeys(row["case"].split("/")[-1] for row in every):
        found = [gpus[gpu].get(f"{model}/{optimizer}", {}) for gpu, model in shown]
        impls = {impl for of in found for impl in of if optimizer == "adamw" or impl in OF_OTHERS}
        for impl in _sorted(impls - {AGAIN}):
            cells = []
            for of_case in found:
                of, base = of_case.get(impl, {}), of_case.get(BASE, {}).get("device_ms")
                ms, share = of.get("device_ms"), of.get("bound_share")
                ratio = cell(ms, "{:.2f} x", base["value"]) if base else ""
                more = ", ".join(filter(None, (cell(share, "{:.0%}"), ratio)))
                cells.append(cell(ms, f"{{:.2f}} ({more})"))
                used += [row for row in (ms, share, base) if row and ms]
            body += [[TITLES.get(optimizer, f"`{optimizer}`"), impl, *cells]] if any(cells) else []
    return ["optimizer", "implementation", *(", ".join(one) for one in shown)], body, used


def _sorted(impls: Iterable[str]) -> list[str]:
    """Ours first, then the peers."""

    def place(impl: str) -> tuple[int, str]:
        return next((i for i, start in enumerate(ORDER) if impl.startswith(start)), 9), impl

    return sorted(impls, key=place)


TABLES = {
    "cpu_step": Rendered(cpu_step, "step --leaf-set ten-million demo-gpt"),
    "cpu_compile": Rendered(cpu_compile, "compile"),
    "call": Rendered(call, "call"),
    "gpu_step": Rendered(gpu_step, "step --leaf-set llama-3.2-1b gpt2-124m"),
}
