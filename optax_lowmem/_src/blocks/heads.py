"""Blocks of an attention's query and key, one a head; and what its 3-D kernels mean."""

import math

from optax_lowmem._src.blocks.leaves import (
    Heads,
    Leaf,
    Leaves,
    because,
    beside,
    layer_block,
    layered,
    output_axis,
    width_of,
)
from optax_lowmem._src.core.block import Block

# names of modules: whole components, without Linen's number, in lower case
QUERY = {"query", "q", "q_proj", "wq", "to_q", "query_proj", "q_attn"}
KEY = {"key", "k", "k_proj", "wk", "to_k", "key_proj"}
VALUE = {"value", "v", "v_proj", "wv", "to_v", "value_proj"}
FUSED = {"c_attn", "qkv", "qkv_proj", "query_key_value", "wqkv", "to_qkv", "in_proj"}
OUT = {"out", "o", "o_proj", "wo", "to_out", "out_proj", "c_proj", "proj", "dense", "output",
       "attn_out"}  # fmt: skip

AMBIGUOUS = (
    "the shape {} does not fit heads: neither (in, heads, head_dim), with the attention's "
    "projection of (heads, head_dim, out), nor (in, heads * head_dim)"
)


def splits_heads(leaf: Leaf, leaves: Leaves) -> bool:
    """Return whether the 3-D kernels of an attention hold heads, not stacked matrices.

    They do where heads * head_dim is the same in the query (in, heads, head_dim) and in the
    projection (heads, head_dim, out), or where one of these is missing.
    """
    found = [leaf, beside(leaf, QUERY, leaves), beside(leaf, OUT, leaves)]
    query = next((one for one in found if one is not None and one.module in QUERY), None)
    out = next((one for one in found if one is not None and one.module in OUT), None)
    if query is None or out is None:
        return True
    inner = [shape[-3:] for shape in (query.inner_shape, out.inner_shape)]
    return math.prod(inner[0][1:]) == math.prod(inner[1][:-1])


def query_or_key(leaf: Leaf, leaves: Leaves, counts: Heads) -> Block | str:
    """One block a head, or what is missing to know the heads."""
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
    count = _count(leaf, leaves, counts)
    return count if isinstance(count, str) else _per_head(leaf, leaves, count, what)


def _per_head(leaf: Leaf, leaves: Leaves, count: int, what: str) -> Block:
    """The block of a 2-D matrix whose outputs are `count` heads."""
    out, inputs = output_axis(leaf, leaves), 0 if output_axis(leaf, leaves) else 1
    shape = "(in, heads * head_dim)" if out else "(heads * head_dim, in), as biases show"
    return Block(
        (leaf.inner[inputs],),
        heads=(leaf.inner[out], count),
        words=f"per head ({count} heads)",
        reason=because(leaf, f"{what} of shape {shape}"),
    )


def _count(leaf: Leaf, leaves: Leaves, counts: Heads) -> int | str:
    """Return the number of heads of a 2-D query or key, or a message on what is missing."""
    width = width_of(leaf, leaves)
    if leaf.module in QUERY:
        if counts.query is None:
            return "a query of shape (in, heads * head_dim) needs the number of heads: pass heads="
        _check(leaf, width, counts.query, "heads")
        return counts.query
    query = beside(leaf, QUERY, leaves)
    dim = _head_dim(query, leaves, counts)
    if counts.key is not None:
        _check(leaf, width, counts.key, "kv_heads")
        if dim is not None and width // counts.key != dim:
            raise ValueError(
                f"leaf '{leaf.path}' has head_dim {width // counts.key} with kv_heads="
                f"{counts.key}, its query has {dim} with heads={counts.query}: a query and its key "
                "have one head_dim, so correct one count, or give these leaves rules."
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


def _head_dim(query: Leaf | None, leaves: Leaves, counts: Heads) -> int | None:
    """Return the head_dim of the query beside a key, or None where it is unknown."""
    if query is None:
        return None
    if len(query.inner_shape) == 3:
        return query.inner_shape[-1]
    if len(query.inner_shape) != 2 or counts.query is None:
        return None
    width = width_of(query, leaves)
    return None if width % counts.query else width // counts.query  # its own leaf raises


def _check(leaf: Leaf, width: int, count: int, name: str) -> None:
    if width % count:
        raise ValueError(
            f"{name}={count} does not divide the {width} outputs of leaf '{leaf.path}', of "
            f"shape {leaf.shape}: pass its number of heads, or give the leaf a rule."
        )


def fused(leaf: Leaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Query, key and value in one leaf: per head in all three, since their order is not known."""
    what = "query, key and value in one (value per head too, give axes in a rule for per neuron)"
    shape = leaf.inner_shape
    if beside(leaf, QUERY, leaves) is not None:
        return "a query lies beside it, so what it holds is not known"
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
        return f"which axes of shape {leaf.shape} are heads is not known"
    kv = _fused_key_heads(leaf, leaves, counts.query) if counts.key is None else counts.key
    if kv is None:
        return "how many heads its keys and values have is not known: pass kv_heads="
    total = counts.query + 2 * kv
    _check(leaf, width_of(leaf, leaves), total, "heads + 2 * kv_heads")
    return _per_head(leaf, leaves, total, what)


def _fused_key_heads(leaf: Leaf, leaves: Leaves, heads: int) -> int | None:
    """From the projection, whose inputs are heads * head_dim; without one only 3 * in is plain."""
    width, out = width_of(leaf, leaves), beside(leaf, OUT, leaves)
    if out is not None and len(out.inner_shape) == 2:
        queries = sum(out.inner_shape) - width_of(out, leaves)
    else:
        queries = sum(leaf.inner_shape) - width
        if width != 3 * queries:
            return None
    _check(leaf, queries, heads, "heads")
    kv, rest = divmod(width - queries, 2 * (queries // heads))
    return None if rest or kv < 1 else kv


def has_query_and_key(leaf: Leaf, leaves: Leaves) -> bool:
    """Return whether a leaf is in a group with a query and a key, which makes an attention."""
    names = (QUERY, KEY)
    return all(leaf.module in n or beside(leaf, n, leaves) is not None for n in names)
