"""Trains one Llama on bytes with many ways to multiply matrices, and what is to help them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.config import warmup_cosine
from _llama.config import Shape
from _llama.model import LAYERS, Block, Llama
from _llama.optimizer import decayed
from flax import nnx

from benchmarks.training import ADAM, LLAMA_27M, SMALL, SMOKE, Measured, Program
from optax_lowmem import layers

CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train."""

    says: str  # what it is, for a legend
    dot_general: Any = None  # of the layers' matrices; None: JAX's
    clip: bool = False  # whether gradients are clipped by their global norm
    kq_norm: bool = False  # whether queries and keys are normalised
    layer_scale: bool = False  # whether blocks are multiplied with vectors that are 0 at first
    other_start: bool = False  # whether the weights are drawn from another seed


# E4M3 forward and E5M2 for gradients, 1 for the largest number: section 2.2.1's float8 by its words
_dot = layers.switchback_dot_general
_UNIT = _dot("tensorwise", "fp8-e5m2", scaling="unit")

VARIANTS = {
    "standard": Variant("standard"),
    "standard-other-start": Variant("standard, other initial weights", other_start=True),
    "switchback-int8": Variant("SwitchBack, int8", _dot()),
    "switchback-fp8": Variant("SwitchBack, fp8", _dot("switchback", "fp8")),
    "switchback_m-int8": Variant("SwitchBackM, int8", _dot("switchback_m")),
    "switchback_q-int8": Variant("SwitchBackQ, int8", _dot("switchback_q")),
    "llm_int8": Variant("LLM.int8(): all in int8", _dot("llm_int8")),
    "tensorwise-fp8": Variant(
        "tensor-wise fp8, scaled to its range", _dot("tensorwise", "fp8-e5m2")
    ),
    "tensorwise-unit": Variant("tensor-wise fp8, scaled to 1", _UNIT),
    "tensorwise-unit-clipped": Variant("+ gradient clipping", _UNIT, clip=True),
    "tensorwise-unit-kq-norm": Variant("+ KQ layer norm", _UNIT, kq_norm=True),
    "tensorwise-unit-layer-scale": Variant("+ zero-init layer scale", _UNIT, layer_scale=True),
    "standard-layer-scale": Variant("standard + zero-init layer scale", layer_scale=True),
}


class HeadNorm(nnx.Module):
    """A layer norm of each head, as Flax's attention has with `normalize_qk=True`."""

    def __init__(self, head: int, dtype: str):
        self.head = head
        self.norm = nnx.LayerNorm(head, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x.reshape(*x.shape[:-1], -1, self.head)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Remedied(Llama):
    """The Llama of examples/ with what is to help tensor-wise float8 (section 2.3)."""

    kq_norm: bool = False
    layer_scale: bool = False

    def _block(self, key: jax.Array) -> Block:
        block = super()._block(key)
        if self.kq_norm:
            own = block.self_attn
            for name in ("q_proj", "k_proj"):
                normed = nnx.Sequential(getattr(own, name), HeadNorm(own.head, self.compute))
                setattr(own, name, normed)
        if self.layer_scale:
            for name in ("self_attn", "mlp"):
                scale = layers.LayerScale(self.shape.width)
                setattr(block, name, nnx.Sequential(getattr(block, name), scale))
        return block

    def measured(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss, and the mean magnitude of what goes into each layer and out of the last."""

        def size(x: jax.Array) -> jax.Array:
            return jnp.mean(jnp.abs(x.astype(jnp.float32)))

        def body(x: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
            return self.layer(own, params, x, tokens), size(x)

        x, sizes = jax.lax.scan(body, self.first(params, tokens), params[LAYERS])
        return self.last(params, x, tokens), jnp.append(sizes, size(x))


def model(name: str, shape: Any, compute: str, attention: str) -> Remedied:
    chosen = VARIANTS[name]
    how = {name: getattr(chosen, name) for name in ("dot_general", "kq_norm", "layer_scale")}
    return Remedied(shape, compute, attention, **how)


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
        if not VARIANTS[name].clip:
            return tx
        return optax.chain(optax.clip_by_global_norm(CLIP), tx)

    def lower(self, name: str) -> Program:
        run, tx = self.run, self.optimizer(name)
        own = model(name, run.shape, run.compute, run.attention)
        key = self.seed + (1000 if VARIANTS[name].other_start else 0)

        @jax.jit
        def start() -> tuple[Any, Any]:
            weights = own.weights(jax.random.key(key), lambda path: jnp.float32)
            return weights, tx.init(weights)

        def take_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return self.trace(start, own, take_step)
