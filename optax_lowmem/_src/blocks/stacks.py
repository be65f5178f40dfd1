"""Axes of a leaf that stack layers or experts, which keep their own second moments."""

import re
from collections import defaultdict
from typing import Any

import jax

from optax_lowmem._src.blocks.leaves import Leaf, Leaves, bias_of
from optax_lowmem._src.core import trees

_LEAST_RANK = {"kernel": 2, "embedding": 2, "w": 2, "bias": 1, "scale": 1, "b": 1}

_STACKS = {"layers", "layer", "blocks", "block", "h", "stack", "layer_stack", "stages", "experts"}
_LINEN_STACK = re.compile(r"(Scan|Vmap)[A-Z]")  # the names that nn.scan and nn.vmap give
_STACK_AXES = {"layers", "layer", "scan", "stack", "blocks", "stages", "stage", "experts",
               "expert", "exp"}  # fmt: skip


def leaves_of(params: Any) -> Leaves:
    """path -> leaf with its stacked axes, in flattening order."""
    names = _partition_names(params)
    leaves = []
    for (path, array), axes in zip(trees.named_leaves(params), names, strict=True):
        leaf = Leaf(path, tuple(array.shape))
        for axis, name in enumerate(axes if len(axes) == len(leaf.shape) else ()):
            if name in _STACK_AXES:
                leaf = leaf.stack(axis, f"axis {axis} is '{name}' in the metadata")
        leaves.append(leaf)
    return _by_biases({leaf.path: leaf for leaf in _by_components(leaves)})


def _partition_names(params: Any) -> list[tuple[Any, ...]]:
    """For each leaf the names that Flax's metadata gives its axes, or ()."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: _axis_names(node) is not None)
    return [_axis_names(node) or () for node in nodes for _ in jax.tree.leaves(node)]


def _axis_names(node: Any) -> tuple[Any, ...] | None:
    """Names of a Linen box or an NNX variable; by their attributes, since Flax is not imported."""
    if hasattr(node, "unbox") and hasattr(node, "names"):
        return tuple(node.names)
    if not hasattr(node, "get_metadata"):
        return None
    metadata = node.get_metadata()
    keys = ("out_sharding", "sharding_names", "sharding")
    names = next((metadata[key] for key in keys if metadata.get(key) is not None), ())
    return tuple(names) if isinstance(names, tuple | list | jax.sharding.PartitionSpec) else ()


def _by_components(leaves: list[Leaf]) -> list[Leaf]:
    """Stacked axes from components such as `layers`, where the shapes agree with it."""
    told = {leaf.path for leaf in leaves if leaf.stacked}  # the metadata knows better
    members = defaultdict(list)
    for index, leaf in enumerate(leaves):
        for depth in range(1, len(leaf.names)):
            name, following = leaf.names[depth - 1], leaf.names[depth]
            named = name.lower() in _STACKS and not following.isdigit()
            if (named or _LINEN_STACK.match(name)) and leaf.path not in told:
                members[depth, "/".join(leaf.names[:depth])].append(index)
    found = list(leaves)
    for depth, prefix in sorted(members):
        group = members[depth, prefix]
        at = _common_axis([found[index] for index in group])
        if at is None:
            continue
        for index in group:
            axis = found[index].inner[at]
            found[index] = found[index].stack(axis, f"axis {axis} is stacked by '{prefix}'")
    return found


def _common_axis(group: list[Leaf]) -> int | None:
    """0 or 1: the axis that all these leaves share, if every one can do without it."""
    shapes = [leaf.inner_shape for leaf in group]
    if max(map(len, shapes)) < 3:  # vectors and matrices of one width, not stacks of them
        return None
    spare = all(
        len(shape) > _LEAST_RANK.get(leaf.array, 0)
        for leaf, shape in zip(group, shapes, strict=True)
    )
    for axis in (0, 1):
        if spare and min(map(len, shapes)) > axis and len({shape[axis] for shape in shapes}) == 1:
            return axis
    return None


def _by_biases(leaves: Leaves) -> Leaves:
    """Stacked axes where a kernel and its bias show one: (3, 16, 48) and (3, 48)."""
    found = dict(leaves)
    for leaf in leaves.values():
        bias = bias_of(leaf, leaves)
        if bias is None or leaf.stacked or bias.stacked:
            continue
        kernel, features = leaf.shape, bias.shape
        if (
            1 < len(features) < len(kernel)
            and kernel[0] == features[0]
            and kernel[1 - len(features) :] == features[1:]
            and kernel[-len(features) :] != features
        ):
            for one in (leaf, bias):
                found[one.path] = one.stack(0, "axis 0 is stacked in the kernel and its bias")
    return found
