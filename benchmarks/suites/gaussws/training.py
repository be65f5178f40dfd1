"""Trains one Llama on bytes with noise on some of its matrices, on the same batches.

All variants have flash_adamw behind clipping by the global norm: bf16 weights whose other bits are
in the state, as noise is meant to be used here; without noise it is the bf16 baseline.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.config import warmup_cosine

import optax_lowmem as lowmem
from benchmarks import llama
from benchmarks.claims.gaussws import ALL, BASE, DIFFQ, OD, OTHER_START
from benchmarks.llama import Variant
from benchmarks.training import LLAMA_27M, SMALL, SMOKE, Curve, Program
from optax_lowmem import gaussws

OPTIMIZER = "flash_adamw"
# name -> the parts with noise, and which noise
NOISES = {BASE: None, ALL: ("all", "gaussws"), OD: ("od", "gaussws"), DIFFQ: ("all", "diffq")}
FACTORS = (1, 4, 8, 16, 32, 64)  # on the learning rate
RATES = [f"{name} x{factor}" for factor in FACTORS for name in (BASE, ALL)]

# What AdamW's decay leaves of b_i is exp(-DECAYED) where it has no gradient. The paper says no
# rate; with its 600,000 steps, a mean rate of 3e-4 and a decay of 0.1 it would be exp(-18), with
# the 5000 steps of here and a rate of 1e-3 exp(-0.5): b_t would stay over 5.2.
DECAYED = 4.0
# a larger decay at a smaller rate than 0.1: b_i walks less at random
BITS_DECAY = 0.3

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


def variants(optimizer: str) -> dict[str, Variant]:
    found = {name: Variant(optimizer=optimizer, noise=noise) for name, noise in NOISES.items()}
    found[OTHER_START] = dataclasses.replace(found[BASE], other_start=True)
    for name in RATES:
        noisy, _, factor = name.rpartition(" x")
        found[name] = dataclasses.replace(found[noisy], rate=float(factor))
    return found


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


End = tuple[Any, dict[str, jax.Array]]  # of a run: f32 weights without noise, and b_t by path


class Experiment(llama.Experiment):
    """A Llama with noise on none or some of its weights; `ends` are those of the runs so far."""

    what, base = "gaussws", BASE

    def __init__(self, *args: Any, optimizer: str | None = None):
        super().__init__(*args)
        self.variants = variants(optimizer or OPTIMIZER)
        self.of_bits, self.ends = bits_optimizer(self.run.steps), list[End]()

    def flags(self) -> dict[str, Any]:
        own = {"optimizer": OPTIMIZER, "bits_decay": BITS_DECAY, "bits_decayed": DECAYED}
        return super().flags() | own

    def optimizer(self, name: str) -> optax.GradientTransformation:
        return super().optimizer(name, bits_optimizer=self.of_bits)

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        bits, found = bitwidths(state), super().look(evaluate, params, state)
        if bits:
            clean = gaussws.clean_params(params, state)
            found |= {"sampled_loss": found["val_loss"]} | super().look(evaluate, clean, state)
        for path, of_leaf in jax.device_get(bits).items():
            found[f"bits_{path.split('/')[-2]}"] = statistics(of_leaf)
        return found

    def follow(self, *how: Any) -> tuple[Curve, Any, Any]:
        curves, params, state = super().follow(*how)
        self.ends.append((lowmem.master_params(params, state), bitwidths(state)))
        return curves, params, state

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        least = float(np.nanmin(curves["val_loss"]))
        found = super().values(curves, program) | {"least_val_loss": (least, "nats/byte")}
        for name in (name for name in curves if name.startswith("bits_")):
            of = dict(zip(STATISTICS, curves[name][-1].T, strict=True))  # by layer
            bits = {"mean": of["mean"].mean(), "least": of["min"].min(), "largest": of["max"].max()}
            halves = zip(("mean_first", "mean_second"), np.array_split(of["mean"], 2), strict=True)
            bits |= {half: means.mean() for half, means in halves}
            found |= {f"{name}_{what}": (float(value), "bits") for what, value in bits.items()}
        return found


def bitwidths(state: Any) -> dict[str, jax.Array]:
    """b_t by path; none without noise."""
    try:
        return gaussws.bitwidths(state)
    except ValueError:
        return {}
