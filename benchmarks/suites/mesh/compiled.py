"""Memory of a Llama's training step on n GPUs, compiled for H100s that are not there.

JAX_PLATFORMS=cpu python -m benchmarks.run scaling_memory --record    # jax[cuda12], and no GPU
JAX_PLATFORMS=cpu python -m benchmarks.run scaling_memory --preset 8b --batch 4 --devices 4 8

Steps of examples/train_llama.py as `scaling` runs them; `benchmarks.absent_gpu` says how they are
compiled.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import train_llama
from _gpt.train import planned_bytes
from _llama import mesh, train
from _llama.config import FULL, PRESETS

from benchmarks import absent_gpu, records
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.mesh.scaling import IMPLEMENTATIONS, LAYOUTS, NAMES, jobs, words_of

MEASURED = "NVIDIA H200"
AGAIN = "*"  # behind a size: layers are computed again


def measure(words: list[str], devices: int) -> dict[str, Any]:
    """Return bytes per device, of weights and state and of a step, and the rematerialization."""
    on = absent_gpu.mesh(devices)
    with absent_gpu.present(on), absent_gpu.cudnn():
        settings = train_llama.make_settings(train_llama.parse_arguments(words))
        with jax.sharding.use_abstract_mesh(mesh.make_mesh(settings).abstract_mesh):
            program = train.make_program(settings)
            step = absent_gpu.build(program.step, *program.like, program.tokens)
    return {
        "device_bytes": program.device_bytes,
        "compiled_bytes": planned_bytes(step),
        "remat": program.settings.remat,
    }


@records.suite(
    preset={"nargs": "+", "choices": PRESETS, "default": ("1b",), "help": "of the example"},
    layout={"nargs": "+", "choices": LAYOUTS, "default": ("fsdp",)},
    impl={"nargs": "+", "choices": IMPLEMENTATIONS, "default": tuple(IMPLEMENTATIONS)},
    devices={"nargs": "+", "type": int, "default": (8,), "metavar": "N"},
    batch={"type": int, "help": "sequences per device; default: the preset's"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    args.flags = ["default"]
    for job in jobs(args):
        each = args.batch or PRESETS[job.preset].batch
        batch = job.devices * each
        result = measure(words_of(job, batch), job.devices)
        remat = result.pop("remat")
        yield records.records_of(
            "scaling_memory", f"llama-{job.preset} {job.layout}={job.devices} batch={batch}",
            job.impl, {name: (size, "bytes") for name, size in result.items()},
            model=f"llama-{job.preset}", layout=job.layout, devices=job.devices, each=each,
            remat=remat, device=records.H100_NEVER_RUN,
        )  # fmt: skip


def table(rows: records.Rows) -> Table:
    """GiB per device as compiled, and as `scaling` measured them, by devices and layout."""
    every = records.select(rows, bench="scaling", metric="peak_bytes", device=MEASURED)
    peaks = {
        (r["model"], r["run"]["batch"], r["layout"], r["devices"], r["impl"]): r for r in every
    }
    found, lines = records.select(rows, bench="scaling_memory", metric="compiled_bytes"), {}
    used, columns = [], sorted({(row["devices"], row["layout"]) for row in found})
    for row in found:
        model, each, layout, devices = (row[k] for k in ("model", "each", "layout", "devices"))
        peak = peaks.get((model, each * devices, layout, devices, row["impl"]))
        again = f" {AGAIN}" if row["remat"] == FULL else ""
        text = cell(row, "{:.1f}", GIB) + cell(peak, " ({:.1f})", GIB) + again
        lines.setdefault((model, str(each), f"`{row['impl']}`"), {})[devices, layout] = text
        used += filter(None, (row, peak))
    body = [[*line, *(of.get(column, "") for column in columns)] for line, of in lines.items()]
    names = ["1 GPU" if n == 1 else f"{n}, {NAMES[layout]}" for n, layout in columns]
    return ["model", "batch per device", "implementation", *names], body, used


TABLES = {"scaling_memory": Rendered(table, "scaling_memory")}
