"""FSDP of a Llama of the examples on 1, 2, 4, ... GPUs of one host: what cutting costs and saves.

python -m benchmarks.run mesh --record FILE
python -m benchmarks.run mesh --part step --devices 1 2 4   # then --part train, for less at once
XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.run mesh --preset tiny \
  --devices 1 2                                               # tries the benchmark, on a CPU

`step`: the optimizer's step on the device, many in one jit, by `lowmem.step` and by optax.adamw in
f32, every array cut as the example cuts it. `train`: a run of examples/train_llama.py with the same
batches on every number of devices, its losses beside one device's. Each has a process of its own,
which sees that many GPUs. What a process compiles is autotuned; where minutes are short,
XLA_FLAGS=--xla_gpu_autotune_level=0 leaves that out, and matrix products are as slow as that makes
them (the optimizer's step has none).
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import ROOT, records
from benchmarks.peers.report import say
from benchmarks.suites.mesh import tables as mesh_tables
from benchmarks.suites.mesh.step import PRESETS

PARTS = ("step", "train")
# implementation -> what the example calls its optimizer
IMPLEMENTATIONS = {mesh_tables.OURS: "flash_adamw", mesh_tables.OPTAX: "optax.adamw"}
# what an outcome has -> metric and unit
STEP = {
    "device_ms": ("device_ms", "ms"),
    "device_bytes": ("device_bytes", "bytes"),
    "peak_bytes": ("step_peak_bytes", "bytes"),
}
TRAIN = {
    "train_loss": ("train_loss", "nats/token"),
    "loss_difference": ("loss_difference", "1"),
    "tokens_per_s": ("tokens_per_s", "tokens/s"),
    "peak_bytes": ("train_peak_bytes", "bytes"),
}
# fields that say more about a metric
DETAILS = {
    "device_ms": ("steps", "spread", "call_ms", "temp_bytes", "loop_temp_bytes"),
    "step_peak_bytes": ("live_bytes", "setup_peak_bytes"),
    "train_loss": ("losses", "step_ms"),
}


# ---- processes -----------------------------------------------------------------------------------


class Failed(Exception):
    """Failure of a process."""


def process(words: list[str], devices: int, told: str = "") -> str:
    """Run a Python process that sees the first `devices` GPUs and return its standard output.

    Raises:
      Failed: where it ends with another status than 0; what it said goes to standard error.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | own,
        input=told,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise Failed(f"status {done.returncode}: {last}")
    return done.stdout


def run_of(args: argparse.Namespace, devices: int, optimizer: str) -> list[str]:
    """The example's command line."""
    words = ["--preset", args.preset, "--optimizer", optimizer, "--fsdp", str(devices)]
    return [*words, "--data", "1", *([] if args.batch is None else ["--batch", str(args.batch)])]


def stepped(args: argparse.Namespace, devices: int, impl: str) -> dict[str, Any]:
    """Times and bytes of an optimizer's step; clipping, which needs a sum over devices, is off."""
    job = {
        "words": [*run_of(args, devices, IMPLEMENTATIONS[impl]), "--clip", "0"],
        "steps": args.steps * devices,  # a call is as long, whatever its devices
        "repeats": args.repeats,
    }
    printed = process(["-m", "benchmarks.suites.mesh.step"], devices, json.dumps(job))
    found = json.loads(printed.strip().splitlines()[-1])
    times = found.pop("times")
    return found | {"device_ms": statistics.median(times), "spread": [min(times), max(times)]}


def trained(args: argparse.Namespace, devices: int, impl: str) -> dict[str, Any]:
    """Losses and numbers of a run of the example."""
    with tempfile.TemporaryDirectory() as folder:
        log, record = Path(folder) / "log.jsonl", Path(folder) / "records.jsonl"
        words = [*run_of(args, devices, IMPLEMENTATIONS[impl]), "--steps", str(args.train_steps)]
        words += ["--log", str(log), "--record", str(record)]
        process(["examples/train_llama.py", *words], devices)
        found = {row["metric"]: row["value"] for row in records.load(record)}
        return found | {"losses": [row["loss"] for row in records.load(log)]}


# ---- a run ---------------------------------------------------------------------------------------


class Run:
    """Measurements, each stored as it comes so that a run that is cut off loses none.

    Attributes:
      args: the command line.
      rows: every record so far.
      failed: whether something did.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.failed = args, False
        self.rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        """All parts on each number of devices, the largest last."""
        args, of_one = self.args, {}
        for devices in args.devices:
            if "step" in args.part:
                for impl in IMPLEMENTATIONS:
                    self._try(devices, impl, STEP, lambda n=devices, i=impl: stepped(args, n, i))
            if "train" in args.part:
                for impl in args.train_impl:
                    compared = functools.partial(self._compared, devices, impl, of_one)
                    self._try(devices, impl, TRAIN, compared)

    def _compared(self, devices: int, impl: str, of_one: dict[str, list[float]]) -> dict[str, Any]:
        """A run of the example, and how far its losses are from those `of_one` device."""
        found = trained(self.args, devices, impl)
        if devices == 1:
            of_one[impl] = found["losses"]
        elif impl in of_one:
            found["loss_difference"] = mesh_tables.loss_difference(found["losses"], of_one[impl])
        return found

    def _try(
        self, devices: int, impl: str, metrics: dict, measured: Callable[[], dict[str, Any]]
    ) -> None:
        case = (f"llama-{self.args.preset} fsdp={devices}", "adamw")
        name = impl if metrics is STEP else f"{impl}, training"
        say(case, name, "begins")
        try:
            found = measured()
        except Failed as error:  # the others are still worth their time
            self.failed = True
            return say(case, name, f"failed: {error}")
        rows = [
            self._row("/".join(case), impl, devices, metric, unit, found[key], found)
            for key, (metric, unit) in metrics.items()
            if found.get(key) is not None
        ]
        self.rows += rows
        records.keep(rows, self.args.record)
        say(case, name, ", ".join(f"{row['metric']} {row['value']:.5g}" for row in rows))

    def _row(
        self,
        case: str,
        impl: str,
        devices: int,
        metric: str,
        unit: str,
        value: float,
        found: dict[str, Any],
    ) -> dict[str, Any]:
        args, preset = self.args, PRESETS[self.args.preset]
        more = {name: found[name] for name in DETAILS.get(metric, ()) if name in found}
        if metric in ("train_loss", "tokens_per_s"):
            run = {"steps": args.train_steps, "batch": args.batch or preset.batch}
            more["run"] = run | {"sequence": preset.sequence}
        own = {"model": f"llama-{args.preset}", "devices": devices, **more}
        return records.record("mesh", case, impl, metric, value, unit, **own)


def powers_of_two(there: int) -> list[int]:
    """1, 2, 4, ... up to all devices."""
    return [2**i for i in range(there.bit_length()) if 2**i <= there]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; defaults depend on the machine."""
    on_cpu, there = jax.default_backend() == "cpu", jax.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="1b", help="of examples/train_llama.py; default: 1b")
    add("--devices", nargs="+", type=int, default=powers_of_two(there), metavar="N",
        help="default: all powers of two that are there")  # fmt: skip
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    add("--steps", type=int, default=2 if on_cpu else 100, help="of one call, times the devices")
    add("--repeats", type=int, default=5, help="of that call; their median counts")
    add("--train-steps", type=int, default=20, help="of a run of the example; default: 20")
    add("--train-impl", nargs="+", choices=IMPLEMENTATIONS, default=[mesh_tables.OURS],
        help="whose runs; both: what optax's losses differ by stands beside ours")  # fmt: skip
    add("--batch", type=int, help="sequences that all devices share; default: the preset's")
    records.add_option(parser)
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
    """Measures and prints; `--record` also stores. 1 where something failed."""
    # or this process takes most of a GPU before the others can have any of it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run = Run(arguments(argv))
    run.measure()
    print(mesh_tables.of_a_run(run.rows))
    return int(run.failed)
