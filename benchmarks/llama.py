"""Trains Llamas that differ in their products, activations, optimizer, noise or start."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt.config import warmup_cosine
from _llama.config import PLAIN
from _llama.model import Llama
from _llama.optimizer import stored_dtype

import optax_lowmem as lowmem
from benchmarks import training
from benchmarks.training import ADAM, Program


@dataclasses.dataclass(frozen=True)
class Variant:
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more of its arguments
    optimizer: str = PLAIN  # by its name in examples/train_llama.py
    clip: bool = True  # whether gradients are clipped by their global norm
    noise: tuple[str, str] | None = None  # the parts of the weights with noise, and its kind
    rate: float = 1.0  # times the run's learning rate
    other_start: bool = False  # whether the weights are drawn from another seed


class Experiment(training.Experiment):
    """A Llama and its text, to be trained with one variant after another."""

    variants: Mapping[str, Variant] = {}  # by name
    kind: type[Llama] = Llama

    def model(self, name: str) -> Llama:
        run = self.run
        return self.kind(run.shape, run.compute, run.attention, **self.variants[name].model)

    def optimizer(self, name: str, **of_noise: Any) -> optax.GradientTransformation:
        """The variant's; `of_noise`: more arguments of `gaussws_noise`."""
        one, run, how = self.variants[name], self.run, ADAM | {"mask": lowmem.blocks.decay_mask}
        if one.optimizer == "flash_adam_mini":
            sizes = {"heads": run.shape.heads, "kv_heads": run.shape.kv_heads}
            how["blocks"] = lowmem.blocks.Structure(**sizes)
        plain = one.optimizer == PLAIN
        make = optax.adamw if plain else lowmem.OPTIMIZERS[one.optimizer].make
        tx = make(warmup_cosine(one.rate * run.learning_rate, run.steps), **how)
        if one.noise:
            parts, kind = one.noise
            tx = lowmem.gaussws_noise(tx, parts, noise=kind, **of_noise)
        chain = optax.chain if plain else lowmem.chain
        return chain(optax.clip_by_global_norm(1.0), tx) if one.clip else tx

    def lower(self, name: str) -> Program:
        one, model = self.variants[name], self.model(name)

        def weights(key: jax.Array) -> Any:
            other = jax.random.key(self.seed + 1000)
            return model.weights(other if one.other_start else key, lambda path: jnp.float32)

        def dtype(path: str, leaf: Any) -> Any:
            return stored_dtype(one.optimizer, path)

        in_f32 = one.optimizer == PLAIN
        return self.optimized(self.optimizer(name), weights, model, None if in_f32 else dtype)

    def flags(self) -> dict[str, Any]:
        return super().flags() | ADAM
