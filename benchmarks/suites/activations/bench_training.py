"""COAT's Table 13 on a Llama: FP8 activations, FP8 states, and both, against bf16 and AdamW.

    python -m benchmarks.run activation_training --record                # Llama-134m, on a GPU
    python -m benchmarks.run activation_training --preset cpu --record   # a small one, minutes

All variants see the same batches, and but for one the same initial weights. Curves are stored in
benchmarks/results/coat_activations.npz after each variant.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np

from benchmarks import records
from benchmarks.suites.activations.training import PRESETS, VARIANTS, Experiment, flops
from benchmarks.suites.adam_mini.training import load_text
from benchmarks.suites.switchback.bench import say, train_all
from benchmarks.training import Run

CURVES = records.RESULTS / "coat_activations.npz"
PART = "run"
WHAT = "activations"  # in the case of records; with the batch where it is not the preset's


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
        help=f"of {', '.join(VARIANTS)} (default: all)")  # fmt: skip
    add("--steps", type=int, help="of each run; default: the preset's")
    add("--batch", type=int, help="windows in a step; default: the preset's")
    add("--lr", type=float, help="peak learning rate; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--limit", type=float, default=530, metavar="S",
        help="start no variant that would end later (default: %(default)s s)")  # fmt: skip
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer is kept")
    add("--curves", type=Path, help=f"default: {CURVES.name} in benchmarks/results")
    add("--record", nargs="?", const=True, default=None, metavar="FILE",
        help="append records, to benchmarks/results or to a file")  # fmt: skip
    return parser.parse_args(arguments)


def make_run(args: argparse.Namespace) -> Run:
    """The preset with what the command line changes."""
    preset = PRESETS[args.preset or ("cpu" if jax.default_backend() == "cpu" else "gpu")]
    return preset.changed(
        steps=args.steps, learning_rate=args.lr, attention=args.attention, batch=args.batch
    )


def main(arguments: list[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Trains the variants; with `--record` it also stores their ends."""
    args = parse_arguments(arguments)
    run = make_run(args)
    say(f"{run.preset}: {flops(run):.3g} operations a variant")

    def make() -> Experiment:
        return Experiment(run, load_text(run, args.cache), args.seed)

    path = args.curves or (None if run.preset.startswith("smoke") else CURVES)
    what = WHAT if args.batch is None else f"{WHAT}-b{args.batch}"
    return train_all(make, args.variants, args, PART, path, what)
