"""The optimizer of gradient release, and the clipping before it."""

import dataclasses
from typing import Any

import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.optim.step.engine import Engine, EngineTransformation
from optax_lowmem._src.optim.wrappers.chain import Chain, global_norm_limit


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One of our optimizers, alone or after `optax.clip_by_global_norm` in `lowmem.chain`."""

    engine: Engine
    limit: Any  # of the global norm of gradients, or None

    @classmethod
    def of(cls, tx: optax.GradientTransformation) -> "Optimizer":
        """Take a transformation apart; raise ValueError for one that may need all gradients."""
        limit = None
        if isinstance(tx, Chain) and len(tx.links) == 2:
            limit = global_norm_limit(tx.links[0])
            tx = tx if limit is None else tx.links[1]
        if isinstance(tx, EngineTransformation) and tx.engine.weights:
            return cls(tx.engine, limit)
        if isinstance(tx, EngineTransformation):
            raise ValueError(
                "a bare direction (scale_by_*) has no learning rate to step with: pass a complete "
                "optimizer, such as flash_adamw."
            )
        update = getattr(tx, "update", None)
        name = getattr(update, "__qualname__", type(tx).__qualname__).split(".<locals>")[0]
        name = f"{getattr(update, '__module__', type(tx).__module__)}.{name}"
        raise ValueError(
            f"gradient release takes one of our optimizers itself, such as flash_adamw(...), not "
            f"{name}. A transformation around or before it may need the gradients of all layers at "
            "once (accumulate_gradients, MultiSteps, apply_if_finite), which never exist together "
            "here. Use jax.value_and_grad(model) and lowmem.step with it; or pass elementwise work "
            "on gradients as each_gradient=, a mask of decay as mask=, clipping by the global norm "
            "as lowmem.chain(optax.clip_by_global_norm(c), optimizer), a learning rate from "
            "outside as an f32 argument of the jitted step that builds the optimizer."
        )

    def inner(self, state: Any) -> Any:
        """Return the state of the optimizer alone, after checking its type."""
        if self.limit is not None:
            if not isinstance(state, (tuple, list)) or len(state) != 2:
                raise ValueError(
                    f"the state is a {type(state).__name__}, but that of a chain of two links is a "
                    "tuple of two states: pass what tx.init made."
                )
            state = state[1]
        trees.check_state(state, self.engine.rule.state_type)
        return state

    def outer(self, state: Any, new: Any) -> Any:
        """Return `state` with `new` in place of its `inner`."""
        return new if self.limit is None else (state[0], new)
