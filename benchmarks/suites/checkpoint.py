"""Bytes of a checkpoint (Llama-2-7B from its shapes; files on disk), and what its checksums cost.

JAX_PLATFORMS=cpu python -m benchmarks.run checkpoint --record
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes, records
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table
from optax_lowmem._src.checkpoint import checksums

PAPER = lowmem.flash_adamw(1e-3, storage=lowmem.Storage.paper())
SHAPES, FILE = "llama-2-7b/adamw", "normal/adamw"
REPEATS = 21  # of timed saves
# implementation -> (optimizer, dtype of the weights)
VARIANTS: dict[str, tuple[optax.GradientTransformation, Any]] = {
    "optax-f32": (optax.adamw(1e-3), jnp.float32),
    "lowmem": (lowmem.flash_adamw(1e-3), jnp.bfloat16),
    "lowmem, paper's storage": (PAPER, jnp.bfloat16),
}


def llama_2_7b(dtype: Any) -> dict:
    """6,738,415,616 parameters."""
    return model_shapes.llama(
        dtype, layers=32, width=4096, hidden=11008, kv=4096, vocab=32000, tied=False
    )


def from_shapes(impl: str) -> float:
    """Bytes per parameter of what is saved of Llama-2-7B; none is allocated."""
    tx, dtype = VARIANTS[impl]
    params = llama_2_7b(dtype)
    described = lowmem.checkpoint.metadata(tx, params)
    arrays = [*described["params"].values(), *described["state"].values()]
    size = sum(math.prod(shape) * jnp.dtype(kind).itemsize for kind, shape in arrays)
    return size / sum(leaf.size for leaf in jax.tree.leaves(params))


def trained(impl: str, parameters: int) -> tuple[Any, Any, Any]:
    """(tx, weights, state) after steps of AdamW on normal gradients."""
    tx, dtype = VARIANTS[impl]
    rng = np.random.default_rng(0)
    master = {"w": jnp.asarray(rng.normal(0, 0.02, (parameters // 512, 512)), jnp.float32)}
    params, state = lowmem.init(tx, master, dtype)
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    for _ in range(3):
        grads = {"w": jnp.asarray(rng.normal(0, 1e-3, master["w"].shape), jnp.float32)}
        params, state = step(grads, state, params)
    return tx, params, state


def on_disk(impl: str, parameters: int, folder: Path) -> float:
    """Bytes of files per parameter; Orbax compresses."""
    lowmem.checkpoint.save(folder, *trained(impl, parameters), step=3)
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / parameters


def saving(impl: str, parameters: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of saves with checksums and without, taking turns, and of the summing in the former.

    The summing is not beside Orbax's writing, so its seconds are its cost; the pairs, which vary
    with what else the disk and the cores do, show that there is no other.
    """
    run, summed = trained(impl, parameters), checksums.write
    times: dict[str, list[float]] = {"without": [], "with": [], "summing": []}

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        summed(*args)
        times["summing"][-1] += time.perf_counter() - start

    for index in range(-1, repeats):  # the first pair fills the caches
        for kind, write in (("without", lambda *_: None), ("with", timed)):
            if kind == "with":
                times["summing"].append(0.0)
            with tempfile.TemporaryDirectory() as folder:
                with mock.patch.object(checksums, "write", write):
                    start = time.perf_counter()
                    lowmem.checkpoint.save(folder, *run, step=0)
                    times[kind].append(time.perf_counter() - start)
        if index < 0:
            for found in times.values():
                found.clear()
    return times


def cost_of_checksums(impl: str, parameters: int) -> Rows:
    """Records of saving times; the ratio is the median of pairs, the share that of the summing."""
    times = saving(impl, parameters, REPEATS)
    three = list(zip(times["with"], times["without"], times["summing"], strict=True))
    ratio = statistics.median(whole / without for whole, without, _ in three)
    share = statistics.median(part / (whole - part) for whole, _, part in three)
    flags = {"flags": {"parameters": parameters}, "repeats": REPEATS}
    return [
        records.record("checkpoint", FILE, f"{impl}, {kind} checksums", "save_s",
                       statistics.median(times[kind]), "s", ratio=own[0], share=own[1], **flags)
        for kind, own in (("without", (1.0, 0.0)), ("with", (ratio, share)))
    ]  # fmt: skip


def measure(impl: str, parameters: int) -> Rows:
    shapes = {"bytes_per_param": (from_shapes(impl), "bytes")}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"disk_bytes_per_param": (on_disk(impl, parameters, Path(folder)), "bytes")}
    flags = {"parameters": parameters, "compression": "zstd"}
    return [
        *records.records_of("checkpoint", SHAPES, impl, shapes),
        *records.records_of("checkpoint", FILE, impl, disk, flags=flags),
    ]


@records.suite(
    parameters={"type": int, "default": 1 << 24, "help": "of the file on disk"},
    saved={"type": int, "default": 1 << 27, "help": "parameters of a timed save"},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    yield from (measure(impl, args.parameters) for impl in VARIANTS)
    yield cost_of_checksums("lowmem", args.saved)


def table(rows: Rows) -> Table:
    found = records.select(rows, bench="checkpoint", metric="save_s")
    body = [
        [row["impl"], f"{row['value']:.2f} s", f"{100 * row['share']:.1f} %",
         f"{100 * (row['ratio'] - 1):+.1f} %"]
        for row in found
    ]  # fmt: skip
    return ["saving", "time", "summing, of the rest", "median of pairs"], body, found


TABLES = {"checksums": Rendered(table, "checkpoint")}
