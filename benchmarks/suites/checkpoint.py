"""Bytes of a checkpoint: Llama-2-7B from its shapes, and of files on disk."""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes, records
from benchmarks.records import Rows

PAPER = lowmem.flash_adamw(1e-3, storage=lowmem.Storage.paper())
SHAPES, FILE = "llama-2-7b/adamw", "normal/adamw"
# implementation -> (optimizer, dtype of the weights)
VARIANTS: dict[str, tuple[optax.GradientTransformation, Any]] = {
    "optax-f32": (optax.adamw(1e-3), jnp.float32),
    "lowmem": (lowmem.flash_adamw(1e-3), jnp.bfloat16),
    "lowmem, paper's storage": (PAPER, jnp.bfloat16),
}


def from_shapes(impl: str) -> float:
    """Bytes per parameter of what is saved of Llama-2-7B; none is allocated."""
    tx, dtype = VARIANTS[impl]
    params = model_shapes.llama(
        dtype, layers=32, width=4096, hidden=11008, kv=4096, vocab=32000, tied=False
    )
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


def measure(impl: str, parameters: int) -> Rows:
    shapes = {"bytes_per_param": (from_shapes(impl), "bytes")}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"disk_bytes_per_param": (on_disk(impl, parameters, Path(folder)), "bytes")}
    flags = {"parameters": parameters, "compression": "zstd"}
    return [
        *records.records_of("checkpoint", SHAPES, impl, shapes),
        *records.records_of("checkpoint", FILE, impl, disk, flags=flags),
    ]


@records.suite(parameters={"type": int, "default": 1 << 24, "help": "of the file on disk"})
def main(args: argparse.Namespace) -> Iterator[Rows]:
    yield from (measure(impl, args.parameters) for impl in VARIANTS)
