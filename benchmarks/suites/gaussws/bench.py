"""GaussWS: a Llama of bytes trained with noise on its weights, its bitwidths, casts of it to Table
2's formats, a search over learning rates, and what section 3 says of the noise.

`run` and `rates` store curves in benchmarks/results/gaussws.npz after each variant.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.suites.gaussws import training
from benchmarks.suites.gaussws.training import PRESETS, End, Experiment
from benchmarks.variants import Part, built, parser, usual
from optax_lowmem import gaussws
from optax_lowmem._src.arrays import trees

CURVES = records.RESULTS / "gaussws.npz"
RUN = (*training.NOISES, training.OTHER_START)
# (exponent, mantissa) bits: Table 2's rows of b_t = 3, 4, 5, 6, and others of 4 to 8 bits
FORMATS = ((2, 1), (3, 2), (3, 3), (3, 4), (3, 1), (2, 3), (4, 3))
SIDE, SHAPE = 32, (1024, 1024)
MAXIMA = tuple(float(m) for m in np.linspace(1, 1.999, 9))  # of blocks: within a binade


def train(args: argparse.Namespace, part: str) -> None:
    names = args.variants or RUN
    if part == "rates":
        names = [name for name in training.RATES if name.rpartition(" x")[0] in names]
    make = functools.partial(built, args, Experiment, usual(PRESETS, args.preset)[part])
    trained = Part(args, make, names, CURVES, part)
    ends = dict(zip(trained.train_all(), trained.experiment.ends, strict=True))
    for name in ends if part == "run" else ():
        losses = dict(cast_losses(trained, name, ends))
        trained.runs[name] |= {f"cast_{key}": np.asarray([one]) for key, one in losses.items()}
        values = {f"cast {key}": (one, "nats/byte") for key, one in losses.items()}
        trained.record(name, values, "gaussws")
        trained.store()


def cast_losses(trained: Part, name: str, ends: dict[str, End]) -> Iterator[tuple[str, float]]:
    """`clean`, `all safe`, `all e3m4`, ...: losses of a run's weights, and with parts in formats.

    Those of the base are by the bitwidths of the runs with noise.
    """
    (weights, own), (_, evaluate) = ends[name], trained.compiled(name)
    whose = {name[-4:].strip("[]"): name} if own else {"od": training.OD, "all": training.ALL}
    like = jax.eval_shape(trained.programs[name].start)[0]
    held_out = trained.experiment.text.held_out

    def loss(weights: Any) -> float:
        # as it was compiled; formats of 7 mantissa bits at most are exact in bf16
        as_stored = jax.tree.map(lambda w, leaf: w.astype(leaf.dtype), weights, like)
        return float(evaluate(as_stored, held_out))

    yield "clean", loss(weights)
    for parts, bits in ((parts, ends[other][1]) for parts, other in whose.items() if other in ends):
        yield f"{parts} safe", loss(gaussws.safe_cast(weights, bits))
        leaves, tree = trees.named_leaves(weights), jax.tree.structure(weights)
        for to in FORMATS:
            cast = [gaussws.fake_cast(w, to) if path in bits else w for path, w in leaves]
            yield f"{parts} e{to[0]}m{to[1]}", loss(tree.unflatten(cast))


def shares(seed: int, elements: int) -> dict[int, float]:
    """Magnitude of R -> share of the elements drawn that have it."""
    side = int(np.sqrt(elements))
    r = np.abs(gaussws.draw(jax.random.key(seed), (side, side)))
    values, counts = np.unique(r, return_counts=True)
    return {int(v): int(c) / r.size for v, c in zip(values, counts, strict=True)}


def of_maxima(maximum: float, rest: jax.Array) -> jax.Array:
    """`rest`, with the maximum in the corner of each block."""
    return rest.at[::SIDE, ::SIDE].set(maximum)


def nullified(exponent: int, bits: float = 6.0, maximum: float = 1.5) -> float:
    """The share of sampled weights 2^exponent whose cast is that of 0 with the same noise (3.5)."""
    r = gaussws.draw(jax.random.key(0), SHAPE)
    weights = of_maxima(maximum, jnp.full(SHAPE, 2.0**exponent))
    found, of_zero = (
        gaussws.fake_cast(gaussws.perturb(w, bits, r), "bfloat16")
        for w in (weights, of_maxima(maximum, jnp.zeros(SHAPE)))
    )
    return float(jnp.mean(found == of_zero, where=weights != maximum))


def underflow(maximum: float, to: str, bits: float) -> float:
    """The share of noisy elements whose noise a cast rounds away, in blocks of a maximum."""
    of_weights, of_noise = jax.random.split(jax.random.key(0))
    w = of_maxima(maximum, maximum * jax.random.uniform(of_weights, SHAPE, minval=-1.0))
    r = gaussws.draw(of_noise, SHAPE)
    return float(gaussws.underflow_share(w, gaussws.perturb(w, bits, r), r, to))


def analysis(args: argparse.Namespace) -> None:
    """Equation 8's probabilities, the 0.284 of section 3.5, equation 6's bound."""
    small = args.preset == "smoke"
    of_noise = shares(args.seed, 2**16 if small else 2**24)
    exponents = (-8, -40) if small else range(-4, -25, -1)
    found = {
        "equation 8": {f"share of {m}": share for m, share in of_noise.items()},
        "section 3.5": {f"share nullified of 2^{x}": nullified(x) for x in exponents},
    }
    cases = ("", "bfloat16"), ("", "mxfp8_e4m3"), (", any maximum", "bfloat16")
    for (words, to), m in itertools.product(cases, MAXIMA):
        share = underflow(m, to, gaussws.most_bits(to, any_maximum=bool(words)))
        found.setdefault(f"equation 6{words}", {})[f"{to}, maximum {m:.4g}"] = share
    rows = [
        records.record("gaussws", case, "gaussws", metric, value, "share", seed=args.seed)
        for case, values in found.items()
        for metric, value in values.items()
    ]
    records.show(rows)
    records.keep(rows, args.record)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, 480, CURVES, RUN)
    made.add_argument("--part", nargs="+", choices=("run", "rates", "analysis"), default=["run"])
    args = made.parse_args(arguments)
    for part in args.part:
        if part == "analysis":
            analysis(args)
        else:
            train(args, part)
