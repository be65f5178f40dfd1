"""The role of each parameter: its kind, from its name, and the axes of one layer.

Models stack layers: a bias of shape [layers, width] is no matrix, and a kernel of shape
[layers, in, out] is a matrix per layer. The rank of a parameter shows neither. `ModuleLeaf` has
what a path and its neighbours show: module, orientation and stacked axes.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import Structure

# module names: whole components, without Linen's number, in lower case
QUERY = {"query", "q", "q_proj", "wq", "to_q", "query_proj", "q_attn"}
KEY = {"key", "k", "k_proj", "wk", "to_k", "key_proj"}
VALUE = {"value", "v", "v_proj", "wv", "to_v", "value_proj"}
FUSED = {"c_attn", "qkv", "qkv_proj", "query_key_value", "wqkv", "to_qkv", "in_proj"}
OUT = {"out", "o", "o_proj", "wo", "to_out", "out_proj", "c_proj", "proj", "dense", "output",
       "attn_out"}  # fmt: skip
EMBEDDING = {"embed", "embedding", "embeddings", "embed_tokens", "token_embed", "token_embedder",
             "tok_embeddings", "wte", "wpe", "pos_embed", "pos_embedding", "position_embedding",
             "position_embeddings", "word_embeddings", "shared"}  # fmt: skip
HEAD = {"lm_head", "logits_dense", "logits", "output_head", "embed_out", "unembed", "head",
        "output", "final_layer"}  # fmt: skip
MATRICES = {"dense", "linear", "mlp", "feed_forward", "gate_proj", "up_proj", "down_proj", "w1",
            "w2", "w3", "wi", "wo", "w_gate", "w_up", "w_down", "c_fc", "c_proj", "fc", "fc1",
            "fc2", "lm_head", "logits_dense"}  # fmt: skip
_GENERIC = {"dense", "linear", "mlp", "fc"}
_NORMS = {"norm", "ln", "layernorm", "rmsnorm", "batchnorm", "groupnorm"}


# ---- leaves, by path -----------------------------------------------------------------------------

# array names inside a module; any other last path component names a module that is a bare array
ARRAYS = {"kernel", "embedding", "bias", "scale", "weight", "w", "b", "gamma", "beta"}
BIASES = {"bias", "b"}

_ATTENTION_WORDS = {"attn", "attention", "mha", "crossattention", "selfattention"}


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
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.stacked)

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

    def because(self, reason: str) -> str:
        """Return the reason, with how stacked axes were recognised."""
        return f"{reason}; {self.why}" if self.why else reason

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
    """Mark axis 0 as stacked in a kernel and its bias that share it, as (3, 16, 48) and (3, 48).

    A bias with the last axes of its kernel, as (4, 8) of (4, 4, 8), has several output axes
    instead.
    """
    result = dict(leaves)
    for leaf in leaves.values():
        bias = bias_of(leaf, leaves)
        if bias is None or leaf.stacked or bias.stacked:
            continue
        kernel, of_bias = leaf.shape, bias.shape
        if (
            1 < len(of_bias) < len(kernel)
            and kernel[0] == of_bias[0]
            and kernel[1 - len(of_bias) :] == of_bias[1:]
            and kernel[-len(of_bias) :] != of_bias
        ):
            for one in (leaf, bias):
                result[one.path] = one.stack(0, "axis 0 is stacked in the kernel and its bias")
    return result


# ---- roles ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Role:
    """Role of a parameter in its model.

    Attributes:
      kind: `bias`, `norm`, `embedding`, `convolution`, `dense`; `query` (or key), `value`, `out`
        and `fused` of an attention; or "" if its name is not known.
      leaf: the parameter, with every axis that stacks layers or experts.
      reason: why the kind is not known.
    """

    kind: str
    leaf: ModuleLeaf
    reason: str = ""

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the axes of one layer."""
        return self.leaf.inner

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one layer."""
        return self.leaf.inner_shape

    @property
    def is_vector(self) -> bool:
        """Return whether it is a bias, the scale of a norm or another vector in each layer."""
        return self.kind in ("bias", "norm") or len(self.axes) < 2

    @property
    def is_matrix(self) -> bool:
        """Return whether it is one matrix in each layer; embeddings and output heads are."""
        return not self.is_vector and self.kind != "convolution" and len(self.axes) == 2


def roles(params: optax.Params) -> Mapping[str, Role]:
    """Return the role of each parameter by path; do not change the result."""
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple(tuple(getattr(leaf, "shape", ())) for leaf in leaves)
    try:
        return _roles(treedef, shapes)
    except TypeError:  # a node of the tree is not hashable
        return _roles.__wrapped__(treedef, shapes)


@functools.lru_cache(maxsize=64)  # each step outside of jit asks again
def _roles(treedef: Structure, shapes: tuple[tuple[int, ...], ...]) -> Mapping[str, Role]:
    like = treedef.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    leaves = leaves_of(like)
    return {path: role_of(leaf, leaves) for path, leaf in leaves.items()}


def decay_mask(params: optax.Params) -> optax.Params:
    """Return a mask of weight decay: True for matrices, False for biases, norms and other vectors.

    Pass the function itself, `mask=lowmem.blocks.decay_mask`. Embeddings, output heads and
    convolutions count as matrices. A mask such as `jax.tree.map(lambda p: p.ndim > 1, params)`
    gives the same result for separate layers, but decays biases and norms that are stacked over
    layers.

    Args:
      params: the weights, or their `jax.eval_shape`: arrays, NNX or Linen's `nn.Partitioned`.

    Returns:
      A tree of bools with the structure of `params`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> layers = {"kernel": jnp.ones((12, 64, 64)), "bias": jnp.ones((12, 64))}
      >>> lowmem.blocks.decay_mask({"layers": {"up_proj": layers}})
      {'layers': {'up_proj': {'bias': False, 'kernel': True}}}
    """
    treedef = jax.tree.structure(params)
    is_matrix = [not role.is_vector for role in roles(params).values()]
    return jax.tree.unflatten(treedef, is_matrix)


# ---- kinds, by name ------------------------------------------------------------------------------


def is_embedding(leaf: ModuleLeaf) -> bool:
    """Return whether a leaf is, by name, an input embedding table, not an output head."""
    # a kernel there is the matrix of a product, such as of image patches
    named = leaf.module in EMBEDDING and leaf.array in ("", "weight")
    return leaf.array == "embedding" or named


def is_norm(leaf: ModuleLeaf) -> bool:
    """Return whether a leaf is, by name, the scale of a norm."""
    named = bool(words(leaf.module) & _NORMS)
    return leaf.array == "scale" or (named and leaf.array in ("", "weight", "gamma", "beta"))


def _is_bias(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether a leaf is a bias; a `b` of several axes is one beside a larger `w` only."""
    if leaf.array not in BIASES or leaf.array == "bias" or len(leaf.shape) < 2:
        return leaf.array in BIASES
    paths = ("/".join([*leaf.module_names, name]) for name in ("w", "kernel", "weight"))
    return any(len(leaves[path].shape) > len(leaf.shape) for path in paths if path in leaves)


def has_query_and_key(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether a leaf's group has a query and a key, and so is an attention."""
    names = (QUERY, KEY)
    return all(leaf.module in n or beside(leaf, n, leaves) is not None for n in names)


def role_of(leaf: ModuleLeaf, leaves: Leaves) -> Role:
    """Return the role of a leaf.

    If it has one axis more than its kind can have (`most_axes`), besides the axes that are known to
    stack layers, then its first axis stacks layers, too.
    """
    kind, reason = _kind(leaf, leaves)
    if len(leaf.inner_shape) == 1 + most_axes(kind, leaf, leaves):
        leaf = leaf.stack(leaf.inner[0], "one axis more than it needs: the first stacks layers")
    return Role(kind, leaf, reason)


def _kind(leaf: ModuleLeaf, leaves: Leaves) -> tuple[str, str]:
    """Return the kind of a leaf, or "" and why it is not known."""
    if _is_bias(leaf, leaves):
        return "bias", ""
    if is_norm(leaf):
        return "norm", ""
    if is_embedding(leaf):
        return "embedding", ""
    if leaf.array not in ("", "kernel", "w"):
        return "", f"it is unknown whether '{leaf.array}' is (in, out) or (out, in)"
    if "conv" in words(leaf.module):
        return "convolution", ""
    if len(leaf.inner_shape) < 2:
        return "", f"no known kind of leaf with this name has shape {leaf.shape}"
    return _kind_of_matrix(leaf, leaves)


def _kind_of_matrix(leaf: ModuleLeaf, leaves: Leaves) -> tuple[str, str]:
    module = leaf.module
    # state-space layers have an in_proj too
    if module in FUSED and (leaf.in_attention or module != "in_proj"):
        return "fused", ""
    if module in QUERY | KEY | VALUE:
        if not (leaf.in_attention or has_query_and_key(leaf, leaves)):
            return "", f"'{module}' is neither in an attention nor beside a query and key"
        return ("value" if module in VALUE else "query"), ""
    attention = leaf.directly_in_attention or has_query_and_key(leaf, leaves)
    # an attention's Dense_0 may be its query
    if attention and module in OUT and leaf.module_names[-1].lower() == module:
        return "out", ""
    if attention and module not in MATRICES - _GENERIC:
        return "", f"no query, key, value or projection of an attention is called '{module}'"
    if module in MATRICES | HEAD or leaf.array == "kernel":
        return "dense", ""
    return "", "neither its name nor its module is known"


def most_axes(kind: str, leaf: ModuleLeaf, leaves: Leaves) -> float:
    """Return the largest number of axes of one layer's leaf of a kind."""
    if kind == "bias":
        return _axes_of_bias(leaf, leaves)
    if kind == "dense" and leaf.module in MATRICES and not output_axes(leaf, leaves):
        return 2
    return {"norm": 1, "query": 3, "value": 3, "out": 3}.get(kind, math.inf)


def _axes_of_bias(leaf: ModuleLeaf, leaves: Leaves) -> int:
    kernel = leaves.get("/".join([*leaf.module_names, "kernel"]))
    if kernel is not None and kernel.inner_shape[-len(leaf.inner_shape) :] == leaf.inner_shape:
        return len(leaf.inner_shape)
    of_heads = leaf.module in QUERY | KEY | VALUE | FUSED and leaf.in_attention
    # without a kernel to compare with, an attention's bias of two axes is [heads, head_dim]
    return 2 if of_heads and kernel is None else 1


def output_axes(leaf: ModuleLeaf, leaves: Leaves) -> int:
    """Return how many of the last axes of a kernel of three axes are outputs, as its bias shows.

    Return 0 if there is no bias, or one of another shape.
    """
    bias = bias_of(leaf, leaves)
    features = () if bias is None else bias.inner_shape
    fits = 0 < len(features) < len(leaf.inner_shape) == 3
    return len(features) if fits and leaf.inner_shape[-len(features) :] == features else 0
