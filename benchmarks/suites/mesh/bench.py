"""FSDP of a Llama of the examples on 1, 2, 4, ... GPUs of one host: what cutting costs and saves.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.run mesh --preset tiny \
  --part train --train-impl optax-f32 coat_adamw+fp8 --train-steps 60    # COAT's rows of FSDP

`step`: the optimizer's step on the device, many in one jit, by `lowmem.step` and by optax.adamw in
f32, every array cut as the example cuts it. `train`: a run of examples/train_llama.py with the same
batches on every number of devices, its losses beside one device's. Each has a process of its own,
which sees that many GPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import ROOT, records
from benchmarks.suites.mesh import tables as mesh_tables
from benchmarks.suites.mesh.step import PRESETS

# implementation -> flags of the example
IMPLEMENTATIONS = {
    mesh_tables.OURS: "--optimizer flash_adamw",
    mesh_tables.OPTAX: "--optimizer optax.adamw",
    mesh_tables.COAT: "--optimizer coat_adamw --activations fp8",
}


class Failed(Exception):
    """Failure of a process."""


def process(words: list[str], gpus: Sequence[int], told: str = "", flags: str = "") -> str:
    """Run a Python process that sees these GPUs, with XLA's `flags`; return its standard output.

    Raises:
      Failed: where it ends with another status than 0; what it said goes to standard error.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    seen = {"JAX_CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    own = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | seen
    own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    how = {"cwd": ROOT, "env": own, "input": told, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *words], **how)
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise Failed(f"status {done.returncode}: {last}")
    return done.stdout


def run_of(args: argparse.Namespace, devices: int, impl: str) -> list[str]:
    flags = f"--preset {args.preset} {IMPLEMENTATIONS[impl]} --data-parallel 1 --fsdp {devices}"
    return flags.split() + ([] if args.batch is None else ["--batch", str(args.batch)])


def stepped(args: argparse.Namespace, devices: int, impl: str) -> dict[str, Any]:
    """Times and bytes of an optimizer's step; clipping, which needs a sum over devices, is off."""
    # a call is as long, whatever its devices
    job = {"steps": args.steps * devices, "repeats": args.repeats}
    job["words"] = [*run_of(args, devices, impl), "--clip", "0"]
    printed = process(["-m", "benchmarks.suites.mesh.step"], range(devices), json.dumps(job))
    found = json.loads(printed.strip().splitlines()[-1])
    times = found.pop("times")
    return found | {"device_ms": statistics.median(times), "spread": [min(times), max(times)]}


def trained(args: argparse.Namespace, devices: int, impl: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log, record = Path(folder) / "log.jsonl", Path(folder) / "records.jsonl"
        words = ["--steps", str(args.train_steps), "--log", str(log), "--record", str(record)]
        process(["examples/train_llama.py", *run_of(args, devices, impl), *words], range(devices))
        found = {row["metric"]: row["value"] for row in records.load(record)}
        found["losses"] = [row["loss"] for row in records.load(log)]
    run = {"batch": args.batch or PRESETS[args.preset].batch, "steps": args.train_steps}
    return found | {"run": run | {"sequence": PRESETS[args.preset].sequence}}


# part -> what measures it, and metrics: the name in an outcome, the unit, fields that say more
PARTS = {
    "step": (stepped, {
        "device_ms": ("device_ms", "ms", "steps", "spread", "call_ms", "temp_bytes",
                      "loop_temp_bytes"),
        "device_bytes": ("device_bytes", "bytes"),
    }),
    "train": (trained, {
        "train_loss": ("train_loss", "nats/token", "losses", "step_ms", "run"),
        "loss_difference": ("loss_difference", "1"),
        "tokens_per_s": ("tokens_per_s", "tokens/s", "run"),
        "train_device_bytes": ("device_bytes", "bytes"),
        "train_peak_bytes": ("peak_bytes", "bytes"),
    }),
}  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu, there = jax.default_backend() == "cpu", jax.device_count()
    powers = [2**i for i in range(there.bit_length())]
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="1b", help="of examples/train_llama.py; default: 1b")
    add("--devices", nargs="+", type=int, default=powers, metavar="N",
        help="default: all powers of two that are there")  # fmt: skip
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    add("--steps", type=int, default=2 if on_cpu else 100, help="of one call, times the devices")
    add("--repeats", type=int, default=5, help="of that call; their median counts")
    add("--train-steps", type=int, default=20, help="of a run of the example; default: 20")
    add("--train-impl", nargs="+", choices=IMPLEMENTATIONS, default=[mesh_tables.OURS],
        help="whose runs; optax's: what its losses differ by stands beside ours")  # fmt: skip
    add("--batch", type=int, help="sequences that all devices share; default: the preset's")
    args = parser.parse_args(argv)
    args.devices = sorted(set(args.devices))
    if args.devices[0] != 1:
        parser.error("--devices: everything is compared with one device: add 1")
    if args.devices[-1] > there:
        parser.error(f"--devices {args.devices[-1]}: there are {there}")
    if args.record is True and on_cpu:
        parser.error("--record: simulated devices share a CPU: to try it, name a FILE")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    # or this process takes most of a GPU before the others can have any of it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args, failed, every = arguments(argv), False, []
    of_one: dict[str, list[float]] = {}  # losses of one device
    impls = {"step": (mesh_tables.OURS, mesh_tables.OPTAX), "train": args.train_impl}
    todo = [(devices, part, impl) for devices in args.devices
            for part in PARTS if part in args.part for impl in impls[part]]  # fmt: skip
    for devices, part, impl in todo:
        model, (measure, metrics) = f"llama-{args.preset}", PARTS[part]
        case, rows = f"{model} fsdp={devices}/adamw", []
        try:
            found = measure(args, devices, impl)
        except Failed as error:  # the others are still worth their time
            failed = True
            print(case, impl, f"failed: {error}", flush=True)
            continue
        if part == "train" and devices == 1:
            of_one[impl] = found["losses"]
        elif part == "train" and impl in of_one:
            found["loss_difference"] = mesh_tables.loss_difference(found["losses"], of_one[impl])
        for metric, (key, unit, *details) in metrics.items():
            if found.get(key) is not None:
                more = {detail: found[detail] for detail in details if detail in found}
                more |= {"model": model, "devices": devices}
                rows.append(records.record("mesh", case, impl, metric, found[key], unit, **more))
        records.show(rows)
        records.keep(rows, args.record)  # as it comes: a run that is cut off loses none
        every += rows
    print(mesh_tables.of_a_run(every))
    return int(failed)
