"""Trees of arrays as Orbax saves them, and the abstract trees that it restores them to."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.core.placement import beside

# ---- saved: no arrays of size 0, no array without a name, no empty items -------------------------

_BARE = "array"  # the name of an array that is a whole tree


def packed(tree: object) -> Any:
    """A tree without its arrays of size 0; None where no array is left.

    Raises:
      ValueError: for two arrays of one name: Orbax calls a file's arrays by their keys and dots.
    """
    trees.named_leaves(tree, _dotted, "in an Orbax checkpoint")
    kept = jax.tree.map(lambda leaf: leaf if _filled(leaf) else None, tree)
    if not jax.tree.leaves(kept):
        return None
    return {_BARE: kept} if jax.tree_util.all_leaves([kept]) else kept


def _dotted(path: tuple[object, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _filled(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return 0 not in jnp.shape(leaf)


def unpacked(found: object, target: object) -> Any:
    """The tree of `target`, from the arrays of its packed form.

    Args:
      found: what was restored for `packed(target)`, None where that is None.
      target: abstract, with shardings.
    """
    arrays = iter(jax.tree.leaves(found))

    def leaf(like: jax.ShapeDtypeStruct) -> Any:
        if _filled(like):
            return next(arrays)
        return jnp.zeros(like.shape, like.dtype, device=like.sharding)

    return jax.tree.map(leaf, target)


# ---- restored: with the shardings of the parameters and the state --------------------------------

Shardings = Any  # a Sharding, or a tree of them, a prefix of the state's


def targets(
    params_like: optax.Params,
    state_like: optax.OptState,
    shardings: Shardings,
    decisions: Sequence[scope.Decision],
) -> tuple[Any, Any]:
    """Abstract parameters and state, every leaf with its sharding.

    Args:
      params_like: arrays or abstract ones; one without a sharding goes on all devices of those that
        have one, else to the default device.
      state_like: abstract state of the optimizer.
      shardings: of the state, or None.
      decisions: how the optimizer stores each slot.
    """
    given = [getattr(p, "sharding", None) for p in jax.tree.leaves(params_like)]
    widest = max((s for s in given if s is not None), key=lambda s: len(s.device_set), default=None)
    here = _everywhere(widest or SingleDeviceSharding(jnp.zeros(()).devices().pop()))
    params = jax.tree.map(lambda p: _abstract(p, getattr(p, "sharding", None) or here), params_like)
    leaves, treedef = jax.tree.flatten(state_like)
    if shardings is None:
        of_leaves = _as_parameters(params, state_like, here, decisions)
    else:
        of_leaves = trees.broadcast_prefix("the tree of shardings", shardings, state_like)
        for (path, _), sharding in zip(trees.named_leaves(state_like), of_leaves, strict=True):
            if not isinstance(sharding, Sharding):
                raise TypeError(
                    f"the sharding of state '{path}' is {sharding!r}: give a jax.sharding.Sharding,"
                    " such as NamedSharding(mesh, spec)."
                )
    state = [_abstract(leaf, s) for leaf, s in zip(leaves, of_leaves, strict=True)]
    return params, jax.tree.unflatten(treedef, state)


def _abstract(leaf: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype, sharding=sharding)


def _as_parameters(
    params: optax.Params,
    state: optax.OptState,
    here: Sharding,
    decisions: Sequence[scope.Decision],
) -> Sequence[Sharding]:
    """Return the sharding of each array of a state: its parameter's, else `here`.

    An array belongs to the parameter whose path ends its own, if both have the same shape, or it
    has the shape of codes of that parameter.
    """
    known = dict(trees.named_leaves(params))
    narrow = {}
    for d in decisions:
        if d.codec is None or d.group_size is None or d.block is not None or d.codec.bits == 8:
            continue
        p = known.get(d.path)
        if p is not None and p.shape == d.shape:
            shape = d.codec.storage(d.shape, d.group_size).codes.shape
            narrow[d.path, shape] = beside(d.path, d.shape, p.sharding, shape, (d.group_size,))
    found = []
    for path, leaf in trees.named_leaves(state):
        parts = path.split("/")
        names = ["/".join(parts[at:]) for at in range(len(parts))]
        owners = (known.get(name) for name in names)
        owner = next((p for p in owners if p is not None and p.shape == leaf.shape), None)
        of_codes = (narrow[name, leaf.shape] for name in names if (name, leaf.shape) in narrow)
        found.append(next(of_codes, here) if owner is None else owner.sharding)
    return found


def _everywhere(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def place(tree: object, target: object) -> Any:
    """Arrays on the devices of the leaves of `target`."""
    return jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)
