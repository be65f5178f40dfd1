"""The training step of a loaded model: all weights, some of them, or adapters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.train import F32, LOWMEM, optimizer_step
from jax.sharding import SingleDeviceSharding

import optax_lowmem as lowmem

from . import choose, huggingface
from .config import PLAIN, Settings
from .model import Llama, Lora, Packed, joined, part
from .optimizer import make_optimizer, stored_dtype, weights_dtype
from .texts import Rows
from .train import offloaded, released


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its optimizer and the compiled functions, on one device.

    Attributes:
      model: the decoder, with its adapters.
      tx: the optimizer.
      start: () -> (trained, frozen, state).
      moved: (trained, ordinary state) -> the state that the step takes.
      step: (trained, frozen, state, batch) -> (trained, state, loss, gradient norm); takes the
        place of `trained` and `state`. Gradient release has no norm: NaN.
      loss: (trained, frozen, batch) -> the weighted sum of losses.
      compile: batch -> None; with the state in host memory, compiles `step` and `loss`. Before
        `start` allocates weights, there is room for trying kernels out.
      accumulate: micro-batches of a step.
    """

    model: Llama
    tx: optax.GradientTransformation
    start: Callable[[], tuple[Any, Any, Any]]
    moved: Callable[[Any, Any], Any]
    step: Callable[..., tuple[Any, Any, jax.Array, jax.Array]]
    loss: Callable[..., jax.Array]
    compile: Callable[[Packed], None]
    accumulate: int

    def batch(self, rows: Rows) -> Packed:
        """The rows of a step; the mean over micro-batches of their losses is that of all tokens."""
        weights = rows.weights * (self.accumulate / max(rows.weights.sum(), 1))
        return jax.device_put(Packed(rows.tokens, rows.segments, weights))

    def held_out_loss(self, trained: Any, frozen: Any, rows: Rows, batch: int) -> float:
        """The mean loss of the tokens of some rows, in batches."""
        total = 0.0
        for at in range(0, len(rows), batch):
            some = rows[np.arange(at, at + batch) % len(rows)]
            weights = some.weights * (np.arange(at, at + batch) < len(rows))[:, None]
            total += float(self.loss(trained, frozen, Packed(some.tokens, some.segments, weights)))
        return total / max(float(rows.weights.sum()), 1.0)


def make_program(
    folder: Path,
    settings: Settings,
    schedule: optax.Schedule,
    weight_decay: float,
    lora: Lora | None = None,
    freeze: str | None = None,
) -> Program:
    """Return the program of a folder's model.

    Args:
      folder: of the model.
      settings: of the run.
      schedule: of the learning rate.
      weight_decay: of the optimizer.
      lora: adapters to train instead of the weights.
      freeze: regular expression; weights whose paths it finds are not trained. Layers are then
        separate, `layers/0/mlp/up_proj/kernel`.
    """
    tx = make_optimizer(settings, schedule, weight_decay)
    model = Llama(
        settings.shape,
        settings.compute,
        choose.attention(settings),
        settings.remat,
        lora=lora,
        stacked=freeze is None,
    )
    if settings.release and len(set(model.slides)) > 1:
        raise ValueError("gradient release needs equal layers; some of this model's have a window")

    def dtype(path: str, leaf: Any = None) -> Any:
        del leaf
        return weights_dtype(settings, path)

    def is_trained(path: str) -> bool:
        return freeze is None or re.search(freeze, path) is None

    def start() -> tuple[Any, Any, Any]:
        plain, bf16 = settings.optimizer == PLAIN, huggingface.in_bf16(folder)
        if lora is not None:
            frozen = huggingface.load(folder, model, lambda path: stored_dtype("", path))
            trained = model.adapters(jax.random.key(settings.seed))
        else:
            kinds = dtype if bf16 else lambda path: jnp.float32
            weights = huggingface.load(folder, model, kinds, shardings)
            trained = part(weights, is_trained)
            frozen = part(weights, lambda path: not is_trained(path))
            if not jax.tree.leaves(trained):
                raise ValueError(f"{freeze!r} freezes every weight")
        # bf16 numbers are their own master weights: lowmem.init would copy them
        if settings.offload and bf16:
            return trained, frozen, moved(trained, None)
        if plain or (bf16 and lora is None):
            return trained, frozen, tx.init(trained)
        trained, state = lowmem.init(tx, trained, dtype)
        return trained, frozen, moved(trained, state)

    def compile_ahead(batch: Packed) -> None:
        if settings.offload:
            step.compile(like, moved(like, None), batch)
            rows = len(batch.tokens) // settings.accumulate
            some = jax.eval_shape(lambda: jax.tree.map(lambda x: x[:rows], batch))
            loss.lower(like, part(like, lambda path: not is_trained(path)), some).compile()

    like = shardings = None
    if settings.offload:
        here = SingleDeviceSharding(jax.local_devices()[0])
        like = jax.eval_shape(lambda: model.weights(jax.random.key(0), dtype))
        like = jax.tree.map(lambda w: w.update(sharding=here), like)
        shardings = jax.tree.map(lambda w: w.sharding, like)
    moved = offloaded(model, tx, settings)
    step = make_step(model, tx, settings)
    loss = jax.jit(lambda trained, frozen, batch: model(joined(trained, frozen), batch))
    return Program(
        model,
        tx,
        start,
        moved,
        step if settings.offload else jax.jit(step, donate_argnums=(0, 2)),
        loss,
        compile_ahead,
        settings.accumulate,
    )


def make_step(model: Llama, tx: Any, settings: Settings) -> Callable[..., Any]:
    """Return the step of a `Program`."""
    return (_released if settings.release else _ordinary)(model, tx, settings)


def _ordinary(model: Llama, tx: Any, settings: Settings) -> Callable[..., Any]:
    impl = F32 if settings.optimizer == PLAIN else LOWMEM
    take_step = optimizer_step(impl, settings.implementation)

    def step(trained: Any, frozen: Any, state: Any, batch: Packed) -> tuple[Any, ...]:
        def loss_of(trained: Any, batch: Packed) -> jax.Array:
            return model(joined(trained, frozen), batch)

        value_and_grad = lowmem.value_and_grad(loss_of, settings.accumulate)
        loss, grads = value_and_grad(trained, batch, batch.tokens.sum())
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        trained, state = take_step(tx, grads, state, trained)
        return trained, state, loss, norm

    return step


def _released(model: Llama, tx: Any, settings: Settings) -> Callable[..., Any]:
    take_step = released(model, tx, settings, {})

    def step(trained: Any, frozen: Any, state: Any, batch: Packed) -> tuple[Any, ...]:
        del frozen
        trained, state, loss = take_step(trained, state, batch)
        return trained, state, loss, jnp.float32(jnp.nan)

    if settings.offload:
        step.compile = take_step.compile
    return step
