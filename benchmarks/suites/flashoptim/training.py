"""Real training on two cores: Python's standard library as text, a small GPT-2, and the loops."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY = 128  # ASCII; anything else is shown to the model as character 0


def standard_library(fraction_held_out: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Characters of the standard library's top-level modules: for training and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    np.random.default_rng(0).shuffle(files)
    held_out = max(1, round(len(files) * fraction_held_out))
    return _characters(files[held_out:]), _characters(files[:held_out])


def _characters(files: list[Path]) -> np.ndarray:
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    return np.where(text < VOCABULARY, text, 0).astype(np.int32)


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    layers: int = 3
    heads: int = 4
    width: int = 96
    context: int = 64
    batch: int = 16


def batches(text: np.ndarray, size: Size, steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Windows of context + 1 characters; the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    windows = np.lib.stride_tricks.sliding_window_view(text, size.context + 1)
    for _ in range(steps):
        yield windows[rng.integers(len(windows), size=size.batch)]


class Block(nnx.Module):
    """Pre-norm attention and MLP, without biases."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
            init = nnx.initializers.normal(scale * inputs**-0.5)
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        width, residual = size.width, (2 * size.layers) ** -0.5
        self.heads = size.heads
        self.norm_attention = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, residual)
        self.norm_mlp = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, residual)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm_attention(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class GPT(nnx.Module):
    """GPT-2's architecture: learned positions, tied embedding."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        init = nnx.initializers.normal(size.width**-0.5)
        self.embed = nnx.Param(init(rngs.params(), (VOCABULARY, size.width), jnp.float32))
        self.position = nnx.Param(init(rngs.params(), (size.context, size.width), jnp.float32))
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = self.embed[...]
        x = embed[tokens] + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ embed.T


@dataclass
class Run:
    """Loss of every step, NaN from where it was given up, and the loss on held-out text."""

    losses: np.ndarray
    held_out: float

    def final(self, share: float = 0.1) -> float:
        """Mean loss of the last steps; infinite if the run ended in NaN."""
        tail = self.losses[-max(1, round(len(self.losses) * share)) :]
        return float(tail.mean()) if np.isfinite(tail).all() else float("inf")


class Task:
    """One model on one text: the same start and the same batches for every optimizer."""

    def __init__(self, size: Size, seed: int = 0):
        self.size = size
        self.text, self.held_out_text = standard_library()
        graph, weights = nnx.split(GPT(size, nnx.Rngs(seed)))
        self.params = nnx.to_pure_dict(weights)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return nll.mean()

        self.loss = jax.jit(loss)
        self.gradient = jax.jit(jax.value_and_grad(loss))

    @property
    def parameters(self) -> int:
        """Number of trained weights."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def train(
        self,
        tx: optax.GradientTransformation,
        steps: int,
        watch: Callable[[int, Any], None] = lambda step, state: None,
    ) -> Run:
        """Trains from the start; `watch` sees the optimizer's state after every step."""

        @jax.jit
        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = self.params, tx.init(self.params)
        losses = np.full(steps, np.nan)
        for step, tokens in enumerate(batches(self.text, self.size, steps)):
            value, grads = self.gradient(params, tokens)
            params, state = update(grads, state, params)
            losses[step] = value
            if not np.isfinite(losses[step]):
                break
            watch(step, state)
        held_out = batches(self.held_out_text, self.size, 20, seed=1)
        return Run(losses, float(np.mean([self.loss(params, tokens) for tokens in held_out])))


def warmup_cosine(peak: float, steps: int) -> optax.Schedule:
    """GPT-2's schedule: a twentieth of the steps up, then down to a tenth."""
    warmup = max(1, steps // 20)
    return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, peak / 10)
