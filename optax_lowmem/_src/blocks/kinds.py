"""Adam-mini's block of a leaf by what Flax modules call and shape it, or why it is not known."""

import math

from optax_lowmem._src.blocks.heads import (
    AMBIGUOUS,
    FUSED,
    KEY,
    OUT,
    QUERY,
    VALUE,
    fused,
    has_query_and_key,
    query_or_key,
    splits_heads,
)
from optax_lowmem._src.blocks.leaves import (
    BIASES,
    Heads,
    Leaf,
    Leaves,
    because,
    bias_of,
    layer_block,
    layered,
    out_first,
    whole,
    words,
)
from optax_lowmem._src.core.block import Block

# names of modules: whole components, without Linen's number, in lower case
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


def classify(leaf: Leaf, leaves: Leaves, counts: Heads) -> Block | str:
    """The block of a leaf, or why it is not known.

    Raises:
      ValueError: a head count that does not divide, or does not fit its query.
    """
    if math.prod(leaf.shape) == 0:
        return Block((), words="elementwise", reason="the leaf is empty")
    if not leaf.inner_shape:
        return Block((), words="elementwise", reason=because(leaf, "one number"))
    if leaf.array in BIASES:
        return _bias(leaf, leaves)
    if is_norm(leaf):
        return _vector(leaf, "a norm's scale")
    if is_embedding(leaf):
        return _embedding(leaf)
    if leaf.array not in ("", "kernel", "w"):
        return f"whether '{leaf.array}' is (in, out) or (out, in) is not known"
    if "conv" in words(leaf.module):
        return whole(leaf, "a convolution: Adam-mini has no blocks for it")
    return _matrix(leaf, leaves, counts)


def is_embedding(leaf: Leaf) -> bool:
    """Return whether a leaf is, by name, an input embedding table, not an output head."""
    named = leaf.module in EMBEDDING and leaf.array in ("", "weight")
    return leaf.array == "embedding" or named


# ---- vectors and tables --------------------------------------------------------------------------


def is_norm(leaf: Leaf) -> bool:
    """Return whether a leaf is, by name, the scale of a norm."""
    named = bool(words(leaf.module) & _NORMS)
    return leaf.array == "scale" or (named and leaf.array in ("", "weight", "gamma"))


def _vector(leaf: Leaf, what: str, rank: int = 1) -> Block | str:
    if len(leaf.inner_shape) == rank + 1:
        leaf = layered(leaf)
    if len(leaf.inner_shape) > rank:
        return f"{what} of shape {leaf.shape} has too many axes"
    return whole(leaf, what)


def _bias(leaf: Leaf, leaves: Leaves) -> Block | str:
    kernel = leaves.get("/".join([*leaf.module_names, "kernel"]))
    of_heads = leaf.module in QUERY | KEY | VALUE | FUSED and leaf.in_attention
    fits = kernel is not None and kernel.inner_shape[-len(leaf.inner_shape) :] == leaf.inner_shape
    rank = len(leaf.inner_shape) if fits else 2 if of_heads and kernel is None else 1
    return _vector(leaf, "a bias", rank)


def _embedding(leaf: Leaf) -> Block | str:
    rank = len(leaf.inner_shape)
    if rank < 2:
        return f"an embedding has rows, and this leaf has shape {leaf.shape}"
    return layer_block(leaf, "per row", (rank - 1,), "an embedding: one block a row")


# ---- matrices ------------------------------------------------------------------------------------


def _matrix(leaf: Leaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Kernels and bare arrays."""
    module, rank = leaf.module, len(leaf.inner_shape)
    if rank < 2:
        return f"no kind of leaf that is known by this name has shape {leaf.shape}"
    # an in_proj is a state-space layer's too
    if module in FUSED and (leaf.in_attention or module != "in_proj"):
        return fused(leaf, leaves, counts)
    if module in QUERY | KEY | VALUE:
        if not (leaf.in_attention or has_query_and_key(leaf, leaves)):
            return f"'{module}' is not in an attention, nor beside its query and key"
        if module in VALUE:
            return _value(leaf, leaves)
        return query_or_key(leaf, leaves, counts)
    attention = leaf.directly_in_attention or has_query_and_key(leaf, leaves)
    # the Dense_0 of an attention may be its query
    if attention and module in OUT and leaf.module_names[-1].lower() == module:
        return _out(leaf, leaves)
    if attention and module not in MATRICES - _GENERIC:
        return f"no query, key, value or projection of an attention is called '{module}'"
    if module in MATRICES | HEAD or leaf.array == "kernel":
        return _dense(leaf, leaves)
    return "neither its name nor its module is known"


def _per_neuron(leaf: Leaf, leaves: Leaves, what: str, text: str = "per output neuron") -> Block:
    """The block of a 2-D matrix."""
    if out_first(leaf, leaves):
        return layer_block(leaf, text, (1,), f"{what} of shape (out, in), as biases show")
    return layer_block(leaf, text, (0,), f"{what} of shape (in, out)")


def _dense(leaf: Leaf, leaves: Leaves) -> Block | str:
    rank, bias = len(leaf.inner_shape), bias_of(leaf, leaves)
    what, text = "a kernel" if leaf.array else f"'{leaf.module}'", "per output neuron"
    if leaf.module in HEAD:
        what, text = "an output head", "per row"
    if rank == 2:
        return _per_neuron(leaf, leaves, what, text)
    if bias is not None and rank == 3:
        features = bias.inner_shape
        if len(features) < rank and leaf.inner_shape[-len(features) :] == features:
            inputs = tuple(range(rank - len(features)))
            return layer_block(leaf, text, inputs, f"{what} whose bias has its outputs {features}")
    if rank == 3 and leaf.module in MATRICES:
        return _per_neuron(layered(leaf), leaves, what, text)
    return f"which axes of shape {leaf.shape} are inputs is not known"


def _out(leaf: Leaf, leaves: Leaves) -> Block | str:
    if len(leaf.inner_shape) == 4:
        leaf = layered(leaf)
    if len(leaf.inner_shape) == 2:
        return _per_neuron(leaf, leaves, "an attention's projection")
    if len(leaf.inner_shape) != 3 or not splits_heads(leaf, leaves):
        return AMBIGUOUS.format(leaf.shape)
    return layer_block(
        leaf, "per output neuron", (0, 1), "a projection of shape (heads, head_dim, out)"
    )


def _value(leaf: Leaf, leaves: Leaves) -> Block | str:
    if len(leaf.inner_shape) == 4:
        leaf = layered(leaf)
    if len(leaf.inner_shape) == 2:
        return _per_neuron(leaf, leaves, "a value projection")
    if len(leaf.inner_shape) != 3 or not splits_heads(leaf, leaves):
        return AMBIGUOUS.format(leaf.shape)
    return layer_block(leaf, "per output neuron", (0,), "a value of shape (in, heads, head_dim)")
