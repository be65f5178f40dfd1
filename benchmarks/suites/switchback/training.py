"""Trains one Llama on bytes with many ways to multiply matrices, on the same batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.config import warmup_cosine
from _llama.config import Shape
from _llama.optimizer import decayed

from benchmarks.suites.switchback import variants
from benchmarks.training import ADAM, LLAMA_27M, SMALL, SMOKE, Measured, Program

_TINY = dataclasses.replace(
    SMALL, preset="llama-tiny", shape=Shape(4, 64, 192, 2, 2, 256), steps=600, held_out_batches=64
)
# preset -> part -> run; a large batch is 65,536 tokens, the CLIP ViT-Huge's of appendix D.3
PRESETS = {
    name: {"run": run, "large": dataclasses.replace(run, preset=f"{run.preset}-large", **large)}
    for name, run, large in (
        ("gpu", LLAMA_27M, {"batch": 256, "steps": 400, "every": 20, "held_out_batches": 8}),
        ("cpu", _TINY, {"batch": 64, "steps": 200, "every": 10, "held_out_batches": 8}),
        ("smoke", SMOKE, {"batch": 16, "steps": 4, "every": 2}),
    )
}


class Experiment(Measured):
    """A model and its text, to be trained with one variant after another."""

    what, base = "switchback", "standard"

    def optimizer(self, name: str) -> optax.GradientTransformation:
        run = self.run
        tx = optax.adamw(warmup_cosine(run.learning_rate, run.steps), **ADAM, mask=decayed)
        if not variants.VARIANTS[name].clip:
            return tx
        return optax.chain(optax.clip_by_global_norm(variants.CLIP), tx)

    def lower(self, name: str) -> Program:
        run, tx = self.run, self.optimizer(name)
        model = variants.model(name, run.shape, run.compute, run.attention)
        key = self.seed + (1000 if variants.VARIANTS[name].other_start else 0)

        @jax.jit
        def start() -> tuple[Any, Any]:
            weights = model.weights(jax.random.key(key), lambda path: jnp.float32)
            return weights, tx.init(weights)

        def take_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return self.trace(start, model, take_step)
