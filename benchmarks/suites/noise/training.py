"""A Llama's training step with noise on some of its matrices (GaussWS' Table 1)."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.train import planned_bytes
from _llama.config import FULL, NONE, PLAIN, PRESETS
from _llama.model import Llama, is_norm
from _llama.optimizer import decayed

import optax_lowmem as lowmem
from optax_lowmem.gaussws.parts import chooser

CALL_SECONDS = 1.0
# name -> the parts with noise, and which noise
VARIANTS: dict[str, tuple[str, str] | None] = {
    "no noise": None,
    "gaussws[od]": ("od", "gaussws"),
    "gaussws[all]": ("all", "gaussws"),
    "diffq[all]": ("all", "diffq"),
    "box-muller[all]": ("all", "box-muller"),
}
OPTIMIZERS = ("flash_adamw", "flash_adam_mini", PLAIN)


def sampled(name: str, path: str, leaf: Any) -> bool:
    variant = VARIANTS[name]
    return variant is not None and chooser(variant[0])(path, leaf)


def make_optimizer(
    optimizer: str, name: str, shape: Any, rate: Any = 1e-4, **of_noise: Any
) -> optax.GradientTransformation:
    """An optimizer behind clipping, with a variant's noise around it.

    optax.adamw has weights in f32; those of sampled leaves are then in its state, and the loss sees
    them in bf16, as in the paper. `of_noise`: more arguments of `gaussws_noise`.
    """
    how: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": decayed}
    if optimizer == "flash_adam_mini":
        how["blocks"] = lowmem.blocks.Structure(heads=shape.heads, kv_heads=shape.kv_heads)
    plain = optimizer == PLAIN
    make = optax.adamw if plain else lowmem.OPTIMIZERS[optimizer].make
    chain = optax.chain if plain else lowmem.chain
    clip, tx, variant = optax.clip_by_global_norm(1.0), make(rate, **how), VARIANTS[name]
    if variant is None:
        return chain(clip, tx)
    parts, noise = variant
    of_noise |= {"clean_dtype": "float32"} if plain else {}
    return lowmem.chain(clip, lowmem.gaussws_noise(tx, parts, noise=noise, **of_noise))


class Run:
    """Training steps on one batch, any number in a call: `compile`, `start`, then `time`."""

    def __init__(
        self, preset: str, optimizer: str, name: str, batch: int | None, attention: str
    ) -> None:
        own = PRESETS[preset]
        self.batch, self.sequence = batch or own.batch, own.sequence
        self.tokens = self.batch * self.sequence
        self.tx = make_optimizer(optimizer, name, own.shape)
        self.optimizer, self.name = optimizer, name
        remat = FULL if own.text == "random" else NONE  # the large models
        self.model = Llama(own.shape, "bfloat16", attention, remat)
        self._steps = 1
        size = (self.batch, self.sequence + 1)
        self.inputs = jax.random.randint(jax.random.key(1), size, 0, own.shape.vocab, jnp.int32)
        like = jax.eval_shape(self._start)
        self._lowered = jax.jit(self.many, donate_argnums=0).lower(like, self.inputs, 1)

    def compile(self) -> None:
        """May run beside others' in threads."""
        self._run = self._lowered.compile()
        self.peak_bytes = planned_bytes(self._run)

    def start(self) -> None:
        """Weights and state, and how many steps a call has."""
        self.carry = jax.jit(self._start)()
        self.time()
        self._steps = max(2, min(200, round(CALL_SECONDS / (self.time() / 1e3))))

    def _dtype(self, path: str, leaf: Any = None) -> Any:
        if is_norm(path):
            return jnp.float32
        if self.optimizer == PLAIN and not sampled(self.name, path, leaf):
            return jnp.float32
        return jnp.bfloat16

    def _start(self) -> tuple[Any, Any]:
        weights = self.model.weights(jax.random.key(0), lambda path: jnp.float32)
        return lowmem.init(self.tx, weights, self._dtype)

    def _step(self, carry: tuple[Any, Any], tokens: jax.Array) -> tuple[Any, Any]:
        params, state = carry
        grads = jax.grad(self.model)(params, tokens)
        return lowmem.step(self.tx, grads, state, params)

    def many(self, carry: Any, tokens: jax.Array, steps: jax.Array) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, c: self._step(c, tokens), carry)

    def time(self) -> float:
        started = time.perf_counter()
        self.carry = jax.block_until_ready(self._run(self.carry, self.inputs, self._steps))
        return (time.perf_counter() - started) / self._steps * 1e3

    @functools.cached_property
    def bytes_per_param(self) -> float:
        """Of weights and state."""
        return _bytes(self.carry) / sum(x.size for x in jax.tree.leaves(self.carry[0]))

    @functools.cached_property
    def extra_bytes(self) -> float:
        """Extra bytes of the noise, per parameter with noise."""
        if VARIANTS[self.name] is None:
            return 0.0
        leaves = jax.eval_shape(lowmem.gaussws.bitwidths, self.carry[1])
        paths = jax.tree_util.tree_leaves_with_path(self.carry[0])
        names = ((jax.tree_util.keystr(p, simple=True, separator="/"), x) for p, x in paths)
        count = sum(x.size for path, x in names if path in leaves)
        plain = Run.__new__(Run)
        plain.optimizer, plain.name = self.optimizer, next(iter(VARIANTS))
        plain.model = self.model
        plain.tx = make_optimizer(self.optimizer, plain.name, self.model.shape)
        return (_bytes(self.carry) - _bytes(jax.eval_shape(plain._start))) / count


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
