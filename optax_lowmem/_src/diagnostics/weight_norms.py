"""Norms of the master weights, and how far they have drifted."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import trees
from optax_lowmem._src.diagnostics.selection import chosen
from optax_lowmem._src.update.masters import master_params


def norms(params: Any, state: Any = None, *, leaves: Sequence[str] = ("*",)) -> dict[str, Any]:
    r"""The Euclidean norm :math:`\lVert\theta\rVert_2` of each leaf's master weight, in f32.

    Args:
      params: the weights.
      state: the optimizer's state, for the corrections; None takes the weights as they are.
      leaves: glob patterns on leaf paths; each must match some leaf.

    Returns:
      Leaf path -> f32 scalar, for a logger or as the reference of `norm_drift`.

    Raises:
      TypeError: for a string as `leaves`.
      ValueError: for a pattern that matches no leaf, or a leaf with two corrections.

    Cost: reads 3 bytes a bf16 weight of the chosen leaves (2 and a correction of 1), or 4. Under
    jit, no f32 copy is stored.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"block": {"w": jnp.full((64, 64), 0.5), "b": jnp.zeros(64)}}
      >>> weights, state = lowmem.init(lowmem.flash_adamw(1e-3), params)
      >>> now = lowmem.diagnostics.norms(weights, state, leaves=("*/w",))
      >>> {f"norm/{path}": float(norm) for path, norm in now.items()}
      {'norm/block/w': 32.0}
    """
    weights = dict(chosen(trees.named_leaves(params), leaves))
    masters = master_params(weights, () if state is None else state)
    return {path: jnp.sqrt(jnp.sum(jnp.square(masters[path]))) for path in weights}


def norm_drift(now: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, jax.Array]:
    r"""Relative change :math:`\lVert\theta_t\rVert / \lVert\theta_0\rVert - 1` of weight norms.

    Args:
      now: leaf path -> norm, of `norms`.
      reference: the same at an earlier step; plain numbers will do, and more leaves than `now`.

    Returns:
      Leaf path -> f32 scalar: 0.1 where a norm has grown by 10 %. A leaf that started at zero has
      drifted by inf once it moves, by 0 before.

    Raises:
      ValueError: for a leaf without a reference.

    Example:
      >>> import optax_lowmem as lowmem
      >>> drift = lowmem.diagnostics.norm_drift({"w": 3.0, "b": 0.0}, {"w": 2.0, "b": 0.0})
      >>> {path: float(change) for path, change in drift.items()}
      {'w': 0.5, 'b': 0.0}
    """
    missing = [path for path in now if path not in reference]
    if missing:
        raise ValueError(
            f"the reference has no norm of '{missing[0]}', only of "
            f"{', '.join(list(reference)[:3]) or 'no leaf'}: take both with the same `leaves`."
        )
    return {path: _drift(now[path], reference[path]) for path in now}


def _drift(now: Any, before: Any) -> jax.Array:
    now, before = jnp.asarray(now, jnp.float32), jnp.asarray(before, jnp.float32)
    return jnp.where((now == 0) & (before == 0), jnp.float32(0), now / before - 1)
