"""One block of text about this machine, to post: do the kernels agree with XLA, how fast are they.

python -m benchmarks.run report        # about five minutes on a GPU, two on a CPU; also for TPUs
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.suites.step.tables import BASE

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton", "optax",
)  # fmt: skip
SHAPES = {"a": (256, 1024), "b": (3, 1000), "c": (8, 64, 96), "d": (1500,)}
STEPS = 3
IMPLEMENTATIONS = (BASE, "lowmem.step", "lowmem.update")


def about() -> Iterator[str]:
    """What was run, on what."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")
    yield f"optax_lowmem at commit {records.commit()}, python {platform.python_version()}"
    yield f"{records.device()} {f'(compute capability {capability})' if capability else ''}".strip()
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        said = subprocess.run(ask, capture_output=True, text=True).stdout
        yield f"driver, memory: {'; '.join(dict.fromkeys(said.strip().splitlines()))}"
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    yield ", ".join(found)


def drawn(seed: int, scale: float, dtype: Any) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: (scale * jax.random.normal(key, shape)).astype(dtype)
            for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}  # fmt: skip


def agreement(name: str) -> str:
    """How far a few steps are from those of XLA's code, with the same gradients."""
    tx = lowmem.OPTIMIZERS[name].make(1e-3)
    weights, states = {}, {}
    # a TPU runs no kernel that is not asked for
    kernel = "pallas_tpu" if jax.default_backend() == "tpu" else None
    for how in (kernel, "xla"):
        step = jax.jit(lambda grads, state, params, how=how: lowmem.step(
            tx, grads, state, params, implementation=how))  # fmt: skip
        params, state = lowmem.init(tx, drawn(0, 0.02, jnp.float32))
        for number in range(STEPS):
            params, state = step(drawn(1 + number, 1e-3, jnp.bfloat16), state, params)
        weights[how] = np.concatenate([
            np.ravel(x) for x in jax.tree.leaves(lowmem.master_params(params, state))
        ])  # fmt: skip
        states[how] = [x for x in jax.tree.leaves(state) if x.dtype in (jnp.int8, jnp.uint8)]
    codes = [np.asarray(x) != np.asarray(y) for x, y in zip(*states.values(), strict=True)]
    share = sum(x.sum() for x in codes) / max(1, sum(x.size for x in codes))
    moved = np.abs(weights["xla"] - np.concatenate([
        np.ravel(x) for x in jax.tree.leaves(drawn(0, 0.02, jnp.float32))
    ])).mean()  # fmt: skip
    gap = np.abs(weights[kernel] - weights["xla"]).mean() / moved
    how = str(lowmem.explain(tx, params)).splitlines()[-1].partition(":")[0]
    how = how if kernel is None else f"by {kernel} where it supports a leaf"
    return f"{name:<22} {share:8.4%} of stored bytes differ, weights by {gap:.1e} of a step; {how}"


def speed(leaf_set: str, optimizers: list[str], repeats: int) -> Iterator[str]:
    """Times of a step, by `benchmarks.run step`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        command = [sys.executable, "-m", "benchmarks.run", "step", "--leaf-set", leaf_set,
                   "--optimizer", *optimizers, "--impl", *IMPLEMENTATIONS,
                   "--repeats", str(repeats), "--record", str(file)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        rows = records.load(file) if file.exists() else []
    if done.returncode or not rows:
        yield f"timing failed: {(done.stderr or done.stdout)[-400:]}"
    for row in records.select(rows, metric="copy_tbps")[:1]:
        yield f"a copy moves {row['value']:.2f} TB/s"
    for row in records.select(rows, metric="device_ms"):
        share = records.last(rows, case=row["case"], impl=row["impl"], metric="bound_share")
        of = f", {share['value']:.0%} of the speed of a copy" if share else ""
        ratio = row.get("ratio_to_optax", 1.0)
        yield f"{row['case']:<24} {row['impl']:<16} {row['value']:8.3f} ms, {ratio:.2f} x optax{of}"


def report(args: argparse.Namespace) -> Iterator[str]:
    yield from about()
    yield ""
    for name in args.agree:
        try:
            yield agreement(name)
        except Exception as error:  # what others do is worth the rest of the report
            yield f"{name:<22} failed: {str(error)[:300]}"
    yield ""
    if args.time:
        yield from speed(args.leaf_set, args.time, args.repeats)


def main(arguments: list[str] | None = None) -> None:
    # or JAX takes most of a GPU before the processes that are timed can have any of it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--agree", nargs="*", default=list(lowmem.OPTIMIZERS), choices=list(lowmem.OPTIMIZERS))
    add("--time", nargs="*", default=["adamw", "coat_adamw"], help="optimizers to time")
    add("--leaf-set", default="demo-gpt" if on_cpu else "gpt2-124m")
    add("--repeats", type=int, default=3)
    print("```text")
    for line in report(parser.parse_args(arguments)):
        print(line, flush=True)
    print("```\nPlease post this block in an issue, good or bad.")
