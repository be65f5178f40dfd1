"""Optimizers on 8-bit state: one file each, and the table that tests and benchmarks iterate."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax

from optax_lowmem._src.blocks.structure import Structure
from optax_lowmem._src.optimizers.adam import flash_adam, flash_adamw
from optax_lowmem._src.optimizers.adam_mini import adam_mini, flash_adam_mini, q_adam_mini, q_adamw
from optax_lowmem._src.optimizers.coat import coat_adamw
from optax_lowmem._src.optimizers.lion import flash_lion
from optax_lowmem._src.optimizers.sgd import flash_sgd
from optax_lowmem._src.optimizers.stable_adamw import stable_adamw
from optax_lowmem._src.wrappers.update_clipping import update_clipping


@dataclasses.dataclass(frozen=True)
class Row:
    """An optimizer and what it must equal.

    Attributes:
      make: learning rate and keyword arguments -> our transformation.
      plain: the optax counterpart with the same arguments.
      learning_rate: one that converges on small problems.
      moments: slots of 8-bit state.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    plain: Callable[..., optax.GradientTransformation]
    learning_rate: float
    moments: tuple[str, ...]


def _momentum(make: Callable) -> Callable:
    return lambda learning_rate, **options: make(learning_rate, momentum=0.9, **options)


def _clipped_adamw(
    learning_rate: Any, b2: float = 0.99, eps: float = 1e-6, weight_decay: float = 1e-2
) -> optax.GradientTransformationExtraArgs:
    """Build `stable_adamw` from `optax.adamw` and `update_clipping`."""
    inner = optax.adamw(learning_rate, b2=b2, eps=eps, weight_decay=weight_decay)
    return update_clipping(inner, b2=b2, eps=eps)


def _mini(make: Callable) -> Callable:
    """With one block a tensor where nothing is known of a leaf."""
    return functools.partial(make, blocks=Structure(default="whole"))


OPTIMIZERS: dict[str, Row] = {
    "flash_adamw": Row(flash_adamw, optax.adamw, 1e-2, ("mu", "nu")),
    "flash_adam": Row(flash_adam, optax.adam, 1e-2, ("mu", "nu")),
    "stable_adamw": Row(stable_adamw, _clipped_adamw, 1e-2, ("mu", "nu")),
    "coat_adamw": Row(coat_adamw, optax.adamw, 1e-2, ("mu", "nu")),
    "q_adamw": Row(q_adamw, optax.adamw, 1e-2, ("mu", "nu")),
    "q_adam_mini": Row(_mini(q_adam_mini), _mini(adam_mini), 1e-2, ("mu",)),
    "flash_adam_mini": Row(_mini(flash_adam_mini), _mini(adam_mini), 1e-2, ("mu",)),
    "flash_lion": Row(flash_lion, optax.lion, 1e-3, ("mu",)),
    "flash_sgd": Row(_momentum(flash_sgd), _momentum(optax.sgd), 1e-2, ("mu",)),
}
