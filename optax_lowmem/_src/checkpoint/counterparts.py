"""The optax optimizer that ours are a low-memory form of, and where its state keeps what."""

from typing import Any

import jax.numpy as jnp
import optax

from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.optimizers import every_record
from optax_lowmem._src.optimizers.record import Constructor, OptimizerRecord, name_of
from optax_lowmem._src.update.engine import Engine, EngineTransformation
from optax_lowmem._src.wrappers.chain import Chain

GIVE_PLAIN = (
    "Pass plain=, the optax optimizer that is to go on, for example "
    "plain=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))."
)

_UNCOMPRESSED = "the same optimizer, uncompressed,"


def record_of(state: optax.OptState) -> OptimizerRecord | None:
    """Return the record whose state this is, or None where it is not one of our optimizers'."""
    if not trees.is_named_tuple(state):
        return None
    kind = type(state).__name__
    return next((r for r in every_record() if r.rule.state_type.__name__ == kind), None)


def counterpart(
    tx: optax.GradientTransformation, params: optax.Params
) -> optax.GradientTransformation:
    """An optax optimizer with the state that `tx` would have in f32; its rates mean nothing.

    Raises:
      ValueError: where it cannot be told from `tx`, which may be a closure of optax's.
    """
    if isinstance(tx, EngineTransformation):
        return _of_engine(tx.engine)
    if isinstance(tx, Chain):
        return optax.chain(*(counterpart(link, params) for link in tx.links))
    state, decisions = scope.dry_run(tx, params)
    if not decisions:
        return tx
    inner = getattr(getattr(tx.init, "__self__", None), "inner", None)
    if inner is not None and type(state).__name__ in ("SplitState", "CompressedState"):
        return counterpart(inner, params)
    raise ValueError(
        f"which optax optimizer this one corresponds to is hidden inside a wrapper (its state is a "
        f"{type(state).__name__}). {GIVE_PLAIN}"
    )


def _of_engine(engine: Engine) -> optax.GradientTransformation:
    record = _record_of_rule(engine)
    make = _constructor(record, engine) if record else None
    if record is None or make is None:
        what = type(engine.rule).__name__ + ("" if engine.weights else "'s direction alone")
        raise ValueError(f"no optax optimizer is known to correspond to {what}. {GIVE_PLAIN}")
    if not engine.weights:
        return make()
    # where it is scheduled optax keeps a count of its own
    rate, strength = (
        (lambda count: 0.0) if name in engine.schedules else default
        for name, default in (("learning_rate", 0.0), ("weight_decay", 1e-4))
    )
    if not _decays(engine):
        return make(rate)
    decay: dict[str, Any] = {"weight_decay": strength, "mask": engine.decay_mask}
    taken = record.chosen(decay, make)
    if not taken:
        return optax.chain(optax.add_decayed_weights(**decay), make(rate))
    return make(rate, **taken)


def name(tx: optax.GradientTransformation) -> str:
    """Return what `counterpart` of an optimizer is called, for display."""
    if isinstance(tx, Chain):
        ours = [link for link in tx.links if isinstance(link, EngineTransformation)]
        return name(ours[0]) if len(ours) == 1 else _UNCOMPRESSED
    record = _record_of_rule(tx.engine) if isinstance(tx, EngineTransformation) else None
    made = (
        _constructor(record, tx.engine) if record and isinstance(tx, EngineTransformation) else None
    )
    known = name_of(made) if made else None
    return f"optax.{known}" if known and hasattr(optax, known) else _UNCOMPRESSED


def _constructor(record: OptimizerRecord, engine: Engine) -> Constructor | None:
    """Return what makes the optax optimizer with the state that an engine would have in f32."""
    if not engine.weights:
        return record.plain_scale_by
    return record.in_optax if _decays(engine) else record.undecayed or record.in_optax


def _decays(engine: Engine) -> bool:
    return not {"decay", "l2"}.isdisjoint(engine.hyperparameters(jnp.zeros((), jnp.int32)))


def _record_of_rule(engine: Engine) -> OptimizerRecord | None:
    return next((r for r in every_record() if type(r.rule) is type(engine.rule)), None)
