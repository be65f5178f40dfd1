"""Packs, which concatenate several leaves into one vector: packing and unpacking of trees."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.core import array_metadata, trees
from optax_lowmem._src.core.compiled import compiled
from optax_lowmem._src.core.typing import Shaped

Packs = Mapping[str, list[str]]  # name of a pack (that of its first leaf) -> its leaves


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class InPack:
    """Placeholder for a leaf whose elements are in its pack's vector.

    `pack` is the name of the pack, whose first leaf the vector replaces.
    """

    pack: str


def layout(tree: object) -> tuple[list[str], Packs]:
    """Return the names of a tree's leaves, packed ones included, and the leaves of each pack."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda n: isinstance(n, InPack))
    packs: dict[str, list[str]] = {}
    for path, node in nodes:
        if isinstance(node, InPack):
            packs.setdefault(node.pack, [node.pack]).append(trees.path_name(path))
    return [trees.path_name(path) for path, _ in nodes], packs


def pack(tree: optax.Params, packs: Packs) -> Any:
    """Replace the first leaf of each pack by the pack's vector, and the others by `InPack`.

    Elements are in the order of the leaves, each leaf in row-major order.
    """
    named = dict(trees.named_leaves(tree))
    nodes: dict[str, Any] = {}
    for name, leaves in packs.items():
        nodes |= dict.fromkeys(leaves, InPack(name))
        nodes[name] = join([named[leaf] for leaf in leaves])
    return array_metadata.like(tree, [nodes.get(name, leaf) for name, leaf in named.items()])


def unpacked(tree: object, like: Mapping[str, Shaped]) -> dict[str, Any]:
    """Return the leaves of a tree by name, with packs split into leaves of shapes as in `like`.

    A pack's 0-d placeholder becomes that of each leaf. A pack with leaves missing from `like` is
    not split.
    """
    _, packs = layout(tree)
    named = dict(trees.named_leaves(tree))
    for name, leaves in packs.items():
        if not all(leaf in like for leaf in leaves):
            continue
        if not jnp.ndim(named[name]):
            named |= dict.fromkeys(leaves, named[name])
            continue
        shapes = [tuple(like[leaf].shape) for leaf in leaves]
        size = sum(map(math.prod, shapes))
        if named[name].shape != (size,):
            raise ValueError(
                f"the pack of '{name}' and {len(leaves) - 1} more leaves has the shape "
                f"{list(named[name].shape)}, but these leaves have {size} elements: the state is "
                "of other parameters. Pass those passed to init, or call init on these."
            )
        named |= dict(zip(leaves, _parts(named[name], shapes), strict=True))
    return named


def join(leaves: list[Any]) -> Any:
    """Concatenate leaves into a vector; shapes give a shape."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.eval_shape(_join, leaves)
    return compiled(_join)(leaves)


def _join(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@compiled
def _parts(vector: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    ends = itertools.accumulate(map(math.prod, shapes))
    return [
        vector[end - math.prod(s) : end].reshape(s) for end, s in zip(ends, shapes, strict=True)
    ]
