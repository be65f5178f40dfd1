"""An 8B Llama on one card of 24 or 48 GB: its optimizer state in host memory.

Each run is one of examples/train_llama.py in a process of its own. The default allocator is capped
at what such a card leaves; `cuda_async` has no cap, so another process allocates the rest of the
GPU. "no copies" has the same programs with the state on the device, so that the difference is what
copies cost; "resident" is gradient release.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT, records, small_gpu
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.release import FITS, OUT_OF_MEMORY

CASE = "llama-8b"
PCIE_4 = 25e9  # bytes per second of x16 in one direction, as measured elsewhere


class Run(NamedTuple):
    """A training run within the memory of a card.

    Attributes:
      card: the card's memory in GB; 0: the allocator is not capped.
      flags: the example's flags.
      allocator: XLA's allocator, if not the default.
    """

    card: int
    flags: str
    allocator: str = ""


CAPS = {24: 22.3, 48: 44.7}  # GiB that JAX may use, by card
BESIDE = 1.0  # GiB of a process beside arrays: its CUDA context, code and libraries
RUNS = {
    "24": Run(24, "--offload --batch 8 --accumulate 4 --steps 50", "cuda_async"),
    "24-long": Run(24, "--offload --batch 256 --accumulate 256 --steps 3", "cuda_async"),
    "48": Run(48, "--offload --batch 8 --accumulate 4 --steps 50"),
    "48-long": Run(48, "--offload --batch 256 --accumulate 128 --steps 3"),
    "48-resident": Run(48, "--release --batch 3 --steps 12"),
    "no-copies": Run(0, "--offload device --batch 8 --accumulate 8 --steps 12"),
    "resident": Run(0, "--release --batch 8 --steps 12"),
}


def device_gib() -> float | None:
    """The memory of the first GPU, read without JAX; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return float(subprocess.run(command, capture_output=True, check=True).stdout) / 1024
    except (OSError, subprocess.CalledProcessError):
        return None


def table(rows: Rows) -> Table:
    """Each run: its limit, peak and speed, what it copies, and what PCIe 4 would take for that."""
    head = ["8B, sequences of 2,048", "tokens a step", "limit, GiB", "peak, GiB", "tokens/s",
            "s per step", "loss", "copied each way, GiB", "PCIe 4 x16, s (computed)"]  # fmt: skip
    cases: dict[str, Rows] = {}
    for row in records.select(rows, bench="train"):
        words = row["case"].partition("/")[0].split()
        if words[0] == CASE and ("offload" in row["flags"] and " batch=" in row["case"]):
            cases.setdefault(row["case"], []).append(row)
    body, used = [], []
    for own in cases.values():
        of, flags = records.grouped(own, "metric"), own[0]["flags"]
        kind, tokens = flags["offload"], flags["batch"] * flags["sequence"]
        name = {None: "resident, gradient release", "device": "offload, without copies"}.get(
            kind, f"offload, {flags['accumulate']} micro-batches"
        )
        limit = of.get("limit_bytes")
        if "allocator" in flags:
            name = f"{name}, `{flags['allocator']}`"
        copied = 0.0
        if kind == "pinned_host" and "bytes_per_param" in of:
            shape = flags["shape"]
            state = (of["bytes_per_param"]["value"] - 2) * flags["parameters"]
            copied = state + 2 * tokens * (shape["layers"] + 1) * shape["width"]
        body.append([
            name, f"{tokens:,}", cell(limit, "{:.1f}", GIB),
            cell(of.get("peak_bytes"), "{:.2f}", GIB), cell(of.get("tokens_per_s"), "{:,.0f}"),
            cell(of.get("step_ms"), "{:.2f}", 1e3), cell(of.get("train_loss"), "{:.2f}"),
            f"{copied / GIB:.1f}", f"{copied / PCIE_4:.1f}",
        ])  # fmt: skip
        used += own
    return head, body, used


TABLES = {"offload": Rendered(table, "offload")}


def main(arguments: list[str] | None = None) -> None:
    parser = records.command_line(__doc__)
    parser.add_argument("--preset", default="8b", help="of the example (default: 8b)")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS, help="some of the runs")
    parser.add_argument("--steps", type=int, help="of each run, instead of 3 to 50")
    parser.add_argument("--losses", type=Path, help="folder for the losses of each run's steps")
    args, failed = parser.parse_args(arguments), []
    stored = ["--record", *([] if args.record is True else [args.record])] if args.record else []
    whole = device_gib()
    for name in args.only:
        card, flags, allocator = RUNS[name]
        print(f"== {name}: {flags}", flush=True)
        env = dict(os.environ)
        if card and whole:
            env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{CAPS[card] / whole:.4f}"
        if allocator:
            env["XLA_PYTHON_CLIENT_ALLOCATOR"] = allocator
        command = [sys.executable, str(ROOT / "examples/train_llama.py"), "--preset", args.preset,
                   "--data-parallel", "1", *flags.split(), *stored]  # fmt: skip
        command += ["--steps", str(args.steps)] if args.steps else []
        if args.losses:
            args.losses.mkdir(parents=True, exist_ok=True)
            command += ["--log", str(args.losses / f"{name}.jsonl")]
        bounded = card and allocator and whole
        with small_gpu.leaving(CAPS[card] + BESIDE) if bounded else contextlib.nullcontext():
            code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        failed += [name] if code not in (FITS, OUT_OF_MEMORY) else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
