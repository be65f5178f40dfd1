"""Trains one Llama on bytes with many ways to multiply matrices, on the same batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.config import warmup_cosine
from _llama.config import Shape
from _llama.optimizer import decayed

from benchmarks.suites.switchback import variants
from benchmarks.training import Measured, Program, Run

ADAM = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}

_BIG, _SMALL, _TINY = Shape(8, 512, 1536, 8, 8, 256), Shape(4, 64, 192, 2, 2, 256), Shape(
    2, 32, 64, 2, 2, 256
)  # fmt: skip
# preset -> part -> run; a large batch is 65,536 tokens, the CLIP ViT-Huge's of appendix D.3
PRESETS = {
    "gpu": {
        "run": Run("llama-27m", _BIG, 256, 32, 2_000, 50, 1e-3, "installed", 64, "bfloat16"),
        "large": Run("llama-27m-large", _BIG, 256, 256, 400, 20, 1e-3, "installed", 8, "bfloat16"),
    },
    "cpu": {
        "run": Run("llama-tiny", _SMALL, 64, 8, 600, 20, 4e-3, "standard-library", 64, "float32"),
        "large": Run(
            "llama-tiny-large", _SMALL, 64, 64, 200, 10, 4e-3, "standard-library", 8, "float32"
        ),
    },
    "smoke": {
        "run": Run("smoke", _TINY, 16, 4, 10, 5, 1e-2, "standard-library", 2, "float32"),
        "large": Run("smoke-large", _TINY, 16, 16, 4, 2, 1e-2, "standard-library", 2, "float32"),
    },
}


class Experiment(Measured):
    """A model and its text, to be trained with one variant after another."""

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """AdamW in f32."""
        run = self.run
        tx = optax.adamw(warmup_cosine(run.learning_rate, run.steps), **ADAM, mask=decayed)
        if not variants.VARIANTS[name].clip:
            return tx
        return optax.chain(optax.clip_by_global_norm(variants.CLIP), tx)

    def lower(self, name: str) -> Program:
        """Traces `every` steps of a variant."""
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

        return self.trace_measured(model, start, take_step)
