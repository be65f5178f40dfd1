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
import functools
import time

import jax
import numpy as np

from benchmarks import records
from benchmarks.suites.gaussws import analysis as gaussws_analysis
from benchmarks.suites.gaussws import casts as gaussws_casts
from benchmarks.suites.gaussws.training import ALL, BASE, OD, PRESETS, VARIANTS, Experiment, Trained
from benchmarks.training import Curve, Part, built, parser, say, usual
from optax_lowmem import gaussws

CURVES = records.RESULTS / "gaussws.npz"
FACTORS = (1, 4, 8, 16, 32, 64)
RATES = (BASE, ALL)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 480, CURVES, VARIANTS)
    add = made.add_argument
    add("--part", nargs="+", choices=("run", "rates", "analysis"), default=["run"])
    add("--factors", nargs="+", type=float, default=FACTORS, metavar="X",
        help="on the learning rate, of rates (default: 1 4 8 16 32 64)")  # fmt: skip
    return made.parse_args(arguments)


def make_part(args: argparse.Namespace, part: str, names: tuple[str, ...]) -> Part:
    make = functools.partial(built, args, Experiment, usual(PRESETS, args.preset)[part])
    return Part(args, make, args.variants or names, CURVES, part)


def train(part: Part, name: str, label: str, factor: float = 1.0) -> Trained | None:
    """A run; None where it would end too late."""
    if not part.begins(label):
        return None
    program, compiled = part.programs[name]
    done = part.experiment.train_at(compiled, say, factor)
    part.add(label, done.curves, part.experiment.values(done.curves, program))
    return done


def run_part(args: argparse.Namespace) -> dict[str, Curve]:
    """Trains the variants, then casts what they have become."""
    part = make_part(args, "run", tuple(VARIANTS))
    done = {name: train(part, name, name) for name in part.programs}
    found = {name: one for name, one in done.items() if one is not None}
    for name, one in found.items():
        casts = casts_of(part, name, one, found)
        one.curves |= {f"cast_{key}": np.asarray([loss]) for key, loss in casts.items()}
        values = {f"cast {key}": (loss, "nats/byte") for key, loss in casts.items()}
        part.record(name, values, "gaussws")
        part.store()
    say("\n".join(part.summary()))
    return part.runs


def casts_of(part: Part, name: str, one: Trained, found: dict[str, Trained]) -> dict[str, float]:
    """Losses of a run's casts; those of the base are by the bitwidths of the runs with noise."""
    whose = {"od": OD, "all": ALL} if VARIANTS[name] == BASE else {name[-4:].strip("[]"): name}
    bits = {parts: found[other].bits for parts, other in whose.items() if other in found}
    program, (_, evaluate, _) = part.programs[name]
    as_stored = gaussws_casts.stored_as(jax.eval_shape(program.start)[0])
    held_out = part.experiment.text.held_out

    def loss(weights: object) -> float:
        return float(evaluate(as_stored(weights), held_out))

    return gaussws_casts.losses(one.weights, bits, loss) if bits else {}


def rates_part(args: argparse.Namespace) -> dict[str, Curve]:
    """Both with each factor on the learning rate, from the smallest."""
    part = make_part(args, "rates", RATES)
    for factor in args.factors:
        for name in part.programs:
            train(part, name, f"{name} x{factor:g}", factor)
    say("\n".join(part.summary()))
    return part.runs


def analysis(args: argparse.Namespace) -> None:
    """Equation 8's probabilities, the 0.284 of section 3.5, equation 6's bound."""
    small = args.preset == "smoke"
    shares = gaussws_analysis.shares(args.seed, 2**16 if small else 2**24)
    exponents = (-8, -40) if small else range(-4, -25, -1)
    found = {
        "equation 8": {f"share of {m}": share for m, share in shares.items()},
        "section 3.5": {
            f"share nullified of 2^{x}": gaussws_analysis.nullified(x) for x in exponents
        },
    }
    for to in ("bfloat16", "mxfp8_e4m3"):
        for words, more in (("", False), (", any maximum", True)):
            bits = gaussws.most_bits(to, any_maximum=more)
            found.setdefault(f"equation 6{words}", {}).update(
                (f"{to}, maximum {m:.4g}", gaussws_analysis.underflow(m, to, bits))
                for m in gaussws_analysis.MAXIMA
            )
    rows = [
        records.record("gaussws", case, "gaussws", metric, value, "share", seed=args.seed)
        for case, values in found.items()
        for metric, value in values.items()
    ]
    records.show(rows)
    records.keep(rows, args.record)


def main(arguments: list[str] | None = None) -> None:
    args, start = parse_arguments(arguments), time.perf_counter()
    for part in args.part:
        {"run": run_part, "rates": rates_part, "analysis": analysis}[part](args)
    say(f"done after {time.perf_counter() - start:.0f} s")
