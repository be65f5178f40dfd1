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
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT, records
from benchmarks.suites.switchback import variance as switchback_variance
from benchmarks.suites.switchback.training import ADAM, PRESETS, Experiment
from benchmarks.suites.switchback.variants import VARIANTS
from benchmarks.training import (
    Curve,
    Part,
    about,
    load_text,
    parser,
    rows_of,
    say,
    usual,
)

CURVES = records.RESULTS / "switchback.npz"
TRAINED = ("run", "large")
# what a large batch is told apart with; all variants of a run at a usual batch
LARGE = ["standard", "standard-other-start", "switchback-int8", "switchback-fp8", "llm_int8"]
LINEARS = ["standard", "switchback-int8-auto", "switchback-fp8-auto", "switchback-int8"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 530, CURVES)
    add = made.add_argument
    add("--part", nargs="+", choices=(*TRAINED, "variance", "llama"), default=["run"])
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME",
        help=f"of run and large: {', '.join(VARIANTS)}")  # fmt: skip
    add("--lr", type=float, help="peak learning rate; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), default="xla")
    add("--llama", default="--preset 1b --attention cudnn --steps 25", metavar="FLAGS",
        help="of examples/train_llama.py, for that part (default: %(default)s)")  # fmt: skip
    add("--linears", nargs="+", default=LINEARS, metavar="NAME", help="its --linear, one by one")
    return made.parse_args(arguments)


# ---- Training ------------------------------------------------------------------------------------


def flags_of(experiment: Any, parameters: int) -> dict[str, Any]:
    """Return the settings that the runs of a part share, for the curves and the records."""
    run, text = experiment.run, experiment.text
    more = {"tokens": run.tokens, "train_tokens": text.last}
    return about(experiment, parameters, **(dataclasses.asdict(run) | ADAM | more))


def values_of(curves: Curve, tokenizer: str) -> dict[str, tuple[float, str]]:
    """One variant's values and their units."""
    of_a_token = "nats/byte" if tokenizer == "byte" else "nats/token"
    return {
        "val_loss": (float(curves["val_loss"][-1]), of_a_token),
        "tokens_per_s": (float(curves["tokens_per_s"][0]), "tokens/s"),
        "first_features": (float(curves["features"][0][-1]), "mean magnitude"),
        "last_features": (float(curves["features"][-1][-1]), "mean magnitude"),
        "done": (int(curves["step"][-1]), "steps"),
    }


def summary(runs: dict[str, Curve]) -> list[str]:
    """Final losses against the standard's, features and speed."""
    lines = [f"{'':<30}{'held out':>10}{'over':>10}{'E|x|':>9}{'tokens/s':>14}"]
    base = float(runs["standard"]["val_loss"][-1]) if "standard" in runs else float("nan")
    for name, curves in runs.items():
        loss = float(curves["val_loss"][-1])
        lines.append(
            f"{name:<30}{loss:>10.4f}{100 * (loss / base - 1):>9.2f}%"
            f"{float(curves['features'][-1][-1]):>9.3f}{float(curves['tokens_per_s'][0]):>14,.0f}"
        )
    return lines


def train_part(args: argparse.Namespace, part: str) -> dict[str, Curve]:
    """Trains a part's variants one after the other, and stores after each."""
    run = usual(PRESETS, args.preset)[part].changed(
        steps=args.steps, learning_rate=args.lr, attention=args.attention
    )
    names = args.variants or (list(VARIANTS) if part == "run" else LARGE)
    path = None if run.preset.startswith("smoke") else CURVES

    def make() -> Experiment:
        return Experiment(run, load_text(run, args.cache), args.seed)

    return train_all(args, make, names, path, part, "switchback")


def train_all(
    args: argparse.Namespace,
    make: Callable[[], Any],
    names: list[str],
    path: Path | None,
    part: str,
    what: str,
) -> dict[str, Curve]:
    """Trains variants of an experiment, until the limit; curves go to `path`, if there is one."""
    runs = Part(args, make, names, flags_of, path, part)
    for name, (program, compiled) in runs.programs.items():
        if runs.begins(name):
            curves = runs.experiment.train(program, compiled, say)
            values = values_of(curves, runs.experiment.run.tokenizer)
            runs.add(name, curves, rows_of(runs.flags, what, name, values))
    say("\n".join(summary(runs.runs)))
    return runs.runs


# ---- Appendix D ----------------------------------------------------------------------------------


def variance(args: argparse.Namespace) -> None:
    """The error of each product in int8 against the length of its sums."""
    # 1280 and 5120 are the forward products of CLIP ViT-Huge (appendix D.3)
    lengths = sorted({*switchback_variance.LENGTHS, 1280, 5120})
    lengths = [256, 1280] if args.preset == "smoke" else lengths
    for draw in switchback_variance.DRAWS:
        for product in switchback_variance.PRODUCTS:
            for length in lengths:
                found = switchback_variance.spread("llm_int8", product, length, draw)
                case = f"variance/{product} of {length}"
                say(
                    f"{draw:<14}{product:<16}{length:>6}  error {found.error:.4g} (predicted "
                    f"{found.predicted:.4g}), of the sums' variance {found.relative:.3g}"
                )
                values = {name: getattr(found, name) for name in ("error", "predicted", "relative")}
                rows = [
                    records.record("switchback", case, draw, f"{metric}_variance", value, None,
                                   length=length)
                    for metric, value in values.items()
                ]  # fmt: skip
                records.keep(rows, args.record)


# ---- A whole model -------------------------------------------------------------------------------


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
    """Does the parts one after the other."""
    args = parse_arguments(arguments)
    start = time.perf_counter()
    for part in args.part:
        if part in TRAINED:
            train_part(args, part)
        else:
            {"variance": variance, "llama": llama}[part](args)
    say(f"done after {time.perf_counter() - start:.0f} s")
