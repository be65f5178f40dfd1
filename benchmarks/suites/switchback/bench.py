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
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import ROOT, records
from benchmarks.curves import Curves, load
from benchmarks.suites.adam_mini.training import load_text
from benchmarks.suites.switchback import variance as switchback_variance
from benchmarks.suites.switchback.training import ADAM, PRESETS, Experiment, Program, Run
from benchmarks.suites.switchback.variants import VARIANTS

CURVES = records.RESULTS / "switchback.npz"
TRAINED = ("run", "large")
# what a large batch is told apart with; all variants of a run at a usual batch
LARGE = ["standard", "standard-other-start", "switchback-int8", "switchback-fp8", "llm_int8"]
LINEARS = ["standard", "switchback-int8-auto", "switchback-fp8-auto", "switchback-int8"]
say = functools.partial(print, flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=(*TRAINED, "variance", "llama"), default=["run"])
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME",
        help=f"of run and large: {', '.join(VARIANTS)}")  # fmt: skip
    add("--steps", type=int, help="of each run; default: the preset's")
    add("--lr", type=float, help="peak learning rate; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), default="xla")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--limit", type=float, default=530, metavar="S",
        help="start no variant that would end later (default: %(default)s s)")  # fmt: skip
    add("--llama", default="--preset 1b --attention cudnn --steps 25", metavar="FLAGS",
        help="of examples/train_llama.py, for that part (default: %(default)s)")  # fmt: skip
    add("--linears", nargs="+", default=LINEARS, metavar="NAME", help="its --linear, one by one")
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer would be kept")
    add("--curves", type=Path, help=f"default: {CURVES.name} in benchmarks/results")
    add("--record", nargs="?", const=True, default=None, metavar="FILE",
        help="append records, to benchmarks/results or to a file")  # fmt: skip
    return parser.parse_args(arguments)


def record_file(args: argparse.Namespace) -> Path | None:
    """Return the file to append records to; None: the device's file."""
    return None if args.record is True else Path(args.record)


# ---- Training ------------------------------------------------------------------------------------


def make_run(args: argparse.Namespace, part: str) -> Run:
    """The part's run with what the command line changes."""
    usual = "cpu" if jax.default_backend() == "cpu" else "gpu"
    preset = PRESETS[args.preset or usual][part]
    return preset.changed(steps=args.steps, learning_rate=args.lr, attention=args.attention)


def about(experiment: Experiment, parameters: int) -> dict[str, Any]:
    """Return the settings that the runs of a part share, for the curves and the records."""
    run, text = experiment.run, experiment.text
    return dataclasses.asdict(run) | ADAM | {
        "seed": experiment.seed,
        "parameters": parameters,
        "tokens": run.tokens,
        "train_tokens": text.last,
        "device": records.device(),
        "jax": jax.__version__,
        "commit": records.commit(),
    }  # fmt: skip


def store(path: Path, part: str, flags: dict[str, Any], runs: dict[str, Any]) -> None:
    """Writes a part's curves beside those of the others; of other settings, it starts anew."""
    found = load(path) if path.exists() else Curves({}, {})
    same = found.about.get(part) == flags
    kept = {k: v for k, v in found.runs.items() if same or k.partition("/")[0] != part}
    added = {f"{part}/{name}": curves for name, curves in runs.items()}
    Curves(found.about | {part: flags}, kept | added).save(path)


def rows_of(
    name: str, curves: dict[str, np.ndarray], flags: dict[str, Any], what: str = "switchback"
) -> list[dict]:
    """One variant's records."""
    of_a_token = "nats/byte" if flags["tokenizer"] == "byte" else "nats/token"
    values = {
        "val_loss": (float(curves["val_loss"][-1]), of_a_token),
        "tokens_per_s": (float(curves["tokens_per_s"][0]), "tokens/s"),
        "first_features": (float(curves["features"][0][-1]), "mean magnitude"),
        "last_features": (float(curves["features"][-1][-1]), "mean magnitude"),
        "done": (int(curves["step"][-1]), "steps"),
    }
    own = {key: value for key, value in flags.items() if key not in ("device", "jax", "commit")}
    case = f"{flags['preset']}/{what}"
    return [
        records.record("train", case, name, metric, value, unit, seed=own["seed"], flags=own)
        for metric, (value, unit) in values.items()
    ]


def summary(runs: dict[str, dict[str, np.ndarray]]) -> list[str]:
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


def compile_all(experiment: Experiment, names: list[str]) -> dict[str, tuple[Program, Future]]:
    """Traces the variants one by one and compiles them side by side; returns when they have."""
    with ThreadPoolExecutor() as pool:
        return {
            name: (program, pool.submit(program.compile))
            for name, program in ((name, experiment.lower(name)) for name in names)
        }


def train_part(args: argparse.Namespace, part: str) -> dict[str, dict[str, np.ndarray]]:
    """Trains a part's variants one after the other, and stores after each."""
    run = make_run(args, part)
    names = args.variants or (list(VARIANTS) if part == "run" else LARGE)

    def make() -> Experiment:
        return Experiment(run, load_text(run, args.cache), args.seed)

    path = args.curves or (None if run.preset.startswith("smoke") else CURVES)
    return train_all(make, names, args, part, path)


def train_all(
    make: Callable[[], Experiment],
    names: list[str],
    args: argparse.Namespace,
    part: str,
    path: Path | None,
    what: str = "switchback",
) -> dict[str, dict[str, np.ndarray]]:
    """Trains variants of an experiment, until the limit; curves go to `path`, if there is one."""
    start, experiment = time.perf_counter(), make()
    run = experiment.run
    compiled = compile_all(experiment, names)
    flags = about(experiment, next(iter(compiled.values()))[0].parameters)
    seconds = time.perf_counter() - start
    size = f"{flags['parameters']:,} weights, {run.steps} steps of {run.tokens:,} {run.tokenizer}s"
    say(f"{run.preset}: {size}; compiled {len(names)} variants after {seconds:.0f} s")
    runs: dict[str, dict[str, np.ndarray]] = {}
    longest = 0.0
    for name, (program, compilation) in compiled.items():
        began = time.perf_counter()
        if began - start + longest > args.limit:
            say(f"{name} is left out after {began - start:.0f} s")
            continue
        say(f"{name} after {began - start:.0f} s")
        runs[name] = experiment.train(program, compilation.result(), say)
        longest = max(longest, time.perf_counter() - began)
        if path is not None:
            store(path, part, flags, runs)
        if args.record is not None:
            records.append(rows_of(name, runs[name], flags, what), record_file(args))
    say("\n".join(summary(runs)))
    return runs


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
                if args.record is not None:
                    records.append(rows, record_file(args))


# ---- A whole model -------------------------------------------------------------------------------


def llama(args: argparse.Namespace) -> None:
    """examples/train_llama.py with each --linear, in processes of their own."""
    flags = args.llama.split()
    if args.record is not None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # naming the device takes it
        flags += ["--record", str(records.append([], record_file(args)))]
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
