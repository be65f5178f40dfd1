"""Trains one Llama on bytes with many ways to multiply matrices, on the same batches.

The text lies on the device and a call takes many steps: Python costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import switchback_variants as variants
from benchmarks.adam_mini_training import Text, offsets

# on the path since adam_mini_training
from _gpt.config import warmup_cosine  # isort: skip
from _llama.config import Shape  # isort: skip
from _llama.optimizer import decayed  # isort: skip

ADAM = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
VALIDATIONS = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training; what `adam_mini_training` reads of a run has its names.

    Attributes:
      preset: its name.
      shape: of the model.
      context: bytes in a window.
      batch: windows in a step.
      steps: of the run.
      every: steps of a call.
      learning_rate: the peak.
      text: which.
      held_out_batches: of an evaluation.
      compute: dtype of what is not in 8 bits.
      attention: `xla` or `cudnn`.
    """

    preset: str
    shape: Shape
    context: int
    batch: int
    steps: int
    every: int
    learning_rate: float
    text: str
    held_out_batches: int
    compute: str
    attention: str = "xla"
    tokenizer: str = "byte"

    @property
    def tokens(self) -> int:
        """In a step: the length of the sums of a weight's gradient."""
        return self.batch * self.context


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


@dataclasses.dataclass(frozen=True)
class Program:
    """One variant: its start, its steps and its evaluation, to be compiled."""

    start: Callable[[], tuple[Any, Any]]
    steps: jax.stages.Lowered
    evaluate: jax.stages.Lowered
    parameters: int

    def compile(self) -> tuple[Any, Any]:
        """The steps and the evaluation."""
        return self.steps.compile(), self.evaluate.compile()


class Experiment:
    """A model and its text, to be trained with one variant after another."""

    def __init__(self, run: Run, text: Text, seed: int):
        self.run, self.text, self.seed = run, text, seed
        self.offsets = offsets(run, text, seed).reshape(-1, run.every, run.batch)

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

        def steps(params: Any, state: Any, tokens: jax.Array, starts: jax.Array) -> Any:
            def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
                params, state = carry
                windows = tokens[at[:, None] + jnp.arange(run.context + 1)[None]]
                loss, grads = jax.value_and_grad(model)(params, windows.astype(jnp.int32))
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), loss

            (params, state), losses = jax.lax.scan(step, (params, state), starts)
            return params, state, jnp.mean(losses)

        def evaluate(params: Any, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, sizes = jax.lax.map(functools.partial(model.measured, params), batches)
            return losses.mean(), sizes.mean(0)

        shapes = jax.eval_shape(start)
        of_starts = jax.ShapeDtypeStruct(self.offsets.shape[1:], np.int32)
        return Program(
            start,
            jax.jit(steps, donate_argnums=(0, 1)).lower(*shapes, self.text.tokens, of_starts),
            jax.jit(evaluate).lower(shapes[0], self.text.held_out),
            sum(leaf.size for leaf in jax.tree.leaves(shapes[0])),
        )

    def train(
        self, program: Program, compiled: tuple[Any, Any], say: Callable[[str], None]
    ) -> dict[str, np.ndarray]:
        """Trains from the start: name -> curve. A run that becomes NaN ends there.

        `tokens_per_s` is the median over calls, without evaluations.
        """
        (steps, evaluate), held_out = compiled, self.text.held_out
        params, state = program.start()
        loss, sizes = jax.device_get(evaluate(params, held_out))
        found: dict[str, list[Any]] = {
            "step": [], "train_loss": [], "val_step": [0], "val_loss": [loss], "features": [sizes],
        }  # fmt: skip
        seconds, calls = [], len(self.offsets)
        validate = max(1, calls // VALIDATIONS)
        for index, starts in enumerate(self.offsets, start=1):
            began = time.perf_counter()
            params, state, loss = steps(params, state, self.text.tokens, starts)
            found["train_loss"].append(float(loss))
            seconds.append(time.perf_counter() - began)
            found["step"].append(index * self.run.every)
            if index % validate and index < calls and np.isfinite(found["train_loss"][-1]):
                continue
            loss, sizes = jax.device_get(evaluate(params, held_out))
            found["val_step"].append(found["step"][-1])
            found["val_loss"].append(loss)
            found["features"].append(sizes)
            ms = 1e3 * float(np.median(seconds)) / self.run.every
            say(f"{found['step'][-1]:6d}  held out {loss:.4f}  {ms:.2f} ms a step")
            if not np.isfinite(loss):
                break
        curves = {name: np.asarray(values) for name, values in found.items()}
        rate = self.run.tokens * self.run.every / np.median(seconds[1:] or seconds)
        return curves | {"tokens_per_s": np.asarray([rate])}
