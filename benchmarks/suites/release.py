"""An 8B Llama on one GPU: with gradient release, without, and with optax.adamw in f32.

python -m benchmarks.run release --record FILE                  # on a GPU of 80 GB
python -m benchmarks.figures llama_8b_memory                    # the picture, from the records

Each run is one of examples/train_llama.py in a process of its own. What does not fit is recorded
too. On a GPU, compiling is minutes shorter with
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false".
"""

import argparse
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import ROOT, model_shapes, records
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table, cell

# name -> what differs
RUNS = {
    "release": "--optimizer flash_adamw --release",
    "ordinary": "--optimizer flash_adamw --clip 0",
    "optax": "--optimizer optax.adamw --clip 0",
}
FITS, OUT_OF_MEMORY = 0, 3  # exit codes
CASE = "llama-8b"
PARTS = ("weights", "correction", "mu", "nu", "gradients and update", "forward and backward")


def runs(rows: Rows) -> dict[str, Rows]:
    """The newest records of each run, by what it is called; what takes least first."""
    found: dict[str, dict[str, dict]] = {}
    for row in records.select(rows, bench="train"):
        preset, _, optimizer = row["case"].partition("/")
        if preset.split()[0] == CASE:
            released = ", gradient release" if row["flags"]["release"] else ""
            found.setdefault(f"`{optimizer}`{released}", {})[row["metric"]] = row

    def size(name: str) -> float:
        of = found[name]
        return of.get("beside_backward", of["bytes_per_param"])["value"]

    return {name: list(found[name].values()) for name in sorted(found, key=size)}


def table(rows: Rows) -> Table:
    columns = {
        "weights and state, bytes/param": ("bytes_per_param", "{:.2f}", 1.0),
        "GiB": ("device_bytes", "{:.1f}", GIB),
        "beside it, GiB": ("temporary_bytes", "{:.1f}", GIB),
        "forward and backward alone, GiB": ("backward_bytes", "{:.1f}", GIB),
        "all but that, bytes/param": ("beside_backward", "{:.2f}", 1.0),
        "peak GiB": ("peak_bytes", "{:.1f}", GIB),
        "ms per step": ("step_ms", "{:.0f}", 1.0),
    }
    found = runs(rows)
    body = []
    for name, own in found.items():
        of = records.grouped(own, "metric")
        fits = "yes" if of["fits"]["value"] else "out of memory"
        cells = [cell(of.get(metric), *how) for metric, *how in columns.values()]
        body.append([name, fits, *cells])
    used = [row for own in found.values() for row in own]
    return ["Llama-3.1-8B, one GPU", "fits", *columns], body, used


def parts(name: str, own: Rows) -> dict[str, float]:
    """GiB of each part of a step; without what was not planned."""
    plain = "optax" in name
    tx = optax.adamw(1e-3) if plain else lowmem.flash_adamw(1e-3)
    like = model_shapes.llama_3_1_8b(jnp.float32 if plain else jnp.bfloat16)
    report = lowmem.memory.report(tx, like)
    slots = {"weights": report.params_bytes}
    for slot, size in report.by_slot.items():
        slots[slot.removesuffix("_scale")] = slots.get(slot.removesuffix("_scale"), 0) + size
    value = {row["metric"]: row["value"] for row in own}
    if "backward_bytes" in value:
        whole = value["argument_bytes"] + value["temporary_bytes"]
        slots["gradients and update"] = whole - value["backward_bytes"] - sum(slots.values())
        slots["forward and backward"] = value["backward_bytes"]
    return {slot: size / GIB for slot, size in slots.items() if slot in PARTS}


def draw(rows: Rows) -> Any:
    """Draw a bar for each run, of its parts, and what the device has."""
    from benchmarks import style
    from benchmarks.style import plt

    found = runs(rows)
    if not found:
        raise SystemExit(f"no records of {CASE}: run release first")
    colors = dict(zip(PARTS, (style.BLUE, style.SKY, style.ORANGE, style.GREEN, style.PURPLE,
                              style.PALE), strict=True))  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.62 * len(found)))
    every = [row for own in found.values() for row in own]
    fitting = {}
    for name, own in found.items():
        start, label = 0.0, name.replace("`", "").replace(", ", "\n")
        for part, size in parts(name, own).items():
            axes.barh(label, size, left=start, color=colors[part], height=0.62)
            middle = (start + size / 2, label)
            if size > 3:
                ink = "white" if part == "weights" else style.BLACK
                axes.text(*middle, f"{size:.1f}", ha="center", va="center", size=8, color=ink)
            if name == list(found)[-1] and size > 3:  # the largest has room for names
                words, under = part.replace(" and ", "\nand "), (0, -17)
                axes.annotate(words, middle, under, ha="center", va="top", size=8,
                              textcoords="offset points")  # fmt: skip
            elif part == "correction" and name == next(iter(found)):
                axes.annotate(
                    part, middle, (0, 17), ha="center", textcoords="offset points", size=8
                )
            start += size
        fitting[name] = bool(next(row["value"] for row in own if row["metric"] == "fits"))
        total = f"{start:.1f} GiB" + ("" if fitting[name] else ": out of memory")
        axes.text(start + 1, label, total, va="center", weight="bold", size=9)
    for limit in [row["value"] / GIB for row in every if row["metric"] == "limit_bytes"][-1:]:
        axes.axvline(limit, color=style.BLACK, linewidth=1, linestyle="--", zorder=0)
        axes.text(limit + 1, -0.1, f"{limit:.0f} GiB that JAX may take", size=8, va="center")
    ours = any(fits for name, fits in fitting.items() if "optax" not in name)
    theirs = any(fits for name, fits in fitting.items() if "optax" in name)
    says = "fits with 8-bit state, not with optax.adamw" if ours and not theirs else "in memory"
    style.headline(figure, f"A training step of an 8B Llama {says}")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set(xlabel=f"GiB on one {every[0]['device']}", ylim=(len(found) - 0.25, -0.75))
    axes.margins(x=0.2)
    return figure


FIGURES = {"llama_8b_memory": lambda: draw(records.all_records())}
TABLES = {"release": Rendered(table, "release")}


def command(name: str, args: argparse.Namespace) -> list[str]:
    own = f"--preset {args.preset} --steps {args.steps} --account {RUNS[name]}".split()
    if args.record:
        own += ["--record", *([] if args.record is True else [args.record])]
    return [sys.executable, str(ROOT / "examples/train_llama.py"), *own]


def main(arguments: list[str] | None = None) -> None:
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--preset", default="8b", help="of the example (default: 8b)")
    add("--steps", type=int, default=12, help="of each run (default: 12)")
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="default: all")
    args = parser.parse_args(arguments)
    failed = []
    for name in args.runs:
        print(f"== {name}", flush=True)
        code = subprocess.run(command(name, args), cwd=ROOT, check=False).returncode
        failed += [name] if code not in (FITS, OUT_OF_MEMORY) else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
