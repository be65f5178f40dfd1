"""Memory of a Llama's training step on n GPUs, compiled for H100s that are not there.

JAX_PLATFORMS=cpu python -m benchmarks.run scaling_memory --record    # jax[cuda12], and no GPU
JAX_PLATFORMS=cpu python -m benchmarks.run scaling_memory --preset 8b --batch 4 --devices 4 8

Steps of examples/train_llama.py as `scaling` runs them; `benchmarks.absent_gpu` says how they are
compiled.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import train_llama
from _gpt.train import planned_bytes
from _llama import mesh, train
from _llama.config import DOTS, FULL, NONE, PRESETS

from benchmarks import absent_gpu, records
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.mesh.scaling import IMPLEMENTATIONS, LAYOUTS, NAMES

REMAT = {NONE: "no", DOTS: "all but products", FULL: "yes"}


def measure(words: list[str], devices: int) -> dict[str, Any]:
    """Bytes of a device: weights and state, and a step; and what is computed anew."""
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
    remat={"default": "auto", "help": "of the example"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    of = itertools.product(args.preset, args.layout, args.impl, args.devices)
    for preset, layout, impl, devices in of:
        each = args.batch or PRESETS[preset].batch
        words = f"--preset {preset} {IMPLEMENTATIONS[impl]} --batch {devices * each}"
        words += f" --remat {args.remat} {LAYOUTS[layout](devices)}"
        found = measure(words.split(), devices)
        remat = found.pop("remat")
        case = f"llama-{preset} {layout}={devices} batch={devices * each} remat={remat}"
        yield records.records_of(
            "scaling_memory", case, impl, {name: (size, "bytes") for name, size in found.items()},
            model=f"llama-{preset}", layout=layout, devices=devices, each=each, remat=remat,
            device=records.H100_NEVER_RUN,
        )  # fmt: skip


def table(rows: records.Rows) -> Table:
    """GiB of a device as compiled, and the peaks of `scaling` where it has run."""
    peaks = {
        (row["model"], row["run"]["batch"], row["layout"], row["devices"], row["impl"]): row
        for row in records.on_gpus(records.select(rows, bench="scaling", metric="peak_bytes"))
    }
    used, body = records.select(rows, bench="scaling_memory"), []
    for row in records.select(used, metric="compiled_bytes"):
        of = {name: row[name] for name in ("case", "impl")}
        (state,) = records.select(used, metric="device_bytes", **of)
        model, layout, devices, impl = (row[k] for k in ("model", "layout", "devices", "impl"))
        peak = peaks.get((model, row["each"] * devices, layout, devices, impl))
        body.append([
            model, str(row["each"]), f"`{impl}`", "" if devices == 1 else NAMES[layout],
            str(devices), REMAT[row["remat"]], *(cell(of, "{:.1f}", GIB) for of in (state, row, peak)),
        ])  # fmt: skip
    head = (
        "model, batch per device, implementation, layout, devices, layers computed again, weights "
    )
    head += "and state, GiB per device, step compiled, step measured"
    return head.split(", "), body, used


TABLES = {"scaling_memory": Rendered(table, "scaling_memory")}
