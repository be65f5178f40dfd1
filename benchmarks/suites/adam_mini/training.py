"""Trains one GPT with many optimizers on the same batches, and logs the norms of its weights.

The tokens lie on the device, a call takes many steps, and batches are gathered where they are used:
Python costs nothing, and every run sees the same text.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt import data, train
from _gpt.config import ModelShape, Settings, matrices

import optax_lowmem as lowmem
from benchmarks.suites.adam_mini import variants
from optax_lowmem import codecs

PRESETS = {
    "gpt-45m": Settings(
        preset="gpt-45m",
        optimizer="q_adam_mini",
        shape=ModelShape(layers=4, heads=8, width=512, tied=False, fused=False),
        context=256,
        batch=8,
        steps=10_000,
        learning_rate=1e-3,
        tokenizer="bpe",
        vocab=32_000,
        text="installed",
        held_out_batches=128,
        compute="bfloat16",
    ),
    "smoke": Settings(
        preset="smoke",
        optimizer="q_adam_mini",
        shape=ModelShape(layers=2, heads=2, width=64, tied=False, fused=False),
        context=32,
        batch=8,
        steps=60,
        learning_rate=1e-2,
        tokenizer="byte",
        vocab=256,
        text="standard-library",
        held_out_batches=8,
        compute="float32",
    ),
}


def structure(shape: ModelShape) -> Any:
    """Adam-mini's blocks of the model; its head is (vocabulary, width), as the embedding."""
    return lowmem.blocks.Structure(heads=shape.heads, rules=(("lm_head", (1,)),))


def watched(shape: ModelShape) -> dict[str, str]:
    """Return a dict from the name of each watched norm to the path of its leaf."""
    middle = f"blocks/{shape.layers // 2}/up/kernel"
    return {"embedding": "embed", "head": "lm_head", "mlp": middle}


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens on the device, the held-out windows, and the share of rows that a step wakes."""

    tokens: jax.Array
    held_out: jax.Array
    vocab: int
    awake: float
    bytes_per_token: float

    @property
    def last(self) -> int:
        """Tokens to train on."""
        return self.tokens.shape[0]


def load_text(settings: Settings, cache: Path) -> Text:
    """Tokenises the text of `settings`."""
    corpus = data.load_corpus(text=settings.text)
    if settings.tokenizer == "bpe":
        found = data.bpe_tokens(corpus, settings.vocab, cache)
    else:
        found = data.byte_tokens(corpus)
    size = settings.batch, settings.context
    held_out = np.stack(data.held_out_batches(found.held_out, *size, settings.held_out_batches))
    seen = [
        len(np.unique(data.sample_batch(found.train, *size, 0, step)[:, :-1])) for step in range(50)
    ]
    return Text(
        jnp.asarray(found.train),
        jnp.asarray(held_out),
        found.vocab,
        float(np.mean(seen)) / found.vocab,
        found.bytes_per_token,
    )


def offsets(settings: Settings, text: Text, seed: int) -> np.ndarray:
    """[steps, batch]: where the windows of each step start."""
    size = settings.steps, settings.batch
    return np.random.default_rng(seed).integers(0, text.last - settings.context, size, np.int32)


def moment_norm(state: Any, slot: str, path: str) -> jax.Array:
    """Norm of one leaf's moment, decoded; a codec's paper form decodes alike.

    8-bit second moments of blocks lie in groups along all of them.
    """
    found = _leaf(optax.tree_utils.tree_get(state, slot), path)
    if found.dtype in (jnp.int8, jnp.uint8):
        codec = codecs.affine() if slot == "mu" else codecs.linear(signed=False)
        codes = found if slot == "mu" else found.reshape(-1)
        scales = _leaf(optax.tree_utils.tree_get(state, f"{slot}_scale"), path)
        found = codecs.decode_array(codec, codes, scales, variants.GROUP)
    return jnp.sqrt(jnp.sum(jnp.square(found)))


def _leaf(tree: Any, path: str) -> jax.Array:
    for key in path.split("/"):
        tree = tree[int(key) if key.isdigit() else key]
    return tree


@dataclasses.dataclass(frozen=True)
class Program:
    """One optimizer's compiled steps."""

    start: Callable[[int], tuple[Any, Any]]
    lowered: jax.stages.Lowered
    parameters: int
    state_bytes: int


class Experiment:
    """A model and its text, to be trained with one optimizer after another."""

    def __init__(
        self, settings: Settings, text: Text, every: int, arguments: dict[str, Any], seed: int
    ):
        self.settings, self.text, self.every, self.seed = settings, text, every, seed
        self.arguments = arguments | {"mask": matrices}
        graphdef, self.weights = train.build_model(settings, text.vocab)
        self.loss = train.loss_function(graphdef, settings.compute)
        self.mean_loss = jax.jit(
            lambda params, batches: jax.lax.map(
                functools.partial(self.loss, params), batches
            ).mean()
        )
        self.offsets = offsets(settings, text, seed).reshape(-1, every, settings.batch)

    def evaluate(self, params: Any) -> float:
        """Loss on the held-out windows."""
        return float(self.mean_loss(params, self.text.held_out))

    def blocks(self) -> lowmem.blocks.Description:
        """Describe the blocks over which Adam-mini shares second moments."""
        found = structure(self.settings.shape)
        params = jax.eval_shape(self.weights, jax.random.key(0))
        return lowmem.blocks.describe(params, heads=found.heads, rules=found.rules)

    def lower(self, name: str) -> Program:
        """Traces `every` steps of a variant."""
        settings = self.settings
        blocks = structure(settings.shape)
        tx = variants.build(name, settings.schedule(), blocks, self.arguments)
        fused = variants.VARIANTS[name].fused
        take_step = train.optimizer_step(
            train.LOWMEM if fused else train.F32, settings.implementation
        )

        def start(seed: int) -> tuple[Any, Any]:
            weights = self.weights(jax.random.key(seed))
            if name == "adamw":
                return weights, tx.init(weights)
            return lowmem.init(tx, weights, dtype=jnp.float32, seed=seed)

        def steps(params: Any, state: Any, tokens: jax.Array, starts: jax.Array) -> Any:
            def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
                params, state = carry
                windows = tokens[at[:, None] + jnp.arange(settings.context + 1)]
                value, grads = jax.value_and_grad(self.loss)(params, windows.astype(jnp.int32))
                return take_step(tx, grads, state, params), value

            (params, state), losses = jax.lax.scan(step, (params, state), starts)
            return params, state, self._measured(params, state, losses)

        shapes = jax.eval_shape(lambda: start(0))
        lowered = jax.jit(steps, donate_argnums=(0, 1)).lower(
            *shapes, self.text.tokens, jax.ShapeDtypeStruct(self.offsets.shape[1:], np.int32)
        )
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes[0]))
        return Program(start, lowered, count, _bytes(shapes[1]))

    def _measured(self, params: Any, state: Any, losses: jax.Array) -> dict[str, Any]:
        leaves = watched(self.settings.shape)
        norms = lowmem.diagnostics.norms(params, leaves=tuple(leaves.values()))
        return {
            "train_loss": jnp.mean(losses),
            **{f"{what}_norm": norms[path] for what, path in leaves.items()},
            "mu_norm": moment_norm(state, "mu", "embed"),
            "nu_norm": moment_norm(state, "nu", "embed"),
        }

    def train(
        self, program: Program, compiled: Any, validate: int, say: Callable[[str], None]
    ) -> dict[str, np.ndarray]:
        """Trains from the start: name -> curve. A run that becomes NaN ends there."""
        params, state = program.start(self.seed)
        logged, validation, losses = [], [0], [self.evaluate(params)]
        begin = time.perf_counter()
        for index, starts in enumerate(self.offsets, start=1):
            params, state, found = compiled(params, state, self.text.tokens, starts)
            logged.append(found)
            step = index * self.every
            if step % validate and index < len(self.offsets):
                continue
            validation.append(step)
            losses.append(self.evaluate(params))
            seconds = time.perf_counter() - begin
            say(
                f"{step:6d}  held out {losses[-1]:.4f}  embedding norm "
                f"{float(found['embedding_norm']):.3f}  {1e3 * seconds / step:.2f} ms a step"
            )
            if not np.isfinite(losses[-1]):
                break
        logged = jax.device_get(logged)
        curves = {key: np.asarray([one[key] for one in logged]) for key in logged[0]}
        curves |= {"step": self.every * np.arange(1, len(logged) + 1)}
        return curves | {"val_step": np.asarray(validation), "val_loss": np.asarray(losses)}


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
