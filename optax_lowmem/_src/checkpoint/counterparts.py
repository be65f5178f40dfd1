"""The optax optimizer that ours are a low-memory form of, and where its state keeps what."""

from typing import Any

import jax.numpy as jnp
import optax

from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.optimizers import every_record
from optax_lowmem._src.optimizers.record import OptimizerRecord
from optax_lowmem._src.update.engine import Engine, EngineTransformation
from optax_lowmem._src.wrappers.chain import Chain

GIVE_PLAIN = (
    "Pass plain=, the optax optimizer that is to go on, for example "
    "plain=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))."
)


def record_of(state: Any) -> OptimizerRecord | None:
    """Return the record whose state this is, or None where it is not one of our optimizers'."""
    if not trees.is_named_tuple(state):
        return None
    kind = type(state).__name__
    return next((r for r in every_record() if r.rule.state_type.__name__ == kind), None)


def counterpart(tx: Any, params: Any) -> optax.GradientTransformation:
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
    record = next((r for r in every_record() if type(r.rule) is type(engine.rule)), None)
    if record is None or (not engine.weights and record.plain_scale_by is None):
        what = type(engine.rule).__name__ + ("" if engine.weights else "'s direction alone")
        raise ValueError(f"no optax optimizer is known to correspond to {what}. {GIVE_PLAIN}")
    if not engine.weights and record.plain_scale_by is not None:
        return record.plain_scale_by()
    h = engine.hyperparameters(jnp.zeros((), jnp.int32))
    # where it is scheduled optax keeps a count of its own
    rate, strength = (
        (lambda count: 0.0) if name in engine.schedules else default
        for name, default in (("learning_rate", 0.0), ("weight_decay", 1e-4))
    )
    decay: dict[str, Any] = {"weight_decay": strength, "mask": engine.decay_mask}
    decays = "decay" in h or "l2" in h
    if not decays and record.undecayed is not None:
        return record.undecayed(rate)
    plain = record.in_optax
    taken = record.chosen(decay, plain)
    if decays and not taken:
        return optax.chain(optax.add_decayed_weights(**decay), plain(rate))
    return plain(rate, **taken)
