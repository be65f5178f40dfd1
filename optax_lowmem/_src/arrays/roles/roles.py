"""The role of each parameter: its kind, from its name, and the axes of one layer.

Models stack layers: a bias of shape [layers, width] is no matrix, and a kernel of shape
[layers, in, out] is a matrix per layer. The rank of a parameter shows neither.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays.roles.leaves import (
    BIASES,
    Leaves,
    ModuleLeaf,
    because,
    beside,
    bias_of,
    layered,
    leaves_of,
    words,
)
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

    def because(self, reason: str) -> str:
        """Return the reason, with how stacked axes were recognised."""
        return because(self.leaf, reason)


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


def splits_heads(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether the 3-D kernels of an attention have a head axis, not stacked matrices.

    They do if heads * head_dim is the same in the query (in, heads, head_dim) and in the output
    projection (heads, head_dim, out), or if one of these is missing.
    """
    results = [leaf, beside(leaf, QUERY, leaves), beside(leaf, OUT, leaves)]
    query = next((one for one in results if one is not None and one.module in QUERY), None)
    out = next((one for one in results if one is not None and one.module in OUT), None)
    if query is None or out is None:
        return True
    inner = [shape[-3:] for shape in (query.inner_shape, out.inner_shape)]
    return math.prod(inner[0][1:]) == math.prod(inner[1][:-1])


def has_query_and_key(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether a leaf's group has a query and a key, and so is an attention."""
    names = (QUERY, KEY)
    return all(leaf.module in n or beside(leaf, n, leaves) is not None for n in names)


def role_of(leaf: ModuleLeaf, leaves: Leaves) -> Role:
    """Return the role of a leaf; its first axis stacks layers if its kind has one axis fewer."""
    kind, reason = _kind(leaf, leaves)
    if len(leaf.inner_shape) == 1 + most_axes(kind, leaf, leaves):
        leaf = layered(leaf)
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
    return 2 if of_heads and kernel is None else 1


def output_axes(leaf: ModuleLeaf, leaves: Leaves) -> int:
    """Return how many of the last axes of a kernel of three axes are outputs, as its bias shows.

    Return 0 if there is no bias, or one of another shape.
    """
    bias = bias_of(leaf, leaves)
    features = () if bias is None else bias.inner_shape
    fits = 0 < len(features) < len(leaf.inner_shape) == 3
    return len(features) if fits and leaf.inner_shape[-len(features) :] == features else 0
