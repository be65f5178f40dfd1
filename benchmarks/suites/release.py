"""An 8B Llama on one GPU: with gradient release, without, and with optax.adamw in f32.

Each run is one of examples/train_llama.py in a process of its own. What does not fit is recorded
too. On a GPU, compiling is minutes shorter with
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false".
"""

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
        if preset.split()[0] == CASE and " batch=" not in preset:  # those are of `offload`
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
    body, used = [], []
    for name, own in runs(rows).items():
        of = records.grouped(own, "metric")
        cells = [cell(of.get(metric), *how) for metric, *how in columns.values()]
        body.append([name, "yes" if of["fits"]["value"] else "out of memory", *cells])
        used += own
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
    from benchmarks import style
    from benchmarks.style import plt

    found = runs(rows)
    if not found:
        raise SystemExit(f"no records of {CASE}: run release first")
    colors = (style.BLUE, style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.PALE)
    figure, axes = plt.subplots(figsize=(6.6, 1.7 + 0.7 * len(found)))
    limits, fits = [], {True: False, False: False}  # one of ours, optax's
    for name, own in found.items():
        of, start, label = records.grouped(own, "metric"), 0.0, name.replace("`", "")
        label = label.replace(", ", "\n")
        for part, size in parts(name, own).items():
            color = colors[PARTS.index(part)]
            axes.barh(label, size, left=start, color=color, height=0.62)
            if size > 6:  # wide enough for its number
                ink = "white" if part == "weights" else style.BLACK
                axes.text(start + size / 2, label, f"{size:.1f}", color=ink, va="center",
                          ha="center")  # fmt: skip
            start += size
        fits["optax" not in name] |= bool(of["fits"]["value"])
        total = f"{start:.1f}" + ("" if of["fits"]["value"] else "\ndoes not fit")
        axes.text(start + 1, label, total, va="center", weight="bold")
        limits += [row["value"] / GIB for row in own if row["metric"] == "limit_bytes"]
    for at in limits[-1:]:
        axes.axvline(at, color=style.BLACK, linewidth=1, linestyle="--", zorder=0)
        axes.text(at + 1, -0.1, f"{at:.0f} GiB: what JAX may use", va="center")
    names = [axes.bar(0, 0, color=color, label=part)
             for part, color in zip(PARTS, colors, strict=True)]  # fmt: skip
    figure.legend(handles=names, loc="outside lower center", ncols=3, handlelength=1)
    alone = fits[True] and not fits[False]
    says = "fits with 8-bit state, not with optax" if alone else "in memory"
    style.headline(figure, f"A training step of an 8B Llama {says}")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set(xlabel=f"GiB on one {own[0]['device']}", ylim=(len(found) - 0.25, -0.75))
    axes.set_xlim(0, 1.22 * max(bar.get_x() + bar.get_width() for bar in axes.patches))
    return figure


FIGURES = {"llama_8b_memory": lambda: draw(records.all_records())}
TABLES = {"release": Rendered(table, "release")}


def main(arguments: list[str] | None = None) -> None:
    parser = records.command_line(__doc__)
    parser.add_argument("--preset", default="8b", help="of the example (default: 8b)")
    parser.add_argument("--steps", type=int, default=12, help="of each run (default: 12)")
    args, failed = parser.parse_args(arguments), []
    stored = ["--record", *([] if args.record is True else [args.record])] if args.record else []
    for name, flags in RUNS.items():
        print(f"== {name}", flush=True)
        own = f"--preset {args.preset} --steps {args.steps} {flags}".split()
        command = [sys.executable, "-m", "benchmarks.account", *own, *stored]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed += [name] if code not in (FITS, OUT_OF_MEMORY) else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
