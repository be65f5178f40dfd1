"""GaussWS: a Llama of bytes trained with noise on its weights, its bitwidths, casts of it to Table
2's formats, a search over learning rates, and what section 3 says of the noise.

    python -m benchmarks.run gaussws --part run --record     # minutes on a GPU
    python -m benchmarks.run gaussws --part rates --record   # two minutes on a GPU
    python -m benchmarks.run gaussws --part analysis --record  # seconds, anywhere
    python -m benchmarks.run gaussws --part run rates --preset cpu  # minutes on a CPU

`run` and `rates` store curves in benchmarks/results/gaussws.npz after each variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.suites.adam_mini.training import load_text
from benchmarks.suites.gaussws import analysis as gaussws_analysis
from benchmarks.suites.gaussws import casts as gaussws_casts
from benchmarks.suites.gaussws import training
from benchmarks.suites.gaussws.training import ALL, BASE, OD, PRESETS, VARIANTS, Experiment, Trained
from benchmarks.suites.switchback.bench import compile_all, record_file, say, store
from benchmarks.training import Run
from optax_lowmem import gaussws

CURVES = records.RESULTS / "gaussws.npz"
FACTORS = (1, 4, 8, 16, 32, 64)
RATES = (BASE, ALL)
Curve = dict[str, np.ndarray]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=("run", "rates", "analysis"), default=["run"])
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME",
        help=f"default: {', '.join(VARIANTS)}; of rates: {', '.join(RATES)}")  # fmt: skip
    add("--factors", nargs="+", type=float, default=FACTORS, metavar="X",
        help="on the learning rate, of rates (default: 1 4 8 16 32 64)")  # fmt: skip
    add("--steps", type=int, help="of each run; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    add("--seed", type=int, default=0, help="of weights, batches and noise")
    add("--limit", type=float, default=480, metavar="S",
        help="of a part: start no run that would end later, casts come after (default: "
        "%(default)s s)")  # fmt: skip
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer would be kept")
    add("--curves", type=Path, help=f"default: {CURVES.name} in benchmarks/results")
    add("--record", nargs="?", const=True, default=None, metavar="FILE",
        help="append records, to benchmarks/results or to a file")  # fmt: skip
    return parser.parse_args(arguments)


def keep(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Appends records where the command line asks for it."""
    if args.record is not None:
        records.append(rows, record_file(args))


# ---- Training ------------------------------------------------------------------------------------


def make_run(args: argparse.Namespace, part: str) -> Run:
    """The part's run with what the command line changes."""
    usual = "cpu" if jax.default_backend() == "cpu" else "gpu"
    preset = PRESETS[args.preset or usual][part]
    return preset.changed(steps=args.steps, attention=args.attention)


def about(experiment: Experiment, parameters: int) -> dict[str, Any]:
    """Return the settings that the runs of a part share, for the curves and the records."""
    run = experiment.run
    return dataclasses.asdict(run) | {
        "optimizer": training.OPTIMIZER,
        "bits_decay": training.BITS_DECAY,
        "bits_decayed": training.DECAYED,
        "seed": experiment.seed,
        "parameters": parameters,
        "tokens": run.tokens,
        "device": records.device(),
        "jax": jax.__version__,
        "commit": records.commit(),
    }


def rows_of(
    flags: dict[str, Any], name: str, values: dict[str, float], bench: str = "train"
) -> list[dict[str, Any]]:
    """Records of a run: metric -> value."""
    own = {key: value for key, value in flags.items() if key not in ("device", "jax", "commit")}
    case = f"{flags['preset']}/gaussws"
    return [
        records.record(bench, case, name, metric, value, _unit(metric), seed=own["seed"], flags=own)
        for metric, value in values.items()
    ]


def _unit(metric: str) -> str:
    if metric in ("tokens_per_s", "done"):
        return {"tokens_per_s": "tokens/s", "done": "steps"}[metric]
    return "bits" if metric.startswith("bits_") else "nats/byte"


def values_of(curves: Curve) -> dict[str, float]:
    """Return the values of a run's records, from the ends of its curves."""
    found = {
        "val_loss": float(curves["val_loss"][-1]),
        "least_val_loss": float(np.nanmin(curves["val_loss"])),
        "tokens_per_s": float(curves["tokens_per_s"][0]),
        "done": int(curves["step"][-1]),
    }
    if "sampled_loss" in curves:
        found["sampled_loss"] = float(curves["sampled_loss"][-1])
    for name, values in curves.items():
        if name.startswith("bits_"):  # least, mean and largest of any layer
            last = values[-1]
            found[f"{name}_mean"] = float(last[:, -2].mean())
            found[f"{name}_least"], found[f"{name}_largest"] = float(last[:, 0].min()), float(
                last[:, -3].max()
            )  # fmt: skip
            for half, of in zip(("first", "second"), np.array_split(last[:, -2], 2), strict=True):
                found[f"{name}_mean_{half}"] = float(of.mean())
    return found


class Part:
    """The runs of a part, one after the other, until the limit; stored and recorded."""

    def __init__(self, args: argparse.Namespace, part: str, names: list[str]):
        self.args, self.part, self.began = args, part, time.perf_counter()
        run = make_run(args, part)
        self.experiment = Experiment(run, load_text(run, args.cache), args.seed)
        self.programs = {
            name: (program, compilation.result())
            for name, (program, compilation) in compile_all(self.experiment, names).items()
        }
        self.flags = about(self.experiment, next(iter(self.programs.values()))[0].parameters)
        self.path = args.curves or (None if run.preset.startswith("smoke") else CURVES)
        self.runs: dict[str, Curve] = {}
        self._longest = 0.0
        size = f"{self.flags['parameters']:,} weights, {run.steps} steps of {run.tokens:,} bytes"
        say(f"{run.preset}: {size}; compiled {len(names)} variants after {self.seconds():.0f} s")

    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began

    def train(self, name: str, label: str, factor: float = 1.0) -> Trained | None:
        """A run; None where it would end too late."""
        at = self.seconds()
        if at + self._longest > self.args.limit:
            say(f"{label} is left out after {at:.0f} s")
            return None
        say(f"{label} after {at:.0f} s")
        done = self.experiment.train(self.programs[name][1], say, factor)
        self._longest = max(self._longest, self.seconds() - at)
        self.runs[label] = done.curves
        self.store()
        keep(self.args, rows_of(self.flags, label, values_of(done.curves)))
        return done

    def store(self) -> None:
        """Writes the curves that there are."""
        if self.path is not None:
            store(self.path, self.part, self.flags, self.runs)


def run_part(args: argparse.Namespace) -> dict[str, Curve]:
    """Trains the variants, then casts what they have become."""
    part = Part(args, "run", args.variants or list(VARIANTS))
    done = {name: part.train(name, name) for name in part.programs}
    found = {name: one for name, one in done.items() if one is not None}
    for name, one in found.items():
        casts = casts_of(part, name, one, found)
        if casts:
            one.curves |= {f"cast_{key}": np.asarray([loss]) for key, loss in casts.items()}
            values = {f"cast {key}": loss for key, loss in casts.items()}
            keep(args, rows_of(part.flags, name, values, "gaussws"))
            part.store()
    say("\n".join(summary(part.runs)))
    say("\n".join(said_of_casts(part.runs)))
    return part.runs


def casts_of(part: Part, name: str, one: Trained, found: dict[str, Trained]) -> dict[str, float]:
    """Losses of a run's casts; those of the base are by the bitwidths of the runs with noise."""
    whose = {"od": OD, "all": ALL} if VARIANTS[name] == BASE else {name[-4:].strip("[]"): name}
    bits = {parts: found[other].bits for parts, other in whose.items() if other in found}
    if not bits:
        return {}
    program, (_, evaluate, _) = part.programs[name]
    as_stored = gaussws_casts.stored_as(jax.eval_shape(program.start)[0])
    held_out = part.experiment.text.held_out
    return gaussws_casts.losses(one.weights, bits, _loss(evaluate, as_stored, held_out))


def _loss(evaluate: Any, as_stored: Callable[[Any], Any], held_out: Any) -> Any:
    return lambda weights: float(evaluate(as_stored(weights), held_out))


def summary(runs: dict[str, Curve]) -> list[str]:
    """Final losses against the base's, with noise, mean bitwidths, speed."""
    base = float(runs[BASE]["val_loss"][-1]) if BASE in runs else float("nan")
    lines = [f"{'':<24}{'held out':>10}{'over':>10}{'noisy':>10}{'b_t':>8}{'tokens/s':>12}"]
    for name, curves in runs.items():
        loss = float(curves["val_loss"][-1])
        noisy = float(curves.get("sampled_loss", [np.nan])[-1])
        bits = [v[-1][:, -2].mean() for key, v in curves.items() if key.startswith("bits_")]
        mean = float(np.mean(bits)) if bits else float("nan")
        lines.append(
            f"{name:<24}{loss:>10.4f}{100 * (loss / base - 1):>9.2f}%{noisy:>10.4f}{mean:>8.2f}"
            f"{float(curves['tokens_per_s'][0]):>12,.0f}"
        )
    return lines


def said_of_casts(runs: dict[str, Curve]) -> list[str]:
    """Losses of casts over those without, in percent."""
    lines = []
    for name, curves in runs.items():
        casts = {key[5:]: float(v[0]) for key, v in curves.items() if key.startswith("cast_")}
        for key, loss in casts.items():
            more = 100 * (loss / casts[gaussws_casts.CLEAN] - 1)
            lines.append(f"{name:<24}{key:<12}{loss:>10.4f}{more:>+9.2f} %")
    return lines


# ---- Learning rates ------------------------------------------------------------------------------


def rates_part(args: argparse.Namespace) -> dict[str, Curve]:
    """Both with each factor on the learning rate, from the smallest."""
    part = Part(args, "rates", args.variants or list(RATES))
    for factor in args.factors:
        for name in part.programs:
            part.train(name, f"{name} x{factor:g}", factor)
    for label, curves in part.runs.items():
        values = values_of(curves)
        say(f"{label:<24}{values['val_loss']:>10.4f}{values['least_val_loss']:>10.4f}")
    return part.runs


# ---- Section 3 -----------------------------------------------------------------------------------


def analysis(args: argparse.Namespace) -> None:
    """Equation 8's probabilities, the 0.284 of section 3.5, equation 6's bound."""
    small = args.preset == "smoke"
    rows: list[tuple[str, str, float]] = []
    for magnitude, share in gaussws_analysis.shares(args.seed, 2**16 if small else 2**24).items():
        rows.append(("equation 8", f"share of {magnitude}", share))
    exponents = (-8, -40) if small else range(-4, -25, -1)
    for exponent in exponents:
        share = gaussws_analysis.nullified(exponent)
        rows.append(("section 3.5", f"share nullified of 2^{exponent}", share))
    for to in ("bfloat16", "mxfp8_e4m3"):
        for words, more in (("", False), (", any maximum", True)):
            bits = gaussws.most_bits(to, any_maximum=more)
            for maximum in gaussws_analysis.MAXIMA:
                share = gaussws_analysis.underflow(maximum, to, bits)
                rows.append((f"equation 6{words}", f"{to}, maximum {maximum:.4g}", share))
    for case, metric, value in rows:
        say(f"{case:<26}{metric:<28}{value:.6f}")
    keep(args, [
        records.record("gaussws", case, "gaussws", metric, value, "share", seed=args.seed)
        for case, metric, value in rows
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Does the parts one after the other."""
    args, start = parse_arguments(arguments), time.perf_counter()
    for part in args.part:
        {"run": run_part, "rates": rates_part, "analysis": analysis}[part](args)
    say(f"done after {time.perf_counter() - start:.0f} s")
