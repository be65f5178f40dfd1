"""Properties of leaves from their paths: module, neighbours, orientation and stacked axes."""

import dataclasses
import math
import re
from collections import defaultdict
from typing import NamedTuple

import jax
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.block import Block

# array names inside a module; any other last path component names a module that is a bare array
ARRAYS = {"kernel", "embedding", "bias", "scale", "weight", "w", "b", "gamma", "beta"}
BIASES = {"bias", "b"}

_ATTENTION_WORDS = {"attn", "attention", "mha", "crossattention", "selfattention"}


class Heads(NamedTuple):
    """Head counts that the user gave."""

    query: int | None
    key: int | None


@dataclasses.dataclass(frozen=True)
class ModuleLeaf:
    """A leaf with its module, derived from its path."""

    path: str
    shape: tuple[int, ...]
    stacked: tuple[int, ...] = ()  # axes that stack layers or experts, never averaged over
    why: str = ""  # how the stacked axes were recognised

    @property
    def names(self) -> list[str]:
        """Return the components of the path."""
        return self.path.split("/")

    @property
    def array(self) -> str:
        """Return the name of the array inside its module; "" for a bare array."""
        return self.names[-1] if self.names[-1] in ARRAYS else ""

    @property
    def module_names(self) -> list[str]:
        """Return the components of the module's path."""
        return self.names[:-1] if self.array else self.names

    @property
    def module(self) -> str:
        """Return the module's name in lower case, without Linen's number: `dense` for `Dense_0`."""
        return re.sub(r"_\d+$", "", self.module_names[-1]).lower() if self.module_names else ""

    @property
    def group(self) -> str:
        """Return the path of the module's parent, such as the attention."""
        return "/".join(self.module_names[:-1])

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the axes that are not stacked: those of one layer."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.stacked)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Return the shape of one layer's leaf."""
        return tuple(self.shape[axis] for axis in self.inner)

    @property
    def in_attention(self) -> bool:
        """Return whether a component above the module contains a word for attention."""
        return any(words(name) & _ATTENTION_WORDS for name in self.module_names[:-1])

    @property
    def directly_in_attention(self) -> bool:
        """Return whether the parent of the module is the attention."""
        return bool(self.module_names[:-1]) and bool(
            words(self.module_names[-2]) & _ATTENTION_WORDS
        )

    def stack(self, axis: int, why: str) -> "ModuleLeaf":
        """Return the leaf with one more stacked axis."""
        stacked = tuple(sorted({*self.stacked, axis}))
        return dataclasses.replace(self, stacked=stacked, why=self.why or why)


def words(name: str) -> set[str]:
    """Return the words of a component: self and attn for `self_attn` and `SelfAttn_0`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


Leaves = dict[str, ModuleLeaf]


def bias_of(leaf: ModuleLeaf, leaves: Leaves) -> ModuleLeaf | None:
    """Return the bias beside a kernel, or None."""
    if leaf.array in BIASES or not leaf.array:
        return None
    paths = ("/".join([*leaf.module_names, name]) for name in sorted(BIASES))
    return next((leaves[path] for path in paths if path in leaves), None)


def beside(leaf: ModuleLeaf, modules: set[str], leaves: Leaves) -> ModuleLeaf | None:
    """Return the kernel or bare array of another module with one of these names in its group."""
    start = leaf.group + "/" if leaf.group else ""
    for name in sorted(modules):
        for path in (f"{start}{name}", f"{start}{name}/kernel"):
            if path in leaves and path != leaf.path:
                return leaves[path]
    return None


def out_first(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether a matrix is transposed, (out, in), as in Hugging Face's FlaxConv1D.

    The length of its bias decides. Square matrices of GPT-2 (`c_...`), and those without a bias,
    are transposed if another matrix named so is.
    """
    shown = _bias_shows(leaf, leaves)
    if shown is not None or not leaf.module.startswith("c_"):
        return bool(shown)
    others = (one for one in leaves.values() if one.module.startswith("c_"))
    return any(_bias_shows(one, leaves) for one in others)


def _bias_shows(leaf: ModuleLeaf, leaves: Leaves) -> bool | None:
    """Return whether a matrix's bias has the length of its first axis; None if ambiguous."""
    bias = bias_of(leaf, leaves)
    if bias is None or len(leaf.inner_shape) != 2 or len(bias.inner_shape) != 1:
        return None
    rows, columns = leaf.inner_shape
    return None if rows == columns else bias.inner_shape == (rows,)


def output_axis(leaf: ModuleLeaf, leaves: Leaves) -> int:
    """Return the output axis of one layer's matrix."""
    return 0 if out_first(leaf, leaves) else 1


def width_of(leaf: ModuleLeaf, leaves: Leaves) -> int:
    """Return the number of outputs of one layer's matrix."""
    return leaf.inner_shape[output_axis(leaf, leaves)]


def whole(leaf: ModuleLeaf, reason: str) -> Block:
    """Return one block for the tensor, or per layer if layers are stacked; elementwise if empty."""
    inner = leaf.inner if math.prod(leaf.shape) else ()
    text = "whole tensor" + (" of each layer" if leaf.stacked else "")
    return Block(inner, description=text if inner else "elementwise", reason=because(leaf, reason))


def because(leaf: ModuleLeaf, reason: str) -> str:
    """Return the reason, with how stacked axes were recognised."""
    return f"{reason}; {leaf.why}" if leaf.why else reason


def layer_block(leaf: ModuleLeaf, text: str, axes: tuple[int, ...], reason: str) -> Block:
    """Return a block that averages over these axes of one layer's leaf."""
    return Block(tuple(leaf.inner[a] for a in axes), description=text, reason=because(leaf, reason))


def layered(leaf: ModuleLeaf) -> ModuleLeaf:
    """Mark the first axis as stacked layers, for a leaf whose rank is one too high."""
    return leaf.stack(leaf.inner[0], "one axis more than it needs: the first stacks layers")


# ---- axes that stack layers or experts, which have separate second moments -----------------------

_LEAST_RANK = {"kernel": 2, "embedding": 2, "w": 2, "bias": 1, "scale": 1, "b": 1}

_STACKS = {"layers", "layer", "blocks", "block", "h", "stack", "layer_stack", "stages", "experts"}
_LINEN_STACK = re.compile(r"(Scan|Vmap)[A-Z]")  # the names that nn.scan and nn.vmap give
_STACK_AXES = {"layers", "layer", "scan", "stack", "blocks", "stages", "stage", "experts",
               "expert", "exp"}  # fmt: skip


def leaves_of(params: optax.Params) -> Leaves:
    """Return a dict from path to leaf with its stacked axes, in flattening order."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: _axis_names(node) is not None)
    names = [_axis_names(node) or () for node in nodes for _ in jax.tree.leaves(node)]
    leaves = []
    for (path, array), axes in zip(trees.named_leaves(params), names, strict=True):
        leaf = ModuleLeaf(path, tuple(getattr(array, "shape", ())))
        for axis, name in enumerate(axes if len(axes) == len(leaf.shape) else ()):
            if name in _STACK_AXES:
                leaf = leaf.stack(axis, f"axis {axis} is '{name}' in the metadata")
        leaves.append(leaf)
    return _by_biases({leaf.path: leaf for leaf in _by_components(leaves)})


def _axis_names(node: object) -> tuple[object, ...] | None:
    """Return the axis names of a Linen box or an NNX variable, without importing Flax."""
    if hasattr(node, "unbox") and hasattr(node, "names"):
        return tuple(node.names)
    if not hasattr(node, "get_metadata"):
        return None
    metadata = node.get_metadata()
    keys = ("out_sharding", "sharding_names", "sharding")
    names = next((metadata[key] for key in keys if metadata.get(key) is not None), ())
    return tuple(names) if isinstance(names, tuple | list | jax.sharding.PartitionSpec) else ()


def _by_components(leaves: list[ModuleLeaf]) -> list[ModuleLeaf]:
    """Add stacked axes from path components such as `layers`, if the shapes agree."""
    described = {leaf.path for leaf in leaves if leaf.stacked}  # metadata takes precedence
    members = defaultdict(list)
    for index, leaf in enumerate(leaves):
        for depth in range(1, len(leaf.names)):
            name, following = leaf.names[depth - 1], leaf.names[depth]
            named = name.lower() in _STACKS and not following.isdigit()
            if (named or _LINEN_STACK.match(name)) and leaf.path not in described:
                members[depth, "/".join(leaf.names[:depth])].append(index)
    result = list(leaves)
    for depth, prefix in sorted(members):
        group = members[depth, prefix]
        at = _common_axis([result[index] for index in group])
        if at is None:
            continue
        for index in group:
            axis = result[index].inner[at]
            result[index] = result[index].stack(axis, f"axis {axis} is stacked by '{prefix}'")
    return result


def _common_axis(group: list[ModuleLeaf]) -> int | None:
    """Return the axis (0 or 1) of equal size in all leaves, if each leaf has an axis to spare."""
    shapes = [leaf.inner_shape for leaf in group]
    if max(map(len, shapes)) < 3:  # vectors and matrices of the same width, not stacks of them
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
    """Add the stacked axis that a kernel and its bias share, as in (3, 16, 48) and (3, 48)."""
    result = dict(leaves)
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
                result[one.path] = one.stack(0, "axis 0 is stacked in the kernel and its bias")
    return result
