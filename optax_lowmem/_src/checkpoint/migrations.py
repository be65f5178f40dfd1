"""Checkpoints of older format versions, converted to the present one."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from optax_lowmem._src.checkpoint import description
from optax_lowmem._src.checkpoint.description import array_leaves, forms
from optax_lowmem._src.core import scope

Saved = dict[str, Any]  # params, opt_state: trees without types; metadata: their description


def _described(saved: Saved) -> Saved:
    """Version 0 has no description. The arrays speak for themselves, their codecs do not."""
    found = {
        "format": "optax_lowmem",
        "version": 1,
        "params": forms(saved["params"]),
        "slots": None,
        "state": forms(saved["opt_state"]),
    }
    return {**saved, "metadata": found}


def _counted(saved: Saved) -> Saved:
    """Version 2 has a count and a seed beside the corrections of split_master_weights."""
    state = _with_counts(saved["opt_state"])
    found = {**saved["metadata"], "version": 2, "state": forms(state)}
    return {**saved, "opt_state": state, "metadata": found}


def _with_counts(node: object) -> Any:
    if isinstance(node, Mapping):
        found = {key: _with_counts(value) for key, value in node.items()}
        if set(found) == {"correction", "inner_state"}:
            return {"count": np.zeros((), np.int32), "seed": np.zeros((), np.uint32), **found}
        return found
    if isinstance(node, list | tuple):
        return type(node)(map(_with_counts, node))
    return node


# version -> what makes the next one of it
MIGRATIONS: dict[int, Callable[[Saved], Saved]] = {0: _described, 1: _counted}


def migrate(
    saved: Mapping[str, Any], tx: optax.GradientTransformation, params_like: optax.Params
) -> tuple[Any, Any]:
    """Parameters and state of a checkpoint of an older format version.

    `restore` calls it where it must. Call it with what you restored yourself: trees without types,
    as Orbax gives them without a target and `flax.serialization.to_state_dict` makes them. A
    checkpoint without a description is version 0: dtypes and shapes are compared, and that the
    codes are those of `tx` is taken on trust.

    Args:
      saved: `params` and `opt_state`, trees of dicts and lists, and `metadata`, the description, if
        there was one.
      tx: the optimizer that is to go on.
      params_like: its parameters' shapes and dtypes.

    Returns:
      (params, state), with the structure that `tx` keeps.

    Raises:
      ValueError: for a version that is newer or unknown, and as in `check`.

    Example:
      >>> import flax.serialization, jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_lion(1e-4)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> old = {"params": params, "opt_state": flax.serialization.to_state_dict(state)}
      >>> params, state = lowmem.checkpoint.migrate(old, tx, params)
      >>> type(state).__name__
      'FlashLionState'
    """
    now: Saved = {"metadata": None, **saved}
    undescribed = now["metadata"] is None
    if now["metadata"] is not None:
        description.check_version(now["metadata"])
    while (version := (now["metadata"] or {"version": 0})["version"]) < description.FORMAT_VERSION:
        if version not in MIGRATIONS:
            raise ValueError(
                f"the checkpoint has format version {version}, which this package no longer reads: "
                "restore and save it with an older one."
            )
        now = MIGRATIONS[version](now)
    description.compare(now["metadata"], tx, params_like, trusted=undescribed)
    state_like, _ = scope.dry_run(tx, params_like)
    return _typed(now["params"], params_like), _typed(now["opt_state"], state_like)


def _typed(tree: object, like: object) -> Any:
    """The arrays of a tree in another's structure, by their paths."""
    found = dict(array_leaves(tree))
    leaves = [found[path] for path, _ in array_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
