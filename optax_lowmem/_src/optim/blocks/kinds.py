"""Adam-mini's block of a leaf, from its role and its shape; or why it is unknown."""

import math

from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.roles.roles import (
    HEAD,
    OUT,
    QUERY,
    Heads,
    Leaves,
    ModuleLeaf,
    beside,
    layer_block,
    most_axes,
    out_first,
    output_axes,
    output_axis,
    role_of,
    splits_heads,
    whole,
    width_of,
)

# ---- query and key of an attention: one block per head -------------------------------------------

AMBIGUOUS = (
    "the shape {} is neither (in, heads, head_dim), with an output projection of "
    "(heads, head_dim, out), nor (in, heads * head_dim)"
)


def query_or_key(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return one block per head, or why the number of heads is unknown."""
    rank, what = len(leaf.inner_shape), "a query" if leaf.module in QUERY else "a key"
    if rank == 3:
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
        reason=leaf.because(f"{what} of shape {shape}"),
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
    """Return the head_dim of the query beside a key, or None if it is unknown.

    None also if the given heads do not divide the query's outputs: the query itself raises then.
    """
    if query is None:
        return None
    if len(query.inner_shape) == 3:
        return query.inner_shape[-1]
    if len(query.inner_shape) != 2 or counts.query is None:
        return None
    width = width_of(query, leaves)
    return None if width % counts.query else width // counts.query


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


def classify(leaf: ModuleLeaf, leaves: Leaves, counts: Heads) -> Block | str:
    """Return the block of a leaf, or why it is unknown."""
    role = role_of(leaf, leaves)
    kind, leaf = role.kind, role.leaf
    if math.prod(leaf.shape) == 0:
        return Block((), description="elementwise", reason="the leaf is empty")
    if not leaf.inner_shape:
        return Block((), description="elementwise", reason=leaf.because("a scalar"))
    if kind in ("bias", "norm"):
        what = "a bias" if kind == "bias" else "a norm's scale"
        if len(leaf.inner_shape) > most_axes(kind, leaf, leaves):
            return f"{what} of shape {leaf.shape} has too many axes"
        return whole(leaf, what)
    if kind == "embedding":
        rank = len(leaf.inner_shape)
        if rank < 2:
            return f"an embedding needs rows, but this leaf has shape {leaf.shape}"
        return layer_block(leaf, "per row", (rank - 1,), "an embedding: one block per row")
    if kind == "convolution":
        return whole(leaf, "a convolution: Adam-mini has no blocks for it")
    if kind == "fused":
        return fused(leaf, leaves, counts)
    if kind == "query":
        return query_or_key(leaf, leaves, counts)
    if kind == "value":
        text = "a value of shape (in, heads, head_dim)"
        return _projection(leaf, leaves, "a value projection", (0,), text)
    if kind == "out":
        text = "a projection of shape (heads, head_dim, out)"
        return _projection(leaf, leaves, "an attention's projection", (0, 1), text)
    return _dense(leaf, leaves) if kind == "dense" else role.reason


# ---- matrices ------------------------------------------------------------------------------------


def _per_neuron(
    leaf: ModuleLeaf, leaves: Leaves, what: str, text: str = "per output neuron"
) -> Block:
    """Return the per-neuron block of a 2-D matrix."""
    if out_first(leaf, leaves):
        return layer_block(leaf, text, (1,), f"{what} of shape (out, in), as biases show")
    return layer_block(leaf, text, (0,), f"{what} of shape (in, out)")


def _dense(leaf: ModuleLeaf, leaves: Leaves) -> Block | str:
    what, text = "a kernel" if leaf.array else f"'{leaf.module}'", "per output neuron"
    if leaf.module in HEAD:
        what, text = "an output head", "per row"
    if len(leaf.inner_shape) == 2:
        return _per_neuron(leaf, leaves, what, text)
    if count := output_axes(leaf, leaves):
        inputs, features = tuple(range(3 - count)), leaf.inner_shape[-count:]
        return layer_block(leaf, text, inputs, f"{what} whose bias has outputs {features}")
    return f"it is unknown which axes of shape {leaf.shape} are inputs"


def _projection(
    leaf: ModuleLeaf, leaves: Leaves, matrix: str, axes: tuple[int, ...], tensor: str
) -> Block | str:
    """Return the per-neuron block of a value or output projection of an attention.

    `matrix` and `tensor` describe kernels of two and of three axes, whose inputs are `axes`.
    """
    if len(leaf.inner_shape) == 2:
        return _per_neuron(leaf, leaves, matrix)
    if len(leaf.inner_shape) != 3 or not splits_heads(leaf, leaves):
        return AMBIGUOUS.format(leaf.shape)
    return layer_block(leaf, "per output neuron", axes, tensor)
