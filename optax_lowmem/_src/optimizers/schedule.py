"""Learning rate and weight decay of a step, as f32 operands."""

import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.core.block import BlockStructure
from optax_lowmem._src.core.hyperparameters import Formula, as_f32, check_range
from optax_lowmem._src.core.typing import Scalar, ScalarOrSchedule
from optax_lowmem._src.step.engine import Engine
from optax_lowmem._src.step.matrix_axes import MatrixAxes
from optax_lowmem._src.step.rule import UpdateRule
from optax_lowmem._src.step.storage import Storage


def at_count(name: str, value: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """A hyperparameter of the step after `count` steps (schedules see 0, 1, ...)."""
    return as_f32(name, value(count) if callable(value) else value)


def _peak(learning_rate: ScalarOrSchedule, decouple_lr: bool | float) -> jax.Array | None:
    if decouple_lr is False:
        return None
    if decouple_lr is True:
        if callable(learning_rate):
            raise ValueError(
                "decouple_lr=True needs to know the largest learning rate of the schedule: "
                "pass it, decouple_lr=3e-4"
            )
        if isinstance(learning_rate, jax.Array):
            raise ValueError(
                "decouple_lr=True needs to know the largest learning rate, and an array may be "
                "that of one step (inject_hyperparams makes it one): pass it, decouple_lr=3e-4"
            )
        return as_f32("learning_rate", learning_rate)
    check_range("decouple_lr", decouple_lr, 0.0)
    return as_f32("decouple_lr", decouple_lr)


def optimizer(
    rule: UpdateRule,
    moments: Formula,
    learning_rate: ScalarOrSchedule,
    storage: Storage,
    *,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: optax.MaskOrFn = None,
    decouple_lr: bool | float = False,
    coupled: bool = False,
    rate_in_rule: bool = False,
    slot_dtypes: Mapping[str, DTypeLike | None] | None = None,
    structure: BlockStructure | None = None,
    matrices: MatrixAxes | None = None,
    rates: Mapping[str, ScalarOrSchedule] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation w <- w - lr (direction + weight_decay w) of a rule.

    Args:
      rule: the optimizer's arithmetic.
      moments: its own hyperparameters from the count before the step.
      learning_rate: number, array or schedule.
      storage: how the state is kept.
      weight_decay: strength, or a schedule of it; the static 0.0 leaves the term out.
      mask: optax-style, where weight decay applies.
      decouple_lr: decay by weight_decay lr / peak instead of weight_decay lr, where True takes the
        (constant) learning rate as its peak and a number is the peak of a schedule.
      coupled: add weight_decay w to the gradient instead (L2).
      rate_in_rule: the rule itself multiplies by the learning rate, h["rate"], before its slots, as
        `optax.rmsprop` before its momentum.
      slot_dtypes: dtype of slots where they are not compressed.
      structure: which elements share slots, of a rule with shared slots.
      matrices: which leaves are matrices, of a rule that tells them apart.
      rates: other learning rates that `moments` reads, by name.
    """
    _check_storage(storage, structure)
    _warn_of_slot_dtypes(storage, slot_dtypes)
    check_range("learning_rate", learning_rate, 0.0)
    check_range("weight_decay", weight_decay, 0.0)
    peak = _peak(learning_rate, decouple_lr)
    decays = not (isinstance(weight_decay, int | float) and weight_decay == 0)
    given = {"learning_rate": learning_rate, "weight_decay": weight_decay if decays else None}

    def hyperparameters(count: jax.Array) -> dict[str, jax.Array]:
        # a schedule is the user's code, which may not be traced
        lr, decay = (
            at_count(name, value, count) if callable(value) else value
            for name, value in given.items()
        )
        return Formula(_of_step, (moments, lr, decay, peak, coupled, rate_in_rule))(count)

    return Engine(
        rule=rule,
        hyperparameters=hyperparameters,
        schedules={k: v for k, v in {**given, **(rates or {})}.items() if callable(v)},
        storage=storage,
        decay_mask=mask,
        slot_dtypes=slot_dtypes or {},
        structure=structure,
        matrices=matrices,
    ).transformation()


def _of_step(
    moments: Formula,
    learning_rate: Scalar,
    weight_decay: Scalar | None,
    peak: jax.Array | None,
    coupled: bool,
    rate_in_rule: bool,
    count: jax.Array,
) -> dict[str, jax.Array]:
    lr = as_f32("learning_rate", learning_rate)
    rates = {"rate": lr, "lr": jnp.float32(1)} if rate_in_rule else {"lr": lr}
    h = {**moments(count), **rates}
    if weight_decay is not None and coupled:
        h["l2"] = as_f32("weight_decay", weight_decay)
    elif weight_decay is not None:
        decay = as_f32("weight_decay", weight_decay)
        h["decay"] = decay * (lr if peak is None else jnp.where(peak > 0, lr / peak, 0))
    return h


def _check_storage(storage: object, structure: BlockStructure | None = None) -> None:
    if not isinstance(storage, Storage):
        raise TypeError(f"storage takes a lowmem.Storage, got {storage!r}")
    if storage.rounding == "embeddings" and structure is None:
        raise ValueError(
            "rounding='embeddings' is for optimizers that know which leaves are embeddings, such "
            "as q_adam_mini: use 'stochastic' or 'nearest' here."
        )


def _warn_of_slot_dtypes(
    storage: Storage, slot_dtypes: Mapping[str, DTypeLike | None] | None
) -> None:
    """Warn that the dtype of a slot is not that of the leaves whose slot is compressed."""
    for slot, dtype in (slot_dtypes or {}).items():
        codec = getattr(storage, slot)
        if dtype is not None and codec is not None:
            warnings.warn(
                f"the dtype of {slot}, {jnp.dtype(dtype)}, is for leaves that are too small or "
                f"excluded: in all others {slot} is {codec.name}. Leave it out, or keep {slot} "
                f"uncompressed everywhere with storage=Storage({slot}=None).",
                stacklevel=4,  # of the call of the optimizer
            )


def direction(
    rule: UpdateRule,
    moments: Formula,
    storage: Storage,
    slot_dtypes: Mapping[str, DTypeLike | None] | None = None,
    structure: BlockStructure | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation that gives a rule's direction only (optax's `scale_by_*`)."""
    _check_storage(storage, structure)
    _warn_of_slot_dtypes(storage, slot_dtypes)
    return Engine(
        rule=rule,
        hyperparameters=moments,
        storage=storage,
        weights=False,
        slot_dtypes=slot_dtypes or {},
        structure=structure,
    ).transformation()
