"""8B and 14B on one card of 8 to 48 GB: optimizer state, or weights and state, in host memory.

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
from typing import Any, NamedTuple

from benchmarks import ROOT, records, small_gpu
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.release import FITS, OUT_OF_MEMORY

CASES = {"llama-8b": "8B", "llama-14b": "14B"}
_AT_ONCE = 65_536  # tokens that pass through the model together, as in the example
PCIE_4 = 25e9  # bytes per second of x16 in one direction, as measured elsewhere


class Run(NamedTuple):
    """A training run within the memory of a card.

    Attributes:
      card: the card's memory in GB; 0: the allocator is not capped.
      flags: the example's flags.
      allocator: XLA's allocator, if not the default.
      preset: of the example.
      pinned: GiB of host memory that XLA may pin, somewhat more than it needs: it pins regions of
        which each is twice as large as the one before; 0: the example's limit.
    """

    card: int
    flags: str
    allocator: str = ""
    preset: str = "8b"
    pinned: int = 0


CAPS = {8: 6.9, 16: 14.9, 24: 22.3, 48: 44.7}  # GiB that JAX may use, by card
BESIDE = 1.0  # GiB of a process beside arrays: its CUDA context, code and libraries
ASYNC, WEIGHTS = "cuda_async", "--offload weights"
RUNS = {
    "24": Run(24, "--offload --batch 8 --accumulate 4 --steps 50", ASYNC),
    "24-long": Run(24, "--offload --batch 256 --accumulate 256 --steps 3", ASYNC),
    "48": Run(48, "--offload --batch 8 --accumulate 4 --steps 50"),
    "48-long": Run(48, "--offload --batch 256 --accumulate 128 --steps 3"),
    "48-resident": Run(48, "--release --batch 3 --steps 12"),
    "16-weights": Run(16, f"{WEIGHTS} --batch 8 --accumulate 4 --steps 12", ASYNC, pinned=52),
    "16-weights-long": Run(16, f"{WEIGHTS} --batch 64 --accumulate 32 --steps 4", ASYNC, pinned=98),
    "16-weights-524k": Run(
        16, f"{WEIGHTS} --batch 256 --accumulate 128 --steps 2", ASYNC, pinned=98
    ),
    "8-weights": Run(8, f"{WEIGHTS} --batch 8 --accumulate 8 --steps 12", ASYNC, pinned=52),
    "24-14b": Run(24, f"{WEIGHTS} --batch 16 --accumulate 8 --steps 6", ASYNC, "14b", pinned=102),
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


def copied_bytes(flags: dict[str, Any], bytes_per_param: float) -> float:
    """Bytes that a step copies to the device: state, weights, gradients of long steps, and inputs.

    Those that it copies back are fewer: new weights once.
    """
    shape, tokens = flags["shape"], flags["batch"] * flags["sequence"]
    passes = -(-tokens // _AT_ONCE)
    each = bytes_per_param - 2 + (4 * (passes - 1) if passes > 1 else 0)
    each += 2 * 2 * passes if flags["offload"] == "weights" else 0  # for each pass, both ways
    return each * flags["parameters"] + 2 * tokens * (shape["layers"] + 1) * shape["width"]


def cap_of(model: str, flags: dict[str, Any]) -> str:
    """The cap, in GiB, of the run with these flags, whose allocator reports none."""
    sizes = f"--batch {flags['batch']} --accumulate {flags['accumulate']} "
    for run in RUNS.values():
        same = run.preset == model.lower() and sizes in f"{run.flags} "
        if same and (WEIGHTS in run.flags) == (flags["offload"] == "weights"):
            return f"{CAPS[run.card]:.1f}" if run.card else ""
    return ""


def table(rows: Rows) -> Table:
    """Each run: its limit, peak and speed, what it copies, and what PCIe 4 would take for that."""
    head = ["model", "sequences of 2,048", "tokens a step", "limit, GiB", "peak, GiB", "tokens/s",
            "s per step", "copied to the GPU, GiB", "PCIe 4 x16, s"]  # fmt: skip
    cases: dict[str, Rows] = {}
    for row in records.select(rows, bench="train"):
        words = row["case"].partition("/")[0].split()
        if words[0] in CASES and ("offload" in row["flags"] and " batch=" in row["case"]):
            cases.setdefault(row["case"], []).append(row)
    body, used = [], []
    for own in cases.values():
        of, flags = records.grouped(own, "metric"), own[0]["flags"]
        kind, tokens = flags["offload"], flags["batch"] * flags["sequence"]
        host = {"weights": "weights and state on the host"}.get(kind, "state on the host")
        name = {None: "resident, gradient release", "device": "offload, without copies"}.get(
            kind, f"{host}, {flags['accumulate']} micro-batches"
        )
        limit = of.get("limit_bytes")
        if "allocator" in flags:
            name = f"{name}, `{flags['allocator']}`"
        copied = 0.0
        if kind in ("pinned_host", "weights") and "bytes_per_param" in of:
            copied = copied_bytes(flags, of["bytes_per_param"]["value"])
        model = CASES[own[0]["case"].split()[0]]
        body.append([
            model, name, f"{tokens:,}",
            cell(limit, "{:.1f}", GIB) if limit else cap_of(model, flags),
            cell(of.get("peak_bytes"), "{:.2f}", GIB), cell(of.get("tokens_per_s"), "{:,.0f}"),
            cell(of.get("step_ms"), "{:.2f}", 1e3), f"{copied / GIB:.1f}",
            f"{copied / PCIE_4:.1f}",
        ])  # fmt: skip
        used += own
    return head, body, used


TABLES = {"offload": Rendered(table, "offload")}


def main(arguments: list[str] | None = None) -> None:
    parser = records.command_line(__doc__)
    parser.add_argument("--preset", help="of the example, in place of that of each run")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS, help="some of the runs")
    parser.add_argument("--steps", type=int, help="of each run, instead of 3 to 50")
    parser.add_argument("--losses", type=Path, help="folder for the losses of each run's steps")
    args, failed = parser.parse_args(arguments), []
    stored = ["--record", *([] if args.record is True else [args.record])] if args.record else []
    whole = device_gib()
    for name in args.only:
        card, flags, allocator, preset, pinned = RUNS[name]
        print(f"== {name}: {flags}", flush=True)
        env = dict(os.environ)
        if card and whole:
            env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{CAPS[card] / whole:.4f}"
        if allocator:
            env["XLA_PYTHON_CLIENT_ALLOCATOR"] = allocator
        if pinned:
            env["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(pinned)
        command = [sys.executable, str(ROOT / "examples/train_llama.py"),
                   "--preset", args.preset or preset,
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
