"""Tables of the step benchmark."""

from collections.abc import Iterable

from benchmarks.records import Rows, by_gpu, grouped, on_gpus, select
from benchmarks.render import Rendered, Table, cell

BASE = "optax-f32"
ORDER = ("lowmem", "optax", "flashoptim", "torch", "bitsandbytes")  # of implementations' names
TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
# columns of `gpu_step`, and what it shows of optimizers other than AdamW
SHOWN = (("H100", "llama-3.2-1b"), ("H100", "gpt2-124m"), ("H200", "llama-3.2-1b"))
OF_OTHERS = (
    "lowmem.step", "lowmem.step-nearest", "lowmem.step-triton", "lowmem.step-4bit", "flashoptim",
)  # fmt: skip
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


def gpu_step(rows: Rows) -> Table:
    """A line for each optimizer and implementation; a cell has ms, of bound, and x optax-f32."""
    every = select(on_gpus(rows), bench="step")
    gpus = {gpu: grouped(own, "case", "impl", "metric") for gpu, own in by_gpu(every).items()}
    shown = [(gpu, model) for gpu, model in SHOWN if gpu in gpus]
    body, used = [], []
    for optimizer in dict.fromkeys(row["case"].split("/")[-1] for row in every):
        found = [gpus[gpu].get(f"{model}/{optimizer}", {}) for gpu, model in shown]
        impls = {impl for of in found for impl in of if optimizer == "adamw" or impl in OF_OTHERS}
        for impl in _sorted(impls):
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
