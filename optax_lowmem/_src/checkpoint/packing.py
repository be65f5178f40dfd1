"""Trees as Orbax takes them: no arrays of size 0, no array without a name, no empty items."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import trees

_BARE = "array"  # the name of an array that is a whole tree


def packed(tree: Any) -> Any:
    """A tree without its arrays of size 0; None where no array is left.

    Raises:
      ValueError: for two arrays of one name: Orbax calls a file's arrays by their keys and dots.
    """
    trees.unique_names(tree, _dotted, "in an Orbax checkpoint")
    kept = jax.tree.map(lambda leaf: leaf if _filled(leaf) else None, tree)
    if not jax.tree.leaves(kept):
        return None
    return {_BARE: kept} if jax.tree_util.all_leaves([kept]) else kept


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _filled(leaf: Any) -> bool:
    return 0 not in jnp.shape(leaf)


def unpacked(found: Any, target: Any) -> Any:
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
