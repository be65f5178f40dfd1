"""Training of a Llama of the examples on n GPUs of one host, with n times one GPU's batch.

python -m benchmarks.run scaling --preset 1b 8b --record       # on your GPUs: 1, 2, 4, ... of them
python -m benchmarks.run scaling --layout fsdp zero --impl flash_adamw flash_adamw+fp8
python -m benchmarks.run scaling --layout fsdp --impl torch-fsdp2 torch-fsdp2+float8-ckpt
python -m benchmarks.run scaling --layout fsdp --devices 4 --flags default combine-1g sequential

Runs of examples/train_llama.py, or of `mesh.in_torch` where its packages are installed, each in a
process of its own. Runs on few GPUs share the host.
"""

import argparse
import concurrent.futures
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import records
from benchmarks.render import GIB, Rendered, Table, cell, markdown
from benchmarks.suites.end_to_end.in_torch import versions
from benchmarks.suites.mesh import in_torch
from benchmarks.suites.mesh.bench import Failed, process
from benchmarks.suites.mesh.step import PRESETS

IMPLEMENTATIONS = {
    "flash_adamw": "--optimizer flash_adamw",
    "flash_adamw+fp8": "--optimizer flash_adamw --activations fp8",
    "coat_adamw+fp8": "--optimizer coat_adamw --activations fp8",
    "optax.adamw": "--optimizer optax.adamw",
}
# how n devices share the run -> flags of the example, by n
LAYOUTS = {
    "fsdp": lambda n: f"--data-parallel 1 --fsdp {n}",
    "zero": lambda n: f"--data-parallel {n} --zero",
    "tensor": lambda n: f"--data-parallel 1 --fsdp {n // 2} --tensor 2",
}
_COMBINE = " ".join(
    f"--xla_gpu_{of}_combine_threshold_bytes={{0}}"
    for of in ("all_gather", "reduce_scatter", "all_reduce")
)
# XLA's flags for GPUs, by name
FLAGS = {
    "default": "",
    "combine-none": _COMBINE.format(1),
    "combine-1g": _COMBINE.format(2**30),
    "sequential": "--xla_gpu_enable_latency_hiding_scheduler=false",
    "pipelined": "--xla_gpu_enable_pipelined_all_gather=true "
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "double-buffering": "--xla_gpu_enable_while_loop_double_buffering=true",
}
NAMES = {"fsdp": "FSDP", "zero": "ZeRO-1", "tensor": "FSDP x 2 tensor"}
# metric -> its unit
METRICS = {
    "tokens_per_s": "tokens/s", "peak_bytes": "bytes", "compile_s": "s", "train_loss": "nats/token",
    "first_loss": "nats/token",
}  # fmt: skip


class Gpus:
    """The GPUs of this host, which runs take and give back."""

    def __init__(self, count: int) -> None:
        self.free, self.changed = set(range(count)), threading.Condition()

    def run(self, count: int, flags: str, words: list[str]) -> str:
        """Run a process on `count` GPUs, once so many are free, with some of XLA's flags."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            chosen = sorted(self.free)[:count]
            self.free.difference_update(chosen)
        try:
            return process(words, chosen, flags=flags)
        finally:
            with self.changed:
                self.free.update(chosen)
                self.changed.notify_all()


class Job(NamedTuple):
    """The model of a run, how it is trained, and the number of devices."""

    preset: str  # of examples/train_llama.py
    layout: str
    impl: str
    devices: int
    xla: str  # name of a set of XLA's flags


def words_of(job: Job, batch: int) -> list[str]:
    """Return the arguments of examples/train_llama.py for all devices' `batch`."""
    words = f"--preset {job.preset} {IMPLEMENTATIONS[job.impl]} --batch {batch} "
    return (words + LAYOUTS[job.layout](job.devices)).split()


def trained(args: argparse.Namespace, gpus: Gpus, job: Job) -> records.Rows:
    """Return the records of one run."""
    preset, layout, impl, devices, xla = job
    each, sequence = args.batch or PRESETS[preset].batch, PRESETS[preset].sequence
    batch = devices * each
    more = {"model": f"llama-{preset}", "layout": layout, "devices": devices}
    run = {"batch": batch, "sequence": sequence, "steps": args.steps}
    if impl in in_torch.NAMES:
        sizes = map(str, (each, sequence, args.steps, devices))
        printed = gpus.run(devices, "", ["-m", in_torch.__name__, impl, preset, *sizes])
        found = json.loads(printed.strip().splitlines()[-1])
        more["versions"] = versions()
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "records.jsonl"
            more_words = ["--steps", str(args.steps), "--record", str(file)]
            words = ["examples/train_llama.py", *words_of(job, batch), *more_words]
            gpus.run(devices, FLAGS[xla], words)
            found = {row["metric"]: row["value"] for row in records.load(file)}
    values = {name: (found[name], unit) for name, unit in METRICS.items() if name in found}
    case = f"llama-{preset} {layout}={devices} batch={batch}"
    impl += f", {xla}" if len(args.flags) > 1 or xla != "default" else ""
    return records.records_of("scaling", case, impl, values, **more, run=run)


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield the runs, those on most devices first."""
    for devices in sorted(args.devices, reverse=True):
        for preset in args.preset:
            for layout in args.layout if devices > 1 else ["fsdp"]:
                own = [i for i in args.impl if layout == "fsdp" or i not in in_torch.NAMES]
                if layout != "tensor" or devices > 2:
                    for impl in own:
                        sets = ["default"] if impl in in_torch.NAMES else args.flags
                        yield from (Job(preset, layout, impl, devices, xla) for xla in sets)


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    there = jax.device_count()
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--preset", nargs="+", choices=PRESETS, default=["1b"], help="of the example")
    add("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    add("--impl", nargs="+", choices=[*IMPLEMENTATIONS, *in_torch.NAMES], metavar="NAME",
        default=list(IMPLEMENTATIONS),
        help=f"of {', '.join([*IMPLEMENTATIONS, *in_torch.NAMES])}; default: JAX's")  # fmt: skip
    add("--devices", nargs="+", type=int, metavar="N",
        default=[2**i for i in range(there.bit_length())],
        help="default: all powers of two")  # fmt: skip
    add("--flags", nargs="+", choices=FLAGS, default=["default"], help="sets of XLA's flags")
    add("--batch", type=int, help="sequences per device; default: the preset's")
    add("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    if max(args.devices) > there:
        parser.error(f"--devices {max(args.devices)}: there are {there}")
    if args.record is True and jax.default_backend() == "cpu":
        parser.error("--record: simulated devices share a CPU: to try it, name a FILE")
    gpus, failed, every = Gpus(there), False, []
    with concurrent.futures.ThreadPoolExecutor(there) as pool:
        for done in [pool.submit(trained, args, gpus, job) for job in jobs(args)]:
            try:
                rows = done.result()
            except Failed as error:  # the others are still worth their time
                failed = True
                print(f"failed: {error}", flush=True)
                continue
            records.show(rows)
            records.keep(rows, args.record)
            every += rows
    print(markdown(*_table(every)[:2]))
    return int(failed)


def table(rows: records.Rows) -> Table:
    """Tokens per second and the peak in GiB of each model and implementation, by devices."""
    found = records.on_gpus(records.select(rows, bench="scaling"))
    found = [row for row in found if row["impl"].partition(", ")[2] not in FLAGS]
    return _table(found)


def _table(rows: records.Rows) -> Table:
    rows = [row | {"each": row["run"]["batch"] // row["devices"]} for row in rows]
    columns = sorted({(row["devices"], row["layout"]) for row in rows})
    names = ["1 GPU" if n == 1 else f"{n}, {NAMES[layout]}" for n, layout in columns]
    values, body = records.grouped(rows, "model", "each", "impl", "devices", "layout", "metric"), []
    for model, by_batch in values.items():
        for each, by_impl in sorted(by_batch.items()):
            for impl, of in by_impl.items():
                cells = []
                for devices, layout in columns:
                    own = of.get(devices, {}).get(layout, {})
                    peak = cell(own.get("peak_bytes"), "; {:.1f}", GIB)
                    cells.append(cell(own.get("tokens_per_s"), "{:,.0f}") + peak)
                body.append([model, str(each), f"`{impl}`", *cells])
    return ["model", "batch per device", "implementation", *names], body, rows


def _speed(rate: Any, one: Any, devices: int) -> list[str]:
    """Return tokens per second and their share of n times one device's; "" without a record."""
    share = f"{rate['value'] / (devices * one['value']):.2f}" if rate and one else ""
    return [cell(rate, "{:,.0f}"), share]


def fsdp(rows: records.Rows) -> Table:
    """Tokens per second of the 1B model by number of GPUs, and as a share of n times one GPU's."""
    said = {"flash_adamw": "bf16", "flash_adamw+fp8": "FP8 activations"}
    found = records.select(rows, bench="scaling", model="llama-1b", layout="fsdp")
    found = [row for row in records.on_gpus(found) if row["metric"] == "tokens_per_s"]
    batch = PRESETS["1b"].batch
    used = records.alike([row for row in found if row["impl"] in said
                          and row["run"]["batch"] == batch * row["devices"]])  # fmt: skip
    values, body = records.grouped(used, "devices", "impl"), []
    one = values.get(1, {})
    for devices, of in sorted(values.items()):
        line = [str(devices)]
        for impl in said:
            line += _speed(of.get(impl), one.get(impl), devices)
        body.append(line)
    head = ["GPUs"]
    for name in said.values():
        head += [f"{name}: tokens/s", "share of n times one"]
    return head, body, used


def flags(rows: records.Rows) -> Table:
    """Tokens per second of the 1B model with other flags of XLA, beside its defaults."""
    found = records.on_gpus(records.select(rows, bench="scaling", model="llama-1b"))
    found = [row | {"xla": row["impl"].partition(", ")[2]} for row in found]
    compared = [row for row in found if row["xla"] in FLAGS]
    used = records.alike(compared, "device", "jax", "commit", "case")
    values, body = records.grouped(used, "xla", "metric"), []
    for name, of in values.items():
        rate, usual = of["tokens_per_s"], values["default"]["tokens_per_s"]
        change = "" if name == "default" else f"{100 * (rate['value'] / usual['value'] - 1):+.1f} %"
        words = "<br>".join(f"`{flag}`" for flag in FLAGS[name].split()) or "default"
        body.append([words, cell(rate, "{:,.0f}"), change, cell(of["peak_bytes"], "{:.1f}", GIB)])
    return ["XLA_FLAGS", "tokens/s", "over the default", "peak GiB per device"], body, used


TABLES = {
    "scaling": Rendered(table, "scaling"),
    "scaling_fsdp": Rendered(fsdp, "scaling"),
    "scaling_flags": Rendered(flags, "scaling --flags default sequential combine-1g"),
}
