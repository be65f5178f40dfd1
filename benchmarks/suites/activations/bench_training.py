"""COAT's Table 13 on a Llama: FP8 activations, FP8 states, and both, against bf16 and AdamW.

    python -m benchmarks.run activation_training --record                # Llama-134m, on a GPU
    python -m benchmarks.run activation_training --preset cpu --record   # a small one, minutes

All variants see the same batches, and but for one the same initial weights. Curves are stored in
benchmarks/results/coat_activations.npz after each variant.
"""

from __future__ import annotations

import argparse

from benchmarks import records
from benchmarks.suites.activations.training import PRESETS, VARIANTS, Experiment, flops
from benchmarks.suites.switchback.bench import train_all
from benchmarks.training import Curve, Run, load_text, parser, say, usual

CURVES = records.RESULTS / "coat_activations.npz"
PART = "run"
WHAT = "activations"  # in the case of records; with the batch where it is not the preset's


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    made = parser(__doc__, 530, CURVES)
    add = made.add_argument
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
        help=f"of {', '.join(VARIANTS)} (default: all)")  # fmt: skip
    add("--batch", type=int, help="windows in a step; default: the preset's")
    add("--lr", type=float, help="peak learning rate; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    return made.parse_args(arguments)


def make_run(args: argparse.Namespace) -> Run:
    """The preset with what the command line changes."""
    return usual(PRESETS, args.preset).changed(
        steps=args.steps, learning_rate=args.lr, attention=args.attention, batch=args.batch
    )


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    """Trains the variants; with `--record` it also stores their ends."""
    args = parse_arguments(arguments)
    run = make_run(args)
    say(f"{run.preset}: {flops(run):.3g} operations a variant")

    def make() -> Experiment:
        return Experiment(run, load_text(run, args.cache), args.seed)

    path = None if run.preset.startswith("smoke") else CURVES
    what = WHAT if args.batch is None else f"{WHAT}-b{args.batch}"
    return train_all(args, make, args.variants, path, PART, what)
