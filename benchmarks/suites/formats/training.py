"""Trains a GPT with AdamW in f32, and keeps a sample of its m and v in every format beside it.

Each copy is in closed loop: at every step it is decoded, averaged with the live gradient and
encoded again. The weights follow the f32 state alone, so that all copies see the same gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt import train
from _gpt.config import ModelShape, Settings

from benchmarks import training
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats.formats import MU, NU, STOCHASTIC, Copy, Pair
from benchmarks.training import Text
from optax_lowmem import codecs
from optax_lowmem._src.arrays import random, trees
from optax_lowmem.blocks import decay_mask

# the examples' model of that name; 2048 tokens a step leave the gradients noisy
_42M = Settings(
    preset="gpt-42m", optimizer="adamw", shape=ModelShape(layers=8, heads=8, width=512),
    context=256, batch=8, steps=3_000, learning_rate=1e-3, tokenizer="bpe", vocab=32_000,
    text="installed", held_out_batches=100, compute="bfloat16",
)  # fmt: skip
_3M = dataclasses.replace(
    _42M, preset="gpt-3m", shape=ModelShape(layers=2, heads=4, width=256), context=64, steps=1_500,
    learning_rate=3e-3, vocab=4_096, text="standard-library", held_out_batches=20,
    compute="float32",
)  # fmt: skip
PRESETS = {"gpt-42m": _42M, "gpt-3m": _3M}
DECAYS = {MU: 0.9, NU: 0.999}
LONGEST = 512  # neighbours in a chunk: 16 groups of 32, or 4 of 128
NOISE_GROUP = 32  # of the random bits, which all copies of a slot share
SMALLEST = 4096  # elements of a leaf: below, the package does not compress


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some rows of neighbours of each matrix, always the same."""

    paths: list[str]  # of the sampled leaves
    sizes: list[int]
    length: int  # neighbours in a chunk
    chunks: list[np.ndarray]  # of each leaf, which of its chunks

    @staticmethod
    def of(params: Any, each: int, seed: int) -> "Sample":
        """`each` chunks of every matrix."""
        found = trees.named_leaves(params)
        leaves = {path: p for path, p in found if p.ndim > 1 and p.size >= SMALLEST}
        # the largest power of two that divides every last axis
        length = int(np.gcd.reduce([LONGEST, *(p.shape[-1] for p in leaves.values())]))
        rng, sizes = np.random.default_rng(seed), [p.size for p in leaves.values()]
        totals = [size // length for size in sizes]
        chunks = [np.sort(rng.choice(n, min(each, n), replace=False)) for n in totals]
        return Sample([*leaves], sizes, length, [c.astype(np.int32) for c in chunks])

    @property
    def leaf_of_chunk(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.paths)), [len(c) for c in self.chunks])

    def leaves(self, tree: Any) -> list[jax.Array]:
        """The sampled leaves of a tree like the parameters, whole."""
        found = dict(trees.named_leaves(tree))
        return [found[path] for path in self.paths]

    def take(self, tree: Any) -> jax.Array:
        """[chunks, length] of a tree like the parameters."""
        rows = [
            leaf.reshape(-1, self.length)[chunks]
            for leaf, chunks in zip(self.leaves(tree), self.chunks, strict=True)
        ]
        return jnp.concatenate(rows)


@functools.partial(jax.jit, static_argnums=1)
def decode_copies(stored: dict[Copy, Any], length: int) -> dict[Copy, jax.Array]:
    """Values of chunks of so many neighbours."""
    return {c: codecs.decode_array(c.codec, *own, c.group, length) for c, own in stored.items()}


def step_copies(
    stored: dict[Copy, Any], grads: jax.Array, key: tuple[jax.Array, jax.Array]
) -> dict[Copy, Any]:
    """Decodes, averages and encodes every copy; `key` is the seed and the step."""
    noise = {
        slot: random.uniforms(random.leaf_key(*key, "sample"), grads.shape, NOISE_GROUP, slot)
        for slot in DECAYS
    }

    def encoded(c: Copy, value: jax.Array) -> Any:
        decay, new = DECAYS[c.slot], grads if c.slot == MU else grads * grads  # Adam's moments
        moment = decay * value + (1 - decay) * new
        own = noise[c.slot] if c.rounding == STOCHASTIC else None
        return codecs.encode_array(c.codec, moment, c.group, own)

    values = decode_copies(stored, grads.shape[-1])
    return {c: encoded(c, value) for c, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a step leaves: AdamW's moments, whole; of the sample these and the copies' values."""

    step: int
    moments: dict[str, Any]
    true: dict[str, np.ndarray]
    values: dict[Copy, np.ndarray]


Errors = dict[Pair, tuple[float, float]]  # MSE of the model and median NMSE


class Experiment(training.Experiment):
    """A model, its text and optimizer, and the copies of its states.

    Attributes:
      last: the snapshot of the last look.
      seen: is called with each snapshot.
    """

    def __init__(
        self, settings: Settings, text: Text, every: int, seed: int, *, copies: Sequence[Copy],
        chunks: int,
    ):  # fmt: skip
        super().__init__(settings, text, seed, every)
        self.copies, self.chunks = copies, chunks
        self.seen: Callable[[Snapshot], None] = lambda snapshot: None
        graphdef, self.weights = train.build_model(settings, text.vocab)
        self.loss = train.loss_function(graphdef, settings.compute)
        self.clip = optax.clip_by_global_norm(train.CLIP)
        betas = DECAYS[MU], DECAYS[NU]
        self.adamw = optax.adamw(settings.schedule(), *betas, weight_decay=0.1, mask=decay_mask)
        shapes = jax.eval_shape(self.weights, jax.random.key(0))
        self.sample = Sample.of(shapes, chunks, seed)
        self.parameters = sum(p.size for p in jax.tree.leaves(shapes))

    def flags(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "steps": self.run.steps,
            "decays": DECAYS,
            "chunks_of_a_leaf": self.chunks,
        }

    def start(self) -> tuple[Any, Any]:
        """Weights; optimizer state, copies, number of the step, before the first."""
        weights = self.weights(jax.random.key(self.seed))
        shape = (len(self.sample.leaf_of_chunk), self.sample.length)
        coded = jax.eval_shape(
            lambda x: {c: codecs.encode_array(c.codec, x, c.group) for c in self.copies},
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )
        # all bits 0, which every codec decodes to 0
        copies = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), coded)
        return weights, (self.adamw.init(weights), copies, jnp.int32(0))

    def take_step(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """AdamW on clipped gradients; the copies follow beside it."""
        own, stored, count = state
        grads, _ = self.clip.update(grads, optax.EmptyState())
        taken = self.sample.take(grads)
        stored = step_copies(stored, taken, (jnp.uint32(self.seed), count))
        updates, own = self.adamw.update(grads, own, params)
        return optax.apply_updates(params, updates), (own, stored, count + 1)

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        own, stored, count = state
        if count:
            moments = {slot: optax.tree.get(own, slot) for slot in DECAYS}
            true = {slot: self.sample.take(tree) for slot, tree in moments.items()}
            values = decode_copies(stored, self.sample.length)
            self.last = Snapshot(int(count), moments, *jax.device_get((true, values)))
            self.seen(self.last)
        return super().look(evaluate, params, state)

    def train_copies(self, say: training.Say) -> None:
        program = self.trace(jax.jit(self.start), self.loss, self.take_step)
        curves, *_ = self.follow(program.start, *program.compile(), say)
        if not np.isfinite(curves["val_loss"][-1]):
            raise SystemExit("the training diverged")

    @property
    def correction(self) -> tuple[float, float]:
        return fe.corrections(self.last.step, DECAYS)

    def errors(self, values: Mapping[Copy, np.ndarray]) -> Errors:
        """Of values of the last look's sample."""
        sample = self.sample
        return fe.errors(
            self.last.true, values, sample.leaf_of_chunk, sample.sizes, self.correction
        )
