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
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.suites.gaussws import analysis as gaussws_analysis
from benchmarks.suites.gaussws import casts as gaussws_casts
from benchmarks.suites.gaussws import training
from benchmarks.suites.gaussws.training import ALL, BASE, OD, PRESETS, VARIANTS, Experiment, Trained
from benchmarks.training import Curve, Part, about, load_text, parser, rows_of, say, usual
from optax_lowmem import gaussws

CURVES = records.RESULTS / "gaussws.npz"
FACTORS = (1, 4, 8, 16, 32, 64)
RATES = (BASE, ALL)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 480, CURVES)
    add = made.add_argument
    add("--part", nargs="+", choices=("run", "rates", "analysis"), default=["run"])
    add("--preset", choices=PRESETS, help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME",
        help=f"default: {', '.join(VARIANTS)}; of rates: {', '.join(RATES)}")  # fmt: skip
    add("--factors", nargs="+", type=float, default=FACTORS, metavar="X",
        help="on the learning rate, of rates (default: 1 4 8 16 32 64)")  # fmt: skip
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    return made.parse_args(arguments)


# ---- Training ------------------------------------------------------------------------------------


def flags_of(experiment: Experiment, parameters: int) -> dict[str, Any]:
    """Return the settings that the runs of a part share, for the curves and the records."""
    own = {"optimizer": training.OPTIMIZER, "bits_decay": training.BITS_DECAY,
           "bits_decayed": training.DECAYED, "tokens": experiment.run.tokens}  # fmt: skip
    return about(experiment, parameters, **(dataclasses.asdict(experiment.run) | own))


def rows(part: Part, name: str, values: dict[str, float], bench: str = "train") -> records.Rows:
    """Records of a run: metric -> value."""
    with_units = {metric: (value, _unit(metric)) for metric, value in values.items()}
    return rows_of(part.flags, "gaussws", name, with_units, bench)


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


def make_part(args: argparse.Namespace, part: str, names: list[str]) -> Part:
    """Read the text and compile the variants."""
    run = usual(PRESETS, args.preset)[part].changed(steps=args.steps, attention=args.attention)

    def make() -> Experiment:
        return Experiment(run, load_text(run, args.cache), args.seed)

    path = None if run.preset.startswith("smoke") else CURVES
    return Part(args, make, names, flags_of, path, part)


def train(part: Part, name: str, label: str, factor: float = 1.0) -> Trained | None:
    """A run; None where it would end too late."""
    if not part.begins(label):
        return None
    done = part.experiment.train(part.programs[name][1], say, factor)
    part.add(label, done.curves, rows(part, label, values_of(done.curves)))
    return done


def run_part(args: argparse.Namespace) -> dict[str, Curve]:
    """Trains the variants, then casts what they have become."""
    part = make_part(args, "run", args.variants or list(VARIANTS))
    done = {name: train(part, name, name) for name in part.programs}
    found = {name: one for name, one in done.items() if one is not None}
    for name, one in found.items():
        casts = casts_of(part, name, one, found)
        if casts:
            one.curves |= {f"cast_{key}": np.asarray([loss]) for key, loss in casts.items()}
            values = {f"cast {key}": loss for key, loss in casts.items()}
            records.keep(rows(part, name, values, "gaussws"), args.record)
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
    part = make_part(args, "rates", args.variants or list(RATES))
    for factor in args.factors:
        for name in part.programs:
            train(part, name, f"{name} x{factor:g}", factor)
    for label, curves in part.runs.items():
        values = values_of(curves)
        say(f"{label:<24}{values['val_loss']:>10.4f}{values['least_val_loss']:>10.4f}")
    return part.runs


# ---- Section 3 -----------------------------------------------------------------------------------


def analysis(args: argparse.Namespace) -> None:
    """Equation 8's probabilities, the 0.284 of section 3.5, equation 6's bound."""
    small = args.preset == "smoke"
    found: list[tuple[str, str, float]] = []
    for magnitude, share in gaussws_analysis.shares(args.seed, 2**16 if small else 2**24).items():
        found.append(("equation 8", f"share of {magnitude}", share))
    exponents = (-8, -40) if small else range(-4, -25, -1)
    for exponent in exponents:
        share = gaussws_analysis.nullified(exponent)
        found.append(("section 3.5", f"share nullified of 2^{exponent}", share))
    for to in ("bfloat16", "mxfp8_e4m3"):
        for words, more in (("", False), (", any maximum", True)):
            bits = gaussws.most_bits(to, any_maximum=more)
            for maximum in gaussws_analysis.MAXIMA:
                share = gaussws_analysis.underflow(maximum, to, bits)
                found.append((f"equation 6{words}", f"{to}, maximum {maximum:.4g}", share))
    for case, metric, value in found:
        say(f"{case:<26}{metric:<28}{value:.6f}")
    stored = [
        records.record("gaussws", case, "gaussws", metric, value, "share", seed=args.seed)
        for case, metric, value in found
    ]
    records.keep(stored, args.record)


def main(arguments: list[str] | None = None) -> None:
    """Does the parts one after the other."""
    args, start = parse_arguments(arguments), time.perf_counter()
    for part in args.part:
        {"run": run_part, "rates": rates_part, "analysis": analysis}[part](args)
    say(f"done after {time.perf_counter() - start:.0f} s")
