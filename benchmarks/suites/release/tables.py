"""The table and the picture of the runs of release, from their records."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import ROOT, model_shapes
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table

PICTURE = ROOT / "docs/figures/llama_8b_memory.png"
CASE = "llama-8b"
GIB = 2.0**30
_COLOURS = {
    "weights": "#2f4b7c",
    "correction": "#b9c6de",
    "mu": "#f28e2b",
    "nu": "#59a14f",
    "gradients and update": "#b07aa1",
    "forward and backward": "#d5d9df",
}


def runs(rows: Rows) -> dict[str, Rows]:
    """The newest records of each run, by what it is called."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        preset, _, optimizer = row["case"].partition("/")
        if row["bench"] == "train" and preset.split()[0] == CASE:
            released = row["flags"]["release"]
            name = f"`{optimizer}`" + (", gradient release" if released else "")
            found.setdefault(name, {})[row["metric"]] = row

    def size(name: str) -> float:
        value = {metric: row["value"] for metric, row in found[name].items()}
        return value.get("beside_backward", value["bytes_per_param"])

    order = sorted(found, key=size)
    return {name: list(found[name].values()) for name in order}


def table(rows: Rows) -> Table:
    """Head, body, and the records they rest on."""
    head = [
        "Llama-3.1-8B, one GPU", "fits", "weights and state, bytes/param", "GiB", "beside it, GiB",
        "forward and backward alone, GiB", "all but that, bytes/param", "peak GiB", "ms a step",
    ]  # fmt: skip
    body, used = [], []
    for name, own in runs(rows).items():
        value = {row["metric"]: row["value"] for row in own}
        used += own

        def shown(metric: str, digits: int, unit: float = 1.0, value: dict = value) -> str:
            return f"{value[metric] / unit:.{digits}f}" if metric in value else ""

        body.append([
            name,
            "yes" if value["fits"] else "out of memory",
            shown("bytes_per_param", 2),
            shown("device_bytes", 1, GIB),
            shown("temporary_bytes", 1, GIB),
            shown("backward_bytes", 1, GIB),
            shown("beside_backward", 2),
            shown("peak_bytes", 1, GIB),
            shown("step_ms", 0),
        ])  # fmt: skip
    return head, body, used


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
    return {slot: size / GIB for slot, size in slots.items() if slot in _COLOURS}


def draw(rows: Rows, file: Path = PICTURE) -> None:
    """A bar a run, of its parts, and what the device has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = runs(rows)
    if not found:
        raise SystemExit(f"no records of {CASE}: run release first")
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.75 * len(found)), layout="constrained")
    for name, own in found.items():
        start, label = 0.0, name.replace("`", "").replace(", ", "\n")
        for part, size in parts(name, own).items():
            axes.barh(label, size, left=start, color=_COLOURS[part], height=0.62)
            if size > 3:
                ink = "white" if part == "weights" else "#22272e"
                where = (start + size / 2, label)
                axes.text(*where, f"{size:.1f}", ha="center", va="center", size=9, color=ink)
            start += size
        fits = next(row["value"] for row in own if row["metric"] == "fits")
        total = f"{start:.1f} GiB" + ("" if fits else ": out of memory")
        axes.text(start + 1, label, total, va="center", weight="bold", size=9.5)
    limits = [
        row["value"] for own in found.values() for row in own if row["metric"] == "limit_bytes"
    ]
    if limits:
        axes.axvline(limits[-1] / GIB, color="#22272e", linewidth=1, linestyle="--", zorder=0)
        at = limits[-1] / GIB
        axes.text(at + 1, -0.35, f"{at:.0f} GiB that JAX may take", size=9, va="center")
    device = next(iter(found.values()))[0]["device"]
    axes.set_title(f"One training step of an 8B Llama on one {device}", loc="left", weight="bold")
    axes.set_xlabel("GiB")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    axes.legend(patches, _COLOURS, loc="upper right", frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, facecolor="white")
    plt.close(figure)


TABLES = {"release": Rendered(table, "release")}
