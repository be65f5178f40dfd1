"""The optimizers that `adam_mini` compares: AdamW, Adam-mini, and Adam-mini in 8 bits."""

from __future__ import annotations

import dataclasses
import functools
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


# Equation 1 for a range from 0: an f32 scale, and a code 0 for what is small beside it. A group
# holds the means of 256 blocks, so those of many rows.
CASE_1 = dataclasses.replace(codecs.linear(signed=False), guarded=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer to train with."""

    says: str  # what it is, for a legend
    make: Callable[..., Transformation]  # (schedule, blocks=, ...) -> transformation
    fused: bool = True  # whether it goes through `lowmem.step`


def _adamw(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
    del blocks
    return optax.adamw(schedule, **arguments)


def _stored(says: str, **changes: Any) -> Variant:
    """The paper's storage, without its floor, with something changed."""
    paper = lowmem.Storage(mu=codecs.affine(), nu=None, group_size=GROUP, rounding="embeddings")
    storage = dataclasses.replace(paper, **changes)
    return Variant(says, functools.partial(lowmem.q_adam_mini, storage=storage))


VARIANTS = {
    "adamw": Variant("AdamW, f32", _adamw, fused=False),
    "adam_mini": Variant("Adam-mini, f32", lowmem.adam_mini),
    "q_adam_mini": Variant("ours: stochastic everywhere", lowmem.q_adam_mini),
    "q_adam_mini-embeddings": _stored("ours: stochastic in the embedding"),
    "q_adam_mini-nearest": _stored("ours: nearest", rounding="nearest"),
    "q_adam_mini-reference": _stored(
        "reference quantiser: floor, nearest", mu=codecs.affine_paper(), rounding="nearest"
    ),
    "q_adam_mini-case1": _stored("Case 1: 8-bit v", nu=CASE_1, rounding="nearest"),
    # Beyond the paper: a v that is never 0, and how far equal runs come apart.
    "q_adam_mini-case1-guarded": _stored("Case 1 with our codec", nu=codecs.linear(signed=False)),
    "adam_mini-again": Variant("Adam-mini, once more", lowmem.adam_mini),
}


def build(
    name: str, schedule: optax.Schedule, blocks: Any, arguments: dict[str, Any]
) -> Transformation:
    """A variant behind the clipping of the gradient's global norm."""
    variant = VARIANTS[name]
    chain = lowmem.chain if variant.fused else optax.chain
    return chain(
        optax.clip_by_global_norm(CLIP), variant.make(schedule, blocks=blocks, **arguments)
    )
