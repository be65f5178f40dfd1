"""SwitchBack's Figures 1 and 2 on a Llama of bytes, appendix D, and a whole model's speed.

    python -m benchmarks.run switchback --part run --record     # minutes on a GPU
    python -m benchmarks.run switchback --part large --record   # 65,536 tokens a step, likewise
    python -m benchmarks.run switchback --part variance --record          # seconds, anywhere
    python -m benchmarks.run switchback --part llama --record   # Llama-3.2-1B's step, on a GPU
    python -m benchmarks.run switchback --part run --preset cpu # a tiny model, minutes on a CPU

`run` and `large` store curves in benchmarks/results/switchback.npz after each variant.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time

from benchmarks import ROOT, records
from benchmarks.suites.switchback import variance as switchback_variance
from benchmarks.suites.switchback.training import PRESETS, VARIANTS, Experiment
from benchmarks.training import Curve, Part, built, parser, say, usual

CURVES = records.RESULTS / "switchback.npz"
TRAINED = ("run", "large")
# what a large batch is told apart with; all variants of a run at a usual batch
LARGE = ["standard", "standard-other-start", "switchback-int8", "switchback-fp8", "llm_int8"]
LINEARS = ["standard", "switchback-int8-auto", "switchback-fp8-auto", "switchback-int8"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 530, CURVES, VARIANTS)
    add = made.add_argument
    add("--part", nargs="+", choices=(*TRAINED, "variance", "llama"), default=["run"])
    add("--llama", default="--preset 1b --attention cudnn --steps 25", metavar="FLAGS",
        help="of examples/train_llama.py, for that part (default: %(default)s)")  # fmt: skip
    add("--linears", nargs="+", default=LINEARS, metavar="NAME", help="its --linear, one by one")
    return made.parse_args(arguments)


def train_part(args: argparse.Namespace, part: str) -> dict[str, Curve]:
    """Trains a part's variants one after the other, and stores after each."""
    names = args.variants or (VARIANTS if part == "run" else LARGE)
    make = functools.partial(built, args, Experiment, usual(PRESETS, args.preset)[part])
    return Part(args, make, names, CURVES, part).train_all()


def variance(args: argparse.Namespace) -> None:
    """The error of each product in int8 against the length of its sums."""
    # 1280 and 5120 are the forward products of CLIP ViT-Huge (appendix D.3)
    lengths = sorted({*switchback_variance.LENGTHS, 1280, 5120})
    rows = [
        row
        for draw in switchback_variance.DRAWS
        for product in switchback_variance.PRODUCTS
        for length in ([256, 1280] if args.preset == "smoke" else lengths)
        for row in variance_rows(draw, product, length)
    ]
    records.show(rows)
    records.keep(rows, args.record)


def variance_rows(draw: str, product: str, length: int) -> records.Rows:
    found = switchback_variance.spread("llm_int8", product, length, draw)
    names = ("error", "predicted", "relative")
    values = {f"{name}_variance": (getattr(found, name), None) for name in names}
    case = f"variance/{product} of {length}"
    return records.records_of("switchback", case, draw, values, length=length)


def llama(args: argparse.Namespace) -> None:
    """examples/train_llama.py with each --linear, in processes of their own."""
    flags = args.llama.split()
    if args.record is not None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # naming the device takes it
        flags += ["--record", str(records.keep([], args.record))]
    failed = []
    for linear in args.linears:
        say(f"== {linear}")
        command = [sys.executable, "examples/train_llama.py", *flags, "--linear", linear]
        paths = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        own = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
        done = subprocess.run(command, cwd=ROOT, env=own | {"PYTHONPATH": paths}, check=False)
        failed += [linear] if done.returncode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main(arguments: list[str] | None = None) -> None:
    args, start = parse_arguments(arguments), time.perf_counter()
    for part in args.part:
        if part in TRAINED:
            train_part(args, part)
        else:
            {"variance": variance, "llama": llama}[part](args)
    say(f"done after {time.perf_counter() - start:.0f} s")
