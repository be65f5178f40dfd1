"""Adam-mini's block of a leaf, from its Flax module's name and its shape; or why it is unknown."""

import math

from optax_lowmem._src.blocks.leaves import (
    BIASES,
    Heads,
    Leaves,
    ModuleLeaf,
    because,
    beside,
    bias_of,
    layer_block,
    layered,
    out_first,
    output_axis,
    whole,
    width_of,
    words,
)
from optax_lowmem._src.core.block import Block

# ---- query and key of an attention: one block per head -------------------------------------------

# module names: whole components, without Linen's number, in lower case
QUERY = {"query", "q", "q_proj", "wq", "to_q", "query_proj", "q_attn"}
KEY = {"key", "k", "k_proj", "wk", "to_k", "key_proj"}
VALUE = {"value", "v", "v_proj", "wv", "to_v", "value_proj"}
FUSED = {"c_attn", "qkv", "qkv_proj", "query_key_value", "wqkv", "to_qkv", "in_proj"}
OUT = {"out", "o", "o_proj", "wo", "to_out", "out_proj", "c_proj", "proj", "dense", "output",
       "attn_out"}  # fmt: skip

AMBIGUOUS = (
    "the shape {} is neither (in, heads, head_dim), with an output projection of "
    "(heads, head_dim, out), nor (in, heads * head_dim)"
)


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


def query_or_key(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return one block per head, or why the number of heads is unknown."""
    rank, what = len(leaf.inner_shape), "a query" if leaf.module in QUERY else "a key"
    if rank == 4:
        leaf = layered(leaf)
    if rank in (3, 4):
        given = counts.query if leaf.module in QUERY else counts.key
        heads = leaf.inner_shape[1]
        if not splits_heads(leaf, leaves):
            return AMBIGUOUS.format(leaf.shape)
        if given is not None and given != heads:
            return f"axis {leaf.inner[1]} has {heads} entries, not the {given} heads given"
        text = f"per head ({heads} heads)"
        return layer_block(leaf, text, (0, 2), f"{what} of shape (in, heads, head_dim)")
    if rank != 2:
        return AMBIGUOUS.format(leaf.shape)
    count = _head_count(leaf, leaves, counts)
    return count if isinstance(count, str) else _per_head(leaf, leaves, count, what)


def _per_head(leaf: ModuleLeaf, leaves: Leaves, count: int, what: str) -> Block:
    """Return the block of a 2-D matrix whose outputs are `count` heads."""
    out, inputs = output_axis(leaf, leaves), 0 if output_axis(leaf, leaves) else 1
    shape = "(in, heads * head_dim)" if out else "(heads * head_dim, in), as biases show"
    return Block(
        (leaf.inner[inputs],),
        heads=(leaf.inner[out], count),
        description=f"per head ({count} heads)",
        reason=because(leaf, f"{what} of shape {shape}"),
    )


def _head_count(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> int | str:
    """Return the number of heads of a 2-D query or key, or why it is unknown."""
    width = width_of(leaf, leaves)
    if leaf.module in QUERY:
        if counts.query is None:
            return "a query of shape (in, heads * head_dim) needs the number of heads: pass heads="
        _check_divides(leaf, width, counts.query, "heads")
        return counts.query
    query = beside(leaf, QUERY, leaves)
    dim = _head_dim(query, leaves, counts)
    if counts.key is not None:
        _check_divides(leaf, width, counts.key, "kv_heads")
        if dim is not None and width // counts.key != dim:
            raise ValueError(
                f"leaf '{leaf.path}' has head_dim {width // counts.key} with kv_heads="
                f"{counts.key}, its query has {dim} with heads={counts.query}: query and key must "
                "have the same head_dim, so correct one count, or give these leaves rules."
            )
        return counts.key
    if dim is None:
        return "a key of shape (in, heads * head_dim) needs the number of its heads: pass kv_heads="
    if width % dim:
        raise ValueError(
            f"leaf '{leaf.path}' has {width} outputs, which head_dim {dim} (its query's, with "
            f"heads={counts.query}) does not divide: correct heads or pass kv_heads."
        )
    return width // dim


def _head_dim(query: ModuleLeaf | None, leaves: Leaves, counts: Heads) -> int | None:
    """Return the head_dim of the query beside a key, or None where it is unknown."""
    if query is None:
        return None
    if len(query.inner_shape) == 3:
        return query.inner_shape[-1]
    if len(query.inner_shape) != 2 or counts.query is None:
        return None
    width = width_of(query, leaves)
    return None if width % counts.query else width // counts.query  # the query's leaf raises


def _check_divides(leaf: ModuleLeaf, width: int, count: int, name: str) -> None:
    if width % count:
        raise ValueError(
            f"{name}={count} does not divide the {width} outputs of leaf '{leaf.path}', of "
            f"shape {leaf.shape}: pass its number of heads, or give the leaf a rule."
        )


def fused(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return per-head blocks of query, key and value in one leaf, whose order is unknown."""
    what = "query, key and value in one (value per head too; for per neuron pass axes in rules)"
    shape = leaf.inner_shape
    if beside(leaf, QUERY, leaves) is not None:
        return "there is a separate query beside it, so its contents are unknown"
    if len(shape) == 4 and shape[1] == 3:
        text = f"per head (3 x {shape[2]} heads)"
        return layer_block(leaf, text, (0, 3), f"{what}, of shape (in, 3, heads, head_dim)")
    if counts.query is None:
        return "query, key and value in one leaf need the number of heads: pass heads= (kv_heads=)"
    if len(shape) == 3:
        total = counts.query + 2 * (counts.key or counts.query)
        if shape[1] != total:
            return f"axis {leaf.inner[1]} has {shape[1]} entries, not {total} heads: pass kv_heads="
        return layer_block(
            leaf, f"per head ({total} heads)", (0, 2), f"{what}, of shape (in, heads, head_dim)"
        )
    if len(shape) != 2:
        return f"it is unknown which axes of shape {leaf.shape} are heads"
    kv = _fused_key_heads(leaf, leaves, counts.query) if counts.key is None else counts.key
    if kv is None:
        return "the number of key and value heads is unknown: pass kv_heads="
    total = counts.query + 2 * kv
    _check_divides(leaf, width_of(leaf, leaves), total, "heads + 2 * kv_heads")
    return _per_head(leaf, leaves, total, what)


def _fused_key_heads(leaf: ModuleLeaf, leaves: Leaves, heads: int) -> int | None:
    """Return the key heads of a fused matrix, or None if they are ambiguous.

    The output projection, whose inputs are heads * head_dim, determines them; without one, only
    3 * in outputs do.
    """
    width, out = width_of(leaf, leaves), beside(leaf, OUT, leaves)
    if out is not None and len(out.inner_shape) == 2:
        queries = sum(out.inner_shape) - width_of(out, leaves)
    else:
        queries = sum(leaf.inner_shape) - width
        if width != 3 * queries:
            return None
    _check_divides(leaf, queries, heads, "heads")
    kv, rest = divmod(width - queries, 2 * (queries // heads))
    return None if rest or kv < 1 else kv


def has_query_and_key(leaf: ModuleLeaf, leaves: Leaves) -> bool:
    """Return whether a leaf's group has a query and a key, and so is an attention."""
    names = (QUERY, KEY)
    return all(leaf.module in n or beside(leaf, n, leaves) is not None for n in names)


# module names: whole components, without Linen's number, in lower case
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


def classify(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return the block of a leaf, or why it is unknown."""
    if math.prod(leaf.shape) == 0:
        return Block((), description="elementwise", reason="the leaf is empty")
    if not leaf.inner_shape:
        return Block((), description="elementwise", reason=because(leaf, "a scalar"))
    if leaf.array in BIASES:
        return _bias(leaf, leaves)
    if is_norm(leaf):
        return _vector(leaf, "a norm's scale")
    if is_embedding(leaf):
        rank = len(leaf.inner_shape)
        if rank < 2:
            return f"an embedding needs rows, but this leaf has shape {leaf.shape}"
        return layer_block(leaf, "per row", (rank - 1,), "an embedding: one block per row")
    if leaf.array not in ("", "kernel", "w"):
        return f"it is unknown whether '{leaf.array}' is (in, out) or (out, in)"
    if "conv" in words(leaf.module):
        return whole(leaf, "a convolution: Adam-mini has no blocks for it")
    return _matrix(leaf, leaves, counts)


def is_embedding(leaf: ModuleLeaf) -> bool:
    """Return whether a leaf is, by name, an input embedding table, not an output head."""
    named = leaf.module in EMBEDDING and leaf.array in ("", "weight")
    return leaf.array == "embedding" or named


# ---- vectors and tables --------------------------------------------------------------------------


def is_norm(leaf: ModuleLeaf) -> bool:
    """Return whether a leaf is, by name, the scale of a norm."""
    named = bool(words(leaf.module) & _NORMS)
    return leaf.array == "scale" or (named and leaf.array in ("", "weight", "gamma"))


def _vector(leaf: ModuleLeaf, what: str, rank: int = 1) -> Block | str:
    if len(leaf.inner_shape) == rank + 1:
        leaf = layered(leaf)
    if len(leaf.inner_shape) > rank:
        return f"{what} of shape {leaf.shape} has too many axes"
    return whole(leaf, what)


def _bias(leaf: ModuleLeaf, leaves: Leaves) -> Block | str:
    kernel = leaves.get("/".join([*leaf.module_names, "kernel"]))
    of_heads = leaf.module in QUERY | KEY | VALUE | FUSED and leaf.in_attention
    fits = kernel is not None and kernel.inner_shape[-len(leaf.inner_shape) :] == leaf.inner_shape
    rank = len(leaf.inner_shape) if fits else 2 if of_heads and kernel is None else 1
    return _vector(leaf, "a bias", rank)


# ---- matrices ------------------------------------------------------------------------------------


def _matrix(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return the block of a kernel or bare array, or why it is unknown."""
    module, rank = leaf.module, len(leaf.inner_shape)
    if rank < 2:
        return f"no known kind of leaf with this name has shape {leaf.shape}"
    # state-space layers have an in_proj too
    if module in FUSED and (leaf.in_attention or module != "in_proj"):
        return fused(leaf, leaves, counts)
    if module in QUERY | KEY | VALUE:
        if not (leaf.in_attention or has_query_and_key(leaf, leaves)):
            return f"'{module}' is neither in an attention nor beside a query and key"
        if module in VALUE:
            text = "a value of shape (in, heads, head_dim)"
            return _projection(leaf, leaves, "a value projection", (0,), text)
        return query_or_key(leaf, leaves, counts)
    attention = leaf.directly_in_attention or has_query_and_key(leaf, leaves)
    # an attention's Dense_0 may be its query
    if attention and module in OUT and leaf.module_names[-1].lower() == module:
        text = "a projection of shape (heads, head_dim, out)"
        return _projection(leaf, leaves, "an attention's projection", (0, 1), text)
    if attention and module not in MATRICES - _GENERIC:
        return f"no query, key, value or projection of an attention is called '{module}'"
    if module in MATRICES | HEAD or leaf.array == "kernel":
        return _dense(leaf, leaves)
    return "neither its name nor its module is known"


def _per_neuron(
    leaf: ModuleLeaf, leaves: Leaves, what: str, text: str = "per output neuron"
) -> Block:
    """Return the per-neuron block of a 2-D matrix."""
    if out_first(leaf, leaves):
        return layer_block(leaf, text, (1,), f"{what} of shape (out, in), as biases show")
    return layer_block(leaf, text, (0,), f"{what} of shape (in, out)")


def _dense(leaf: ModuleLeaf, leaves: Leaves) -> Block | str:
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
            return layer_block(leaf, text, inputs, f"{what} whose bias has outputs {features}")
    if rank == 3 and leaf.module in MATRICES:
        return _per_neuron(layered(leaf), leaves, what, text)
    return f"it is unknown which axes of shape {leaf.shape} are inputs"


def _projection(
    leaf: ModuleLeaf, leaves: Leaves, matrix: str, axes: tuple[int, ...], tensor: str
) -> Block | str:
    """Return the per-neuron block of a value or output projection of an attention.

    `matrix` and `tensor` describe kernels of two and of three axes, whose inputs are `axes`.
    """
    if len(leaf.inner_shape) == 4:
        leaf = layered(leaf)
    if len(leaf.inner_shape) == 2:
        return _per_neuron(leaf, leaves, matrix)
    if len(leaf.inner_shape) != 3 or not splits_heads(leaf, leaves):
        return AMBIGUOUS.format(leaf.shape)
    return layer_block(leaf, "per output neuron", axes, tensor)
