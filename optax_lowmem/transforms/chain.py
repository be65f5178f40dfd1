"""`chain` that keeps precision, and `step`."""

from typing import Any

import jax
import optax

from optax_lowmem._core import numerics
from optax_lowmem.transforms.engine import Optimizer
from optax_lowmem.transforms.masters import splits_masters

_IMPLEMENTATIONS = ("xla",)


def chain(*transformations: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` whose links see f32 gradients, with the same tuple as its state.

    (optax's clipping takes the norm of bf16 gradients in bf16.)

    Args:
      *transformations: the links; one that splits master weights must be the last.

    Raises:
      ValueError: in `init`, where a link follows one that splits master weights.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(3e-4))
    """
    linked = optax.chain(*transformations)

    def init(params: Any) -> Any:
        for index, link in enumerate(transformations[:-1]):
            if splits_masters(link, params):
                raise ValueError(
                    f"link {index} of the chain splits master weights, so link {index + 1} would "
                    "change updates whose corrections are already taken. Put it before, or give "
                    f"link {index} storage=Storage(master_weight_bits=None) and wrap the chain in "
                    "split_master_weights."
                )
        return linked.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return linked.update(jax.tree.map(numerics.widen, updates), state, params, **extra)

    linked_up = Chain(init, update)
    linked_up.links = tuple(map(optax.with_extra_args_support, transformations))
    return linked_up


class Chain(optax.GradientTransformationExtraArgs):
    """A chain that remembers its links, for `step`."""

    links: tuple[optax.GradientTransformationExtraArgs, ...]


def step(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    implementation: str | None = None,
    **extra: Any,
) -> tuple[Any, Any]:
    """One training step: new parameters and state.

    The same result as `tx.update` and `optax.apply_updates`. Nothing is donated here: jit the
    training step with `donate_argnums` for parameters and state.

    Args:
      tx: any optax transformation.
      grads: gradients, f32 or 16-bit.
      state: the optimizer's state.
      params: the parameters.
      implementation: None picks the fastest there is; "xla" is plain jnp, on every device.
      **extra: extra arguments of the optimizer, such as `value=`.

    Returns:
      (parameters, state).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((8, 8))})
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((8, 8))}, state, params)
    """
    if implementation not in (None, *_IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {_IMPLEMENTATIONS} or None, got {implementation!r}"
        )
    if isinstance(tx, Optimizer) and tx.engine.weights and params is not None:
        return tx.engine.apply(grads, state, params)
    if isinstance(tx, Chain) and tx.links and isinstance(tx.links[-1], Optimizer):
        return _step_chain(tx, grads, state, params, **extra)
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def _step_chain(
    tx: Chain, grads: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The links before the last on f32 gradients, then a step of the last."""
    updates = jax.tree.map(numerics.widen, grads)
    states = []
    for link, link_state in zip(tx.links[:-1], state, strict=False):
        updates, link_state = link.update(updates, link_state, params, **extra)
        states.append(link_state)
    params, last = step(tx.links[-1], updates, state[-1], params, **extra)
    return params, (*states, last)
