"""Q-Adam-mini's Figures 3, 5, 6, 7 and 8 on a GPT: losses and norms under each way to keep m and v.

    python -m benchmarks.run adam_mini --record              # minutes on a GPU
    python -m benchmarks.run adam_mini --preset smoke        # a tiny model, anywhere
    python -m benchmarks.run adam_mini --variants adam_mini q_adam_mini --steps 20000

Untied embedding and head of 32,000 rows, of which a batch of 2,048 tokens wakes about a fiftieth.
The curves go to benchmarks/results/q_adam_mini.npz after each variant.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.curves import CURVES
from benchmarks.suites.adam_mini.training import ADAM, PRESETS, VARIANTS, Experiment
from benchmarks.training import Part, changed, load_text, parser, say


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 570, CURVES, VARIANTS, PRESETS)
    add = made.add_argument
    add("--every", type=int, help="steps of a call, and between logged norms (default: 50)")
    add("--b2", type=float, default=ADAM["b2"], help="default: %(default)s")
    add("--weight-decay", type=float, default=ADAM["weight_decay"])
    add("--compute", choices=("float32", "bfloat16"), help="of matrix products")
    add("--implementation", help="of lowmem.step: xla, pallas, ...")
    return made.parse_args(arguments)


def make_experiment(args: argparse.Namespace) -> Experiment:
    settings = changed(
        PRESETS[args.preset or "gpt-45m"], learning_rate=args.lr, steps=args.steps,
        compute=args.compute, implementation=args.implementation,
    )  # fmt: skip
    every = args.every or (5 if settings.preset == "smoke" else 50)
    if settings.steps % every:
        raise SystemExit(f"--steps {settings.steps} is not a multiple of --every {every}")
    arguments = ADAM | {"b2": args.b2, "weight_decay": args.weight_decay}
    return Experiment(settings, load_text(settings, args.cache), every, arguments, args.seed)


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    args = parse_arguments(arguments)
    experiment = make_experiment(args)
    text, blocks = experiment.text, experiment.blocks()
    say(f"{text.last:,} tokens, {100 * text.awake:.1f} % of rows awake in a step")
    say(blocks)
    if blocks.unknown:
        raise SystemExit("some leaf's blocks are not known")
    Part(args, lambda: experiment, args.variants or VARIANTS, CURVES, None,
         start).train_all()  # fmt: skip
    say(f"done after {time.perf_counter() - start:.0f} s")
