"""Trains one Llama on bytes with noise on some of its matrices, on the same batches.

All variants have flash_adamw behind clipping by the global norm: bf16 weights whose other bits are
in the state, as noise is meant to be used here; without noise it is the bf16 baseline.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.config import warmup_cosine
from _llama.model import Llama
from _llama.optimizer import stored_dtype

import optax_lowmem as lowmem
from benchmarks import training
from benchmarks.suites.noise.training import VARIANTS as NOISY
from benchmarks.suites.noise.training import make_optimizer
from benchmarks.training import LLAMA_27M, SMALL, SMOKE, Curve, Program, Run, Say, Text
from optax_lowmem import gaussws

OPTIMIZER = "flash_adamw"
BASE, OD, ALL, DIFFQ = "no noise", "gaussws[od]", "gaussws[all]", "diffq[all]"
OTHER_START = "no noise, other start"
# name -> what has noise: as of noise_training; runs that differ by chance alone have the base's
VARIANTS = {name: name for name in (BASE, ALL, OD, DIFFQ)} | {OTHER_START: BASE}
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# What AdamW's decay leaves of b_i is exp(-DECAYED) where it has no gradient. The paper says no
# rate; with its 600,000 steps, a mean rate of 3e-4 and a decay of 0.1 it would be exp(-18), with
# the 5000 steps of here and a rate of 1e-3 exp(-0.5): b_t would stay over 5.2.
DECAYED = 4.0
# a larger decay at a smaller rate than 0.1: b_i walks less at random
BITS_DECAY = 0.3

EDGES = np.linspace(2.0, 8.0, 61)  # of histograms of b_t
STATISTICS = ("min", "5 %", "25 %", "50 %", "75 %", "95 %", "max", "mean", "std")

_RUN = dataclasses.replace(LLAMA_27M, steps=5_000, attention="cudnn")
# preset -> part -> run; `rates` is trained once with each factor on its rate
PRESETS = {
    name: {"run": run, "rates": dataclasses.replace(run, preset=f"{run.preset}-rates", **rates)}
    for name, run, rates in (
        ("gpu", _RUN, {"steps": 400, "every": 20, "held_out_batches": 16}),
        ("cpu", SMALL, {"steps": 200, "every": 10, "held_out_batches": 16}),
        ("smoke", SMOKE, {"steps": 5}),
    )
}


def bits_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW for b_i on the weights' own schedule, whose decay takes b_i to exp(-DECAYED)."""
    mean = float(jnp.mean(jax.vmap(warmup_cosine(1.0, steps))(jnp.arange(steps))))
    peak = DECAYED / (BITS_DECAY * mean * steps)
    return optax.adamw(warmup_cosine(peak, steps), weight_decay=BITS_DECAY)


def statistics(bits: np.ndarray) -> np.ndarray:
    """[layers, STATISTICS] of b_t [layers, rows, columns]."""
    flat = bits.reshape(len(bits), -1)
    quantiles = np.quantile(flat, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1], axis=1)
    return np.stack([*quantiles, flat.mean(1), flat.std(1)], axis=1)


def histograms(bits: np.ndarray) -> np.ndarray:
    """[layers, bins] counts of b_t; what is outside `EDGES` is in the first or the last bin."""
    clipped = np.clip(bits.reshape(len(bits), -1), EDGES[0], EDGES[-1])
    return np.stack([np.histogram(layer, EDGES)[0] for layer in clipped])


@dataclasses.dataclass
class Trained:
    """Results of a run: curves, f32 weights without noise, and b_t by path."""

    curves: Curve
    weights: Any
    bits: dict[str, jax.Array]


class Experiment(training.Experiment):
    """A model and its text, to be trained with one variant after another."""

    what, base = "gaussws", BASE

    def __init__(self, run: Run, text: Text, seed: int):
        super().__init__(run, text, seed)
        self.model = Llama(run.shape, run.compute, run.attention)
        self.of_bits = bits_optimizer(run.steps)

    def flags(self) -> dict[str, Any]:
        return super().flags() | {
            "optimizer": OPTIMIZER, "bits_decay": BITS_DECAY, "bits_decayed": DECAYED,
        }  # fmt: skip

    def optimizer(self, name: str, rate: Any) -> optax.GradientTransformation:
        """A variant's, with a peak learning rate that may be traced."""
        schedule, noisy = warmup_cosine(1.0, self.run.steps), VARIANTS[name]
        more = {} if NOISY[noisy] is None else {"bits_optimizer": self.of_bits}
        peak = jnp.float32(rate)
        return make_optimizer(
            OPTIMIZER, noisy, self.run.shape, lambda count: peak * schedule(count), **more
        )

    def lower(self, name: str) -> Program:
        """Traces `every` steps of a variant; its steps take the peak learning rate last."""
        seed = self.seed + (1000 if name == OTHER_START else 0)

        @jax.jit
        def start() -> tuple[Any, Any]:
            weights = self.model.weights(jax.random.key(seed), lambda path: jnp.float32)
            tx = self.optimizer(name, 0.0)
            return lowmem.init(
                tx, weights, lambda path, leaf: stored_dtype(OPTIMIZER, path), seed=self.seed
            )

        def take_step(grads: Any, state: Any, params: Any, rate: jax.Array) -> tuple[Any, Any]:
            return lowmem.step(self.optimizer(name, rate), grads, state, params)

        rate = jax.ShapeDtypeStruct((), np.float32)
        traced = self.trace(start, self.model, take_step, rate)
        return dataclasses.replace(traced, first=start.lower())  # it makes the first noise

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        bits, held_out = _bits(state), self.text.held_out
        found = {"val_loss": float(evaluate(gaussws.clean_params(params, state), held_out))}
        if bits:
            found["sampled_loss"] = float(evaluate(params, held_out))
        for path, of_leaf in jax.device_get(bits).items():
            kind = path.split("/")[-2]
            found[f"bits_{kind}"] = statistics(of_leaf)
            found[f"histogram_{kind}"] = histograms(of_leaf)
        return found

    def train_at(self, compiled: tuple[Any, ...], say: Say, factor: float = 1.0) -> Trained:
        """Trains from the start, at `factor` times the run's learning rate."""
        (take, evaluate, start), rate = compiled, np.float32(factor * self.run.learning_rate)
        curves, params, state = self.follow(start, lambda *args: take(*args, rate), evaluate, say)
        return Trained(curves, lowmem.master_params(params, state), _bits(state))

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        least = float(np.nanmin(curves["val_loss"]))
        found = super().values(curves, program) | {"least_val_loss": (least, "nats/byte")}
        for name in (name for name in curves if name.startswith("bits_")):
            last = curves[name][-1]  # least, mean and largest of any layer
            means = np.array_split(last[:, STATISTICS.index("mean")], 2)
            bits = {
                "mean": np.concatenate(means).mean(),
                "least": last[:, 0].min(),
                "largest": last[:, STATISTICS.index("max")].max(),
                "mean_first": means[0].mean(),
                "mean_second": means[1].mean(),
            }
            found |= {f"{name}_{what}": (float(value), "bits") for what, value in bits.items()}
        return found


def _bits(state: Any) -> dict[str, jax.Array]:
    """b_t by path; none without noise."""
    try:
        return gaussws.bitwidths(state)
    except ValueError:
        return {}
