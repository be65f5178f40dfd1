"""Trains a Llama on bytes that lie on the device, many steps a call: Python costs nothing.

What `switchback_training`, `gaussws_training` and `activation_training` share.
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
from _llama.config import Shape

from benchmarks.suites.adam_mini.training import Text

VALIDATIONS = 10
Look = Callable[[Any, Any], dict[str, Any]]  # (weights, state) -> curve -> its value now
Say = Callable[[str], None]


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

    @property
    def vocab(self) -> int:
        """Of a tokenizer that is trained."""
        return self.shape.vocab

    def changed(self, **given: Any) -> Run:
        """With what a command line gives; None: as it is."""
        own = dataclasses.replace(self, **{k: v for k, v in given.items() if v is not None})
        if own.steps % own.every:
            raise SystemExit(f"--steps {own.steps} is not a multiple of {own.every}, a call's")
        return own


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


def many_steps(loss: Any, take_step: Callable[..., tuple[Any, Any]], context: int) -> Any:
    """(weights, state, text, where the windows of each step start, ...) -> both, mean loss.

    `take_step` has (gradients, state, weights, ...).
    """

    def steps(params: Any, state: Any, tokens: jax.Array, starts: jax.Array, *more: Any) -> Any:
        def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            windows = tokens[at[:, None] + jnp.arange(context + 1)[None]]
            value, grads = jax.value_and_grad(loss)(params, windows.astype(jnp.int32))
            return take_step(grads, state, params, *more), value

        (params, state), losses = jax.lax.scan(step, (params, state), starts)
        return params, state, jnp.mean(losses)

    return steps


def follow(
    run: Run, text: Text, offsets: np.ndarray, start: Any, steps: Any, look: Look, say: Say
) -> tuple[dict[str, np.ndarray], Any, Any]:
    """Trains from the start: curves by name, weights, state. A run that becomes NaN ends there.

    `look` gives `val_loss`, and what else is to be a curve. `tokens_per_s` is the median over
    calls, without evaluations.
    """
    params, state = start()
    found: dict[str, list[Any]] = {"step": [], "train_loss": [], "val_step": [0]}
    found |= {name: [value] for name, value in look(params, state).items()}
    seconds, calls = [], len(offsets)
    validate = max(1, calls // VALIDATIONS)
    for index, starts in enumerate(offsets, start=1):
        began = time.perf_counter()
        params, state, loss = steps(params, state, text.tokens, starts)
        found["train_loss"].append(float(loss))
        seconds.append(time.perf_counter() - began)
        found["step"].append(index * run.every)
        if index % validate and index < calls and np.isfinite(found["train_loss"][-1]):
            continue
        found["val_step"].append(found["step"][-1])
        for name, value in look(params, state).items():
            found[name].append(value)
        ms = 1e3 * float(np.median(seconds)) / run.every
        held_out = found["val_loss"][-1]
        say(f"{found['step'][-1]:6d}  held out {held_out:.4f}  {ms:.2f} ms a step")
        if not np.isfinite(held_out):
            break
    curves = {name: np.asarray(values) for name, values in found.items()}
    rate = run.tokens * run.every / np.median(seconds[1:] or seconds)
    return curves | {"tokens_per_s": np.asarray([rate])}, params, state


# ---- models whose `measured` gives the loss and the sizes of features ----------------------------


def lower(
    run: Run, text: Text, offsets: np.ndarray, model: Any, start: Any, take_step: Any
) -> Program:
    """Traces `every` steps; `start` is jitted."""

    def evaluate(params: Any, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, sizes = jax.lax.map(functools.partial(model.measured, params), batches)
        return losses.mean(), sizes.mean(0)

    steps = many_steps(model, take_step, run.context)
    shapes = jax.eval_shape(start)
    of_starts = jax.ShapeDtypeStruct(offsets.shape[1:], np.int32)
    return Program(
        start,
        jax.jit(steps, donate_argnums=(0, 1)).lower(*shapes, text.tokens, of_starts),
        jax.jit(evaluate).lower(shapes[0], text.held_out),
        sum(leaf.size for leaf in jax.tree.leaves(shapes[0])),
    )


def train(
    run: Run, text: Text, offsets: np.ndarray, program: Program, compiled: Any, say: Say
) -> dict[str, np.ndarray]:
    """Trains from the start: name -> curve. A run that becomes NaN ends there."""
    steps, evaluate = compiled

    def look(params: Any, state: Any) -> dict[str, Any]:
        loss, sizes = jax.device_get(evaluate(params, text.held_out))
        return {"val_loss": loss, "features": sizes}

    return follow(run, text, offsets, program.start, steps, look, say)[0]
