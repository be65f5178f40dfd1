"""The optimizers that `adam_mini` compares: AdamW, Adam-mini, and Adam-mini in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import optax_lowmem as lowmem
from optax_lowmem import codecs

CLIP = 1.0
GROUP = 256
# Adam-mini's for pre-training, which Q-Adam-mini takes over; matrices decay, the embedding too.
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

Transformation = optax.GradientTransformation


def q_storage(**changes: Any) -> lowmem.Storage:
    """The paper's storage, without its floor, with something changed."""
    paper = lowmem.Storage(mu=codecs.affine(), nu=None, group_size=GROUP, rounding="embeddings")
    return dataclasses.replace(paper, **changes)


# Equation 1 for a range from 0: an f32 scale, and a code 0 for what is small beside it. A group
# holds the means of 256 blocks, so those of many rows.
CASE_1 = dataclasses.replace(codecs.linear(signed=False), guarded=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer to train with.

    Attributes:
      says: what it is, for a legend.
      make: (schedule, blocks, arguments) -> transformation.
      fused: whether it goes through `lowmem.step`.
    """

    says: str
    make: Callable[..., Transformation]
    fused: bool = True


def _adamw(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
    del blocks
    return optax.adamw(schedule, **arguments)


def _adam_mini(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
    return lowmem.adam_mini(schedule, blocks=blocks, **arguments)


def _q_adam_mini(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
    return lowmem.q_adam_mini(schedule, blocks=blocks, **arguments)


def _stored(**changes: Any) -> Callable[..., Transformation]:
    def make(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
        return lowmem.q_adam_mini(
            schedule, blocks=blocks, storage=q_storage(**changes), **arguments
        )

    return make


VARIANTS = {
    "adamw": Variant("AdamW, f32", _adamw, fused=False),
    "adam_mini": Variant("Adam-mini, f32", _adam_mini),
    "q_adam_mini": Variant("ours: stochastic everywhere", _q_adam_mini),
    "q_adam_mini-embeddings": Variant("ours: stochastic in the embedding", _stored()),
    "q_adam_mini-nearest": Variant("ours: nearest", _stored(rounding="nearest")),
    "q_adam_mini-reference": Variant(
        "reference quantizer: floor, nearest",
        _stored(mu=codecs.affine_paper(), rounding="nearest"),
    ),
    "q_adam_mini-case1": Variant("Case 1: 8-bit v", _stored(nu=CASE_1, rounding="nearest")),
    # Beyond the paper: a v that is never 0, and how far equal runs come apart.
    "q_adam_mini-case1-guarded": Variant(
        "Case 1 with our codec", _stored(nu=codecs.linear(signed=False))
    ),
    "adam_mini-again": Variant("Adam-mini, once more", _adam_mini),
}


def build(
    name: str, schedule: optax.Schedule, blocks: Any, arguments: dict[str, Any]
) -> Transformation:
    """A variant behind the clipping of the gradient's global norm."""
    variant = VARIANTS[name]
    chain = lowmem.chain if variant.fused else optax.chain
    return chain(optax.clip_by_global_norm(CLIP), variant.make(schedule, blocks, **arguments))
