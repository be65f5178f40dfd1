"""Model presets and pairs of optimizers, chosen by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

import optax_lowmem as lowmem


@dataclass(frozen=True)
class ModelShape:
    """Layers, attention heads and width of a GPT.

    `tied`: whether the output head is the embedding. `fused`: whether query, key and value are one
    matrix.
    """

    layers: int
    heads: int
    width: int
    tied: bool = True
    fused: bool = True


@dataclass(frozen=True)
class Preset:
    """A model and the run that suits it; `learning_rate` is AdamW's peak."""

    shape: ModelShape
    context: int
    batch: int
    steps: int
    learning_rate: float
    tokenizer: str = "byte"
    vocab: int = 32_000
    text: str = "standard-library"
    held_out_batches: int = 20  # of an evaluation


PRESETS: dict[str, Preset] = {
    "smoke": Preset(ModelShape(2, 2, 64), context=32, batch=8, steps=60, learning_rate=1e-2),
    "demo": Preset(ModelShape(4, 3, 192), context=128, batch=8, steps=400, learning_rate=5e-3),
    "small": Preset(ModelShape(8, 6, 384), context=256, batch=16, steps=2_000, learning_rate=2e-3),
    "gpt-42m": Preset(ModelShape(8, 8, 512), 256, 32, 3_000, 1e-3, "bpe", 32_000, "installed", 100),
    "gpt2-124m": Preset(ModelShape(12, 12, 768), 1024, 16, 600, 6e-4, "bpe", 50_257),
    "gpt2-355m": Preset(ModelShape(24, 16, 1024), 1024, 16, 600, 3e-4, "bpe", 50_257),
}


def hidden(params: Any) -> Any:
    """Muon's matrices: all but embeddings and output heads, and in stacks those of each layer."""

    def axes(path: Any, is_matrix: bool) -> Any:
        at_ends = any(name in jax.tree_util.keystr(path) for name in ("embed", "lm_head"))
        return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix and not at_ends else None

    return jax.tree_util.tree_map_with_path(axes, lowmem.blocks.decay_mask(params))


def warmup_cosine(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up over a twentieth of the steps, then a cosine to a twentieth."""
    warmup = max(1, steps // 20)
    return optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, max(warmup + 1, steps), peak / 20
    )


Factory = Callable[..., optax.GradientTransformation]


@dataclass(frozen=True)
class OptimizerPair:
    """An optax optimizer and its low-memory form, which take the same arguments.

    `rate_factor` scales the preset's learning rate, which is AdamW's.
    """

    plain: Factory
    lowmem: Factory
    rate_factor: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _compressed(plain: Factory, arguments: Mapping[str, Any], **slots: str) -> OptimizerPair:
    """Any optax optimizer, and the same with 8-bit slots and split master weights."""

    def make(learning_rate: optax.Schedule, **arguments: Any) -> optax.GradientTransformation:
        inner = lowmem.compress_state(plain(learning_rate, **arguments), **slots)
        return lowmem.split_master_weights(inner)

    return OptimizerPair(plain, make, arguments=arguments)


_DECAYED = {"weight_decay": 0.1, "mask": lowmem.blocks.decay_mask}
_ADAM = {"b1": 0.9, "b2": 0.99}  # 0.99: few tokens in a batch
# what an optimizer has of its own
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "lion": {"weight_decay": 0.5},
    "sgd": {"nesterov": True},
    "flash_muon": {"muon_weight_dimension_numbers": hidden, "adam_b2": _ADAM["b2"]},
}


def pair_of(record: Any) -> OptimizerPair:
    """The pair of a record of `lowmem.OPTIMIZERS`, with the arguments that both take."""
    given = _ADAM | _DECAYED | _ARGUMENTS.get(record.short_name, {})
    arguments = record.chosen(given, record.plain, record.make)
    return OptimizerPair(record.plain, record.make, record.rate_factor, arguments)


OPTIMIZERS: dict[str, OptimizerPair] = {
    **{record.short_name: pair_of(record) for record in lowmem.OPTIMIZERS.values()},
    "nadamw": _compressed(optax.nadamw, _ADAM | _DECAYED, mu="int8", nu="int8"),
    "adan": _compressed(optax.adan, {"weight_decay": 0.02}, m="int8", v="int8", n="int8"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Preset):
    """A run: a preset with the command line's changes."""

    preset: str
    optimizer: str
    compute: str
    implementation: str = "auto"

    def schedule(self) -> optax.Schedule:
        """`warmup_cosine` of this run."""
        return warmup_cosine(self.learning_rate, self.steps)
