"""A checkpoint of a Llama saved on some GPUs and restored on other numbers: seconds and RAM.

python -m benchmarks.run reshard --preset 8b --devices 4 2 1 --record

The first number of GPUs saves weights and state, cut as `--fsdp` cuts them; each number restores
them. Each has a process of its own, which sees that many GPUs. Other bits than those saved end it.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train_llama
from _llama import checkpoints, train
from _llama.config import PRESETS

from benchmarks import records
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.mesh.bench import process


@jax.jit
def digest(tree: Any) -> jax.Array:
    """Return a number that depends on each bit and its place, whatever the sharding."""

    def of(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        places = jnp.zeros(bits.shape, jnp.uint32)
        for axis, size in enumerate(bits.shape):
            places = places * np.uint32(size) + jax.lax.broadcasted_iota(
                jnp.uint32, bits.shape, axis
            )
        return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)

    return jnp.stack([of(x) for x in jax.tree.leaves(tree)])


def measure(preset: str, devices: int, folder: str, saves: bool) -> dict[str, Any]:
    """Save or restore in this process; return seconds, its most RAM (of all it does), a digest."""
    words = f"--preset {preset} --data-parallel 1 --fsdp {devices}".split()
    program = train.make_program(train_llama.make_settings(train_llama.parse_arguments(words)))
    if saves:
        run = train.Run(*jax.block_until_ready(program.start()), 1, [], [])
        began = time.perf_counter()
        checkpoints.save(Path(folder), program, run)
    else:
        began = time.perf_counter()
        run = checkpoints.start_or_restore(Path(folder), program, 1)
        jax.block_until_ready((run.params, run.state))
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bits = np.asarray(digest((run.params, run.state))).tolist()
    return {"seconds": seconds, "ram_bytes": most, "bits": bits}


@records.suite(
    preset={"choices": PRESETS, "default": "1b", "help": "of examples/train_llama.py"},
    devices={"type": int, "nargs": "+", "default": (4, 2, 1), "metavar": "N"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    # or this process takes most of a GPU before the others can have any of it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    first = args.devices[0]
    with tempfile.TemporaryDirectory() as folder:
        saved: dict[str, Any] = {}
        for devices, saves in [(first, True), *((n, False) for n in args.devices)]:
            job = {"preset": args.preset, "devices": devices, "folder": folder, "saves": saves}
            printed = process(["-m", __name__], range(devices), json.dumps(job))
            found = json.loads(printed.strip().splitlines()[-1])
            saved = saved or found
            if found["bits"] != saved["bits"]:
                raise SystemExit(f"other bits on {devices} than on {first} devices")
            case = f"llama-{args.preset} fsdp={first} to {devices}"
            values = {
                "seconds": (found["seconds"], "s"),
                "ram_bytes": (found["ram_bytes"], "bytes"),
            }
            yield records.records_of(
                "reshard", case, "save" if saves else "restore", values, devices=devices
            )


def table(rows: records.Rows) -> Table:
    """Seconds and RAM of saving and of each restoration."""
    used, body = records.on_gpus(records.select(rows, bench="reshard")), []
    for case, by_impl in records.grouped(used, "case", "impl", "metric").items():
        model, first, *_ = case.split()
        for impl, metrics in by_impl.items():
            seconds, ram = metrics["seconds"], metrics["ram_bytes"]
            body.append([
                model, first.removeprefix("fsdp="), impl, str(seconds["devices"]),
                cell(seconds, "{:.0f}"), cell(ram, "{:.0f}", GIB),
            ])  # fmt: skip
    return ["model", "saved on", "", "GPUs", "seconds", "peak RAM, GiB"], body, used


TABLES = {"reshard": Rendered(table, "reshard --preset 8b")}

if __name__ == "__main__":
    print(json.dumps(measure(**json.load(sys.stdin))))
