"""COAT's Table 13 on a Llama: FP8 activations, FP8 states, and both, against bf16 and AdamW.

    python -m benchmarks.run activation_training --record                # Llama-134m, on a GPU
    python -m benchmarks.run activation_training --preset cpu --record   # a small one, minutes

All variants see the same batches, and but for one the same initial weights. Curves are stored in
benchmarks/results/coat_activations.npz after each variant.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.train import F32, LOWMEM, optimizer_step
from _llama.config import FP8, NONE, PLAIN, STANDARD, Settings, Shape
from _llama.config import PRESETS as LLAMAS
from _llama.optimizer import make_optimizer, stored_dtype

from benchmarks import records
from benchmarks.suites.switchback.training import Remedied
from benchmarks.training import (
    SMALL,
    SMOKE,
    Curve,
    Measured,
    Part,
    Program,
    Run,
    built,
    parser,
    say,
    usual,
)  # fmt: skip

CURVES = records.RESULTS / "coat_activations.npz"
PART = "run"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train."""

    says: str  # what it is, for a legend
    activations: str = STANDARD  # of the layers, as of `--activations`
    optimizer: str = PLAIN  # as of `--optimizer`
    other_start: bool = False  # whether the weights are drawn from another seed


PLAIN_RUN, FP8_A, FP8_O, FP8_OA, OTHER = (
    "standard", "fp8", "coat_adamw", "fp8-coat_adamw", "standard-other-start",
)  # fmt: skip
VARIANTS = {
    PLAIN_RUN: Variant("AdamW, 16-bit activations"),
    FP8_OA: Variant("coat_adamw, FP8 activations", FP8, "coat_adamw"),
    FP8_A: Variant("AdamW, FP8 activations", FP8),
    FP8_O: Variant("coat_adamw, 16-bit activations", optimizer="coat_adamw"),
    OTHER: Variant("AdamW, other initial weights", other_start=True),
}

# 134m with half of its preset's batch: five runs of 16,384 tokens x 2000 steps are 0.11 EFLOP
PRESETS = {
    "gpu": Run(
        "llama-134m", LLAMAS["134m"].shape, 256, 64, 2_000, 50, 1e-3, "installed", 16, "bfloat16",
        "cudnn", "bpe",
    ),
    "cpu": dataclasses.replace(
        SMALL, shape=Shape(4, 96, 256, 3, 3, 256), steps=500, held_out_batches=64,
        compute="bfloat16",
    ),
    "smoke": SMOKE,
}  # fmt: skip


def flops(run: Run) -> float:
    """Of a run: 6 for each weight of a matrix and token, and those of causal attention."""
    return run.shape.flops_per_token(run.context) * run.tokens * run.steps


class Experiment(Measured):
    """A model and its text, to be trained with one variant after another."""

    what, base = "activations", PLAIN_RUN

    def settings(self, name: str) -> Settings:
        """The run as examples/train_llama.py would have it."""
        run, chosen = self.run, VARIANTS[name]
        return Settings(
            preset=run.preset,
            optimizer=chosen.optimizer,
            shape=run.shape,
            sequence=run.context,
            batch=run.batch,
            steps=run.steps,
            learning_rate=run.learning_rate,
            text=run.text,
            remat=NONE,
            compute=run.compute,
            seed=self.seed + (1000 if chosen.other_start else 0),
            attention=run.attention,
            activations=chosen.activations,
        )

    def model(self, name: str) -> Remedied:
        """The model of a variant; its `measured` gives the loss and the sizes of features."""
        run, kept = self.run, VARIANTS[name].activations
        return Remedied(run.shape, run.compute, run.attention, activations=kept)

    def lower(self, name: str) -> Program:
        model, settings = self.model(name), self.settings(name)
        tx, plain = make_optimizer(settings), settings.optimizer == PLAIN
        own_step = optimizer_step(F32 if plain else LOWMEM, settings.implementation)

        @jax.jit
        def start() -> tuple[Any, Any]:
            dtype = functools.partial(stored_dtype, settings.optimizer)
            weights = model.weights(jax.random.key(settings.seed), dtype)
            state = tx.init(weights)
            return weights, state if plain else optax.tree.set(state, seed=jnp.uint32(self.seed))

        def take_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return own_step(tx, grads, state, params)

        return self.trace(start, model, take_step)


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    made = parser(__doc__, 530, CURVES, VARIANTS)
    made.add_argument("--batch", type=int, help="windows in a step; default: the preset's")
    args = made.parse_args(arguments)

    def make() -> Experiment:
        found = built(args, Experiment, usual(PRESETS, args.preset))
        say(f"{found.run.preset}: {flops(found.run):.3g} operations a variant")
        if args.batch is not None:  # in the case of records
            found.what += f"-b{args.batch}"
        return found

    return Part(args, make, args.variants or VARIANTS, CURVES, PART).train_all()
