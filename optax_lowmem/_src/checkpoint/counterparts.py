"""The optax optimizer that ours are a low-memory form of, and where its state keeps what."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from optax_lowmem._src.core import scope
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.optimizers.adam import AdamRule
from optax_lowmem._src.optimizers.lion import LionRule
from optax_lowmem._src.optimizers.sgd import GradientRule, MomentumRule
from optax_lowmem._src.optimizers.stable_adamw import StableAdamRule
from optax_lowmem._src.update.engine import Engine, Optimizer
from optax_lowmem._src.wrappers.chain import Chain
from optax_lowmem._src.wrappers.update_clipping import update_clipping

GIVE_PLAIN = (
    "Pass plain=, the optax optimizer that is to go on, for example "
    "plain=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))."
)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Fields of optax's state that hold the moments of one of our states.

    Attributes:
      state: name of the type of optax's state; None where there are no moments.
      fields: our slot -> the field of optax's state.
    """

    state: str | None
    fields: Mapping[str, str]


# type of our state -> where optax has its slots; an optimizer with a new type of state adds a line
MOMENTS: dict[str, Moments] = {
    "FlashAdamState": Moments("ScaleByAdamState", {"mu": "mu", "nu": "nu"}),
    "FlashLionState": Moments("ScaleByLionState", {"mu": "mu"}),
    "FlashSgdState": Moments("TraceState", {"mu": "trace"}),
    "PlainSgdState": Moments(None, {}),
}


def counterpart(tx: Any, params: Any) -> optax.GradientTransformation:
    """An optax optimizer with the state that `tx` would have in f32; its rates mean nothing.

    Raises:
      ValueError: where it cannot be told from `tx`, which may be a closure of optax's.
    """
    if isinstance(tx, Optimizer):
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


_OF_DIRECTION: list[tuple[type[UpdateRule], Callable[[], optax.GradientTransformation]]] = [
    (AdamRule, optax.scale_by_adam),
    (LionRule, optax.scale_by_lion),
    (MomentumRule, lambda: optax.trace(0.9)),
    (GradientRule, optax.identity),
]


def _of_engine(engine: Engine) -> optax.GradientTransformation:
    rule = engine.rule
    if not engine.weights:
        for kind, make in _OF_DIRECTION:
            if isinstance(rule, kind):
                return make()
    h = engine.hyperparameters(jnp.zeros((), jnp.int32))
    # where it is scheduled optax keeps a count of its own
    rate, strength = (
        (lambda count: 0.0) if name in engine.schedules else default
        for name, default in (("learning_rate", 0.0), ("weight_decay", 1e-4))
    )
    decay: dict[str, Any] = {"weight_decay": strength, "mask": engine.decay_mask}
    if isinstance(rule, StableAdamRule):
        return update_clipping(optax.adamw(rate, **decay), b2=0.9, eps=1e-8)
    if isinstance(rule, AdamRule):
        return optax.adamw(rate, **decay) if "decay" in h else optax.adam(rate)
    if isinstance(rule, LionRule):
        return optax.lion(rate, **decay)
    if isinstance(rule, MomentumRule | GradientRule):
        plain = optax.sgd(rate, momentum=0.9 if isinstance(rule, MomentumRule) else None)
        decayed = "decay" in h or "l2" in h
        return optax.chain(optax.add_decayed_weights(**decay), plain) if decayed else plain
    raise ValueError(
        f"no optax optimizer is known to correspond to {type(rule).__name__}. {GIVE_PLAIN}"
    )
