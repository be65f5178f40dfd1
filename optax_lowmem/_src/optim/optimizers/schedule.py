"""Build optimizers from rules, with the learning rate and weight decay of each step in f32."""

import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.block import BlockStructure
from optax_lowmem._src.arrays.hyperparameters import (
    LEAST,
    Formula,
    as_f32,
    check_range,
    complement,
    is_zero,
)
from optax_lowmem._src.arrays.typing import Arrays, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.step.engine import Engine
from optax_lowmem._src.optim.step.matrix_axes import MatrixAxes
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.storage import Storage, completed

_BY_NAME = (
    "a function such as lambda params: jax.tree.map_with_path("
    "lambda path, _: '{}' in jax.tree_util.keystr(path), params)"
)


def at_count(name: str, value: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """Return a hyperparameter at step `count` (schedules are called with 0, 1, ...)."""
    return as_f32(name, value(count) if callable(value) else value)


def _peak(learning_rate: ScalarOrSchedule, decouple_lr: bool | float) -> jax.Array | None:
    if decouple_lr is False:
        return None
    if decouple_lr is True:
        if callable(learning_rate):
            raise ValueError(
                "decouple_lr=True needs the largest learning rate of the schedule: pass it as a "
                "number, such as decouple_lr=3e-4"
            )
        if isinstance(learning_rate, jax.Array):
            raise ValueError(
                "decouple_lr=True needs the largest learning rate, but an array may be that of one "
                "step (as under inject_hyperparams): pass a number, such as decouple_lr=3e-4"
            )
        return as_f32("learning_rate", learning_rate)
    check_range("decouple_lr", decouple_lr, 0.0)
    return as_f32("decouple_lr", decouple_lr)


def optimizer(
    rule: UpdateRule,
    moments: Formula,
    learning_rate: ScalarOrSchedule,
    storage: Storage,
    momentum: Scalar | None = None,
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
    """Return the transformation w <- w - lr (direction + weight_decay w) for a rule.

    `moments` computes the rule's hyperparameters from the count before the step, and may read other
    learning `rates`. Weight decay of the Python number 0.0 is omitted; if `coupled`, it is added to
    the gradient (L2). With `decouple_lr` it is weight_decay lr / peak: True for the (constant)
    learning rate as the peak, a number for the peak of a schedule. If `rate_in_rule`, the rule
    multiplies by h["rate"] before it updates its slots, as `optax.rmsprop` before its momentum. The
    other arguments are as in `LeafPlanner`. `momentum` is the decay of the slot mu, given if the
    rule's direction is proportional to mu, which error feedback needs.
    """
    storage = _checked(storage, structure, slot_dtypes or {})
    if storage.error_feedback and (momentum is None or is_zero(momentum)):
        raise ValueError(
            "error_feedback=True needs a momentum to which the direction is proportional, and this "
            "optimizer has none: use AdamW or one of its variants with b1 > 0, SGD with momentum, "
            "or error_feedback=False."
        )
    decay_of_mu = momentum if storage.error_feedback else None
    check_range("learning_rate", learning_rate, 0.0)
    check_range("weight_decay", weight_decay, 0.0)
    trees.check_mask("the mask of weight decay", mask, _BY_NAME)
    peak = _peak(learning_rate, decouple_lr)
    decay = None if is_zero(weight_decay) else weight_decay
    given = {"learning_rate": learning_rate, "weight_decay": decay}

    def hyperparameters(count: jax.Array) -> Arrays:
        # call schedules here: they are user code that may not be traceable
        lr, decay = (
            at_count(name, value, count) if callable(value) else value
            for name, value in given.items()
        )
        arguments = moments, lr, decay, peak, coupled, rate_in_rule, decay_of_mu
        return Formula(_hyperparameters_at, arguments)(count)

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


def _hyperparameters_at(
    moments: Formula,
    learning_rate: Scalar,
    weight_decay: Scalar | None,
    peak: jax.Array | None,
    coupled: bool,
    rate_in_rule: bool,
    momentum: Scalar | None,
    count: jax.Array,
) -> Arrays:
    lr = as_f32("learning_rate", learning_rate)
    rates = {"rate": lr, "lr": jnp.float32(1)} if rate_in_rule else {"lr": lr}
    h = {**moments(count), **rates}
    if weight_decay is not None and coupled:
        h["l2"] = as_f32("weight_decay", weight_decay)
    elif weight_decay is not None:
        decay = as_f32("weight_decay", weight_decay)
        h["decay"] = decay * (lr if peak is None else jnp.where(peak > 0, lr / peak, 0))
    if momentum is not None:
        return {**h, **_feedback_at(momentum, lr)}
    return h


def _feedback_at(momentum: Scalar, lr: jax.Array) -> Arrays:
    """Return the hyperparameters of `reference.feed_back`."""
    b = as_f32("momentum", momentum)
    share = jnp.where(b > 0, complement("momentum", momentum) / jnp.maximum(b, LEAST), 0)
    return {"feedback": share, "feedback_rate": jnp.maximum(lr, LEAST)}


def _checked(
    storage: Storage, structure: BlockStructure | None, slot_dtypes: Mapping[str, DTypeLike | None]
) -> Storage:
    """Return a storage with no field left to the optimizer; raise if it is wrong.

    Warn of slot dtypes that compressed leaves do not have.
    """
    if not isinstance(storage, Storage):
        raise TypeError(f"storage takes a lowmem.Storage, got {storage!r}")
    storage = completed(storage)
    if storage.rounding == "embeddings" and structure is None:
        raise ValueError(
            "rounding='embeddings' needs an optimizer that knows which leaves are embeddings, such "
            "as q_adam_mini: use 'stochastic' or 'nearest' here."
        )
    if storage.weights != "bfloat16" and storage.mu is None and storage.nu is None:
        raise ValueError(
            f"weights={storage.weights!r} is for parameters whose moments are stored as codes, and "
            "mu and nu are None: give a codec for one of them, such as mu='int8'."
        )
    for slot, dtype in slot_dtypes.items():
        codec = getattr(storage, slot)
        if dtype is not None and codec is not None:
            warnings.warn(
                f"the dtype of {slot}, {jnp.dtype(dtype)}, applies only to leaves that are too "
                f"small or excluded: in all others {slot} is {codec.name}. Omit it, or keep {slot} "
                f"uncompressed everywhere with storage=Storage({slot}=None).",
                stacklevel=4,  # the call of the optimizer
            )
    return storage


def direction(
    rule: UpdateRule,
    moments: Formula,
    storage: Storage,
    slot_dtypes: Mapping[str, DTypeLike | None] | None = None,
    structure: BlockStructure | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that computes a rule's direction only (optax's `scale_by_*`)."""
    storage = _checked(storage, structure, slot_dtypes or {})
    if storage.error_feedback:
        raise ValueError(
            "error_feedback=True is for optimizers that update the weights, such as flash_adamw: a "
            "direction alone knows neither the learning rate nor the rounding of the weights."
        )
    return Engine(
        rule=rule,
        hyperparameters=moments,
        storage=storage,
        weights=False,
        slot_dtypes=slot_dtypes or {},
        structure=structure,
    ).transformation()
