"""Q-Adam-mini's Figures 3, 5, 6, 7 and 8 on a GPT: losses and norms under each way to keep m and v.

    python -m benchmarks.run adam_mini --record              # minutes on a GPU
    python -m benchmarks.run adam_mini --smoke               # a tiny model, anywhere
    python -m benchmarks.run adam_mini --variants adam_mini q_adam_mini --steps 20000

Untied embedding and head of 32,000 rows, of which a batch of 2,048 tokens wakes about a fiftieth.
The curves go to benchmarks/results/q_adam_mini.npz after each variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from benchmarks.claims.q_adam_mini import TABLE_1
from benchmarks.curves import CURVES
from benchmarks.suites.adam_mini import variants
from benchmarks.suites.adam_mini.training import PRESETS, Experiment
from benchmarks.training import Curve, Part, Program, about, load_text, parser, rows_of, say


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 570, CURVES)
    add = made.add_argument
    add("--smoke", action="store_true", help="a tiny model and 60 steps; stores nothing by itself")
    add("--variants", nargs="+", choices=variants.VARIANTS, default=list(variants.VARIANTS))
    add("--every", type=int, help="steps of a call, and between logged norms (default: 50)")
    add("--lr", type=float, help="peak learning rate (default: 1e-3)")
    add("--b2", type=float, default=variants.ADAM["b2"], help="default: %(default)s")
    add("--weight-decay", type=float, default=variants.ADAM["weight_decay"])
    add("--compute", choices=("float32", "bfloat16"), help="of matrix products")
    add("--implementation", help="of lowmem.step: xla, pallas, ...")
    return made.parse_args(arguments)


def make_experiment(args: argparse.Namespace) -> Experiment:
    """The model and its text."""
    preset = PRESETS["smoke" if args.smoke else "gpt-45m"]
    names = {"learning_rate": args.lr, "steps": args.steps, "compute": args.compute,
             "implementation": args.implementation}  # fmt: skip
    given = {name: value for name, value in names.items() if value is not None}
    settings = dataclasses.replace(preset, **given)
    every = args.every or (5 if args.smoke else 50)
    if settings.steps % every:
        raise SystemExit(f"--steps {settings.steps} is not a multiple of --every {every}")
    arguments = variants.ADAM | {"b2": args.b2, "weight_decay": args.weight_decay}
    return Experiment(settings, load_text(settings, args.cache), every, arguments, args.seed)


def flags_of(experiment: Experiment, parameters: int) -> dict[str, Any]:
    """Return the settings that all runs share, for the curves and the records."""
    settings = dataclasses.asdict(experiment.settings)
    del settings["optimizer"]
    adam = {name: value for name, value in experiment.arguments.items() if name != "mask"}
    text = experiment.text
    more = {"vocab": text.vocab, "train_tokens": text.last, "awake_rows": text.awake}
    return about(experiment, parameters, **(settings | adam | more))


def values_of(curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
    """One variant's values and their units."""
    return {
        "val_loss": (float(curves["val_loss"][-1]), "nats/token"),
        "embedding_norm": (float(curves["embedding_norm"][-1]), "norm"),
        "mlp_norm": (float(curves["mlp_norm"][-1]), "norm"),
        "state_bytes_per_param": (program.state_bytes / program.parameters, "bytes"),
    }


def summary(runs: dict[str, Curve]) -> list[str]:
    """Final values, and how far they are from Adam-mini's and AdamW's."""
    last = {
        name: {key: float(values[-1]) for key, values in curves.items()}
        for name, curves in runs.items()
    }
    lines = [f"{'':<28}{'held out':>10}{'x AdamW':>9}{'x mini':>9}{'|embed|':>10}{'x mini':>9}"]
    for name, values in last.items():
        mini, adamw = last.get("adam_mini", {}), last.get("adamw", {})

        def ratio(key: str, to: dict[str, float], values: dict[str, float] = values) -> str:
            return f"{values[key] / to[key]:>9.4f}" if to else f"{'':>9}"

        lines.append(
            f"{name:<28}{values['val_loss']:>10.4f}{ratio('val_loss', adamw)}"
            f"{ratio('val_loss', mini)}{values['embedding_norm']:>10.3f}"
            f"{ratio('embedding_norm', mini)}"
        )
    rows = TABLE_1.items()
    paper = ", ".join(f"{size} {ours / adamw:.4f}" for size, (adamw, _, ours) in rows)
    return [*lines, f"Q-Adam-mini's Table 1, over AdamW: {paper}"]


def train_all(args: argparse.Namespace, experiment: Experiment, began: float) -> dict[str, Curve]:
    """Trains the variants one after the other, and stores after each."""
    path = None if args.smoke else CURVES
    part = Part(args, lambda: experiment, args.variants, flags_of, path, began=began)
    for name, (program, compiled) in part.programs.items():
        if part.begins(name):
            curves = part.experiment.train(program, compiled, say)
            rows = rows_of(part.flags, "q_adam_mini", name, values_of(curves, program))
            part.add(name, curves, rows)
    return part.runs


def main(arguments: list[str] | None = None) -> None:
    """Trains and prints; `--record` also stores records."""
    start = time.perf_counter()
    args = parse_arguments(arguments)
    experiment = make_experiment(args)
    text, blocks = experiment.text, experiment.blocks()
    share, seconds = 100 * text.awake, time.perf_counter() - start
    say(f"{text.last:,} tokens, {share:.1f} % of rows awake in a step; after {seconds:.0f} s")
    say(blocks)
    if blocks.unknown:
        raise SystemExit("some leaf's blocks are not known")
    say("\n".join(summary(train_all(args, experiment, start))))
    say(f"done after {time.perf_counter() - start:.0f} s")
