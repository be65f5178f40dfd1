"""`infer` and `describe`: Adam-mini's block of each leaf, from rules or its role and shape."""

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Sequence

import optax

from optax_lowmem._src.arrays import patterns, trees
from optax_lowmem._src.arrays.block import Block, is_int
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.roles.roles import (
    HEAD,
    OUT,
    QUERY,
    Leaves,
    ModuleLeaf,
    beside,
    bias_of,
    is_embedding,
    leaves_of,
    most_axes,
    output_axes,
    role_of,
)

Rule = tuple[str, Block | Sequence[int] | str]

_BLOCK_NAMES = ("whole", "elementwise")


def infer(
    params: optax.Params,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    rules: Sequence[Rule] = (),
    default: str = "whole",
) -> dict[str, Block]:
    """Infer the block structure of each leaf, from explicit rules or Flax's names and shapes.

    Blocks are per head for query and key, per output neuron for value, projection and MLP, per row
    for embedding and output head, and the whole tensor otherwise. Names match whole path
    components. Axes that stack layers or experts are never averaged over. They are recognised by
    Flax's partition names (`layers`), by a component such as `layers` or `ScanBlock_0` whose leaves
    all have an axis of the same size, or by a rank one above the maximum for the kind of leaf.

    Args:
      params: the weights, or their `jax.eval_shape`: arrays, NNX or Linen's `nn.Partitioned`.
      heads: number of query heads; required if a query kernel is (in, heads * head_dim).
      kv_heads: number of key heads; a 2-D key beside a query takes it from the query's head_dim.
      rules: (glob pattern on the path, block) pairs; the first match applies. A block is a
        `Block`, the axes to average over, "whole" or "elementwise" (plain Adam).
      default: "whole" or "elementwise", for leaves that are not recognised; `describe` marks them.

    Returns:
      path -> `Block`, in the order of the leaves.

    Raises:
      ValueError: if an axis is out of range or repeated, a head count does not divide its axis,
        query and key have different head_dim, a rule matches no leaf, or a string is unknown.

    Deviations: Adam-mini's code matches substrings of the path, has dim^2 / heads elements per head
    (wrong for grouped queries) and uses plain Adam for biases, as does
    `rules=[("*bias", "elementwise")]`. Q-Adam-mini's code has one block per value projection, as
    does `rules=[("*/v_proj/kernel", "whole")]`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"attn": {"query": {"kernel": jnp.ones((64, 32))}}}
      >>> lowmem.blocks.infer(params, heads=4)["attn/query/kernel"].mean_shape((64, 32))
      (1, 4)
    """
    check_choice("default", default, _BLOCK_NAMES)
    return Structure(heads, kv_heads, tuple(rules), default).infer(params)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The arguments of `infer`, for an optimizer's `blocks=`; static and hashable.

    Attributes:
      heads: query heads.
      kv_heads: key heads.
      rules: (glob pattern on the path, block) pairs.
      default: "whole" or "elementwise", for leaves that are not recognised. None means "whole",
        with a warning from the optimizer's `init`.

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.q_adam_mini(1e-3, blocks=lowmem.blocks.Structure(heads=16, kv_heads=4))
    """

    heads: int | None = None
    kv_heads: int | None = None
    rules: tuple[Rule, ...] = ()
    default: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(map(_hashable, self.rules)))
        for name, count in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if count is not None and not (is_int(count) and count > 0):
                raise ValueError(f"{name} must be a number of heads >= 1 or None, got {count!r}")
        check_choice("default", self.default or "whole", _BLOCK_NAMES)
        for rule in self.rules:
            if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)):
                raise TypeError(
                    f"rules must be a sequence of (pattern, block) pairs, got {rule!r} in it: pass "
                    "for example rules=[('*/bias', 'elementwise')]."
                )
            if isinstance(rule[1], str) and rule[1] not in _BLOCK_NAMES:
                raise ValueError(
                    f"the block in rule {rule!r} must be a Block, axes, 'whole' or 'elementwise'."
                )

    def infer(self, params: optax.Params) -> dict[str, Block]:
        """Return the block of each leaf, by path."""
        leaves = leaves_of(params)
        for pattern, _ in self.rules if leaves else ():  # no leaves: a placeholder tree
            if error := patterns.unmatched(f"the rule '{pattern}'", pattern, list(leaves)):
                raise ValueError(error)
        return {leaf.path: self._block(leaf, leaves) for leaf in leaves.values()}

    def _block(self, leaf: ModuleLeaf, leaves: Leaves) -> Block:
        for pattern, value in self.rules:
            if fnmatch.fnmatchcase(leaf.path, pattern):
                return _block_of_value(leaf, value, f"rule '{pattern}'")
        result = classify(leaf, leaves, self)
        if isinstance(result, Block):
            return result.fit(leaf.shape, leaf.path)
        reason = f"not recognised: {result}; or pass rules=[('{leaf.path}', axes)]"
        block = _block_of_value(leaf, self.default or "whole", reason)
        return dataclasses.replace(block, known=False)

    def embeddings(self, params: optax.Params) -> set[str]:
        """Return the paths of the embedding tables."""
        return {leaf.path for leaf in leaves_of(params).values() if is_embedding(leaf)}

    def warn(self, params: optax.Params) -> None:
        """Warn about leaves that were not recognised and have one block for the whole tensor."""
        unknown = {path: b.reason for path, b in self.infer(params).items() if not b.known}
        if self.default is None and unknown:
            path, reason = next(iter(unknown.items()))
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            warnings.warn(
                f"the blocks of '{path}'{more} are a guess, one for the whole tensor ({reason}). "
                "See lowmem.blocks.describe(params); Structure(default='whole') accepts the guess.",
                stacklevel=2,
            )


def _hashable(value: object) -> object:
    """Convert lists to tuples, recursively."""
    return tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value


def _block_of_value(leaf: ModuleLeaf, value: Block | Sequence[int] | str, reason: str) -> Block:
    if value == "elementwise":
        return Block((), description="elementwise", reason=reason)
    if isinstance(value, str):
        return whole(leaf, reason)
    block = value if isinstance(value, Block) else Block(tuple(value))
    block = block.fit(leaf.shape, leaf.path)
    return dataclasses.replace(block, reason=block.reason or reason)


# ---- query and key of an attention: one block per head -------------------------------------------

AMBIGUOUS = (
    "the shape {} is neither (in, heads, head_dim), with an output projection of "
    "(heads, head_dim, out), nor (in, heads * head_dim)"
)


def query_or_key(leaf: ModuleLeaf, leaves: Leaves, counts: Structure) -> Block | str:
    """Return one block per head, or why the number of heads is unknown."""
    rank, what = len(leaf.inner_shape), "a query" if leaf.module in QUERY else "a key"
    if rank == 3:
        given = counts.heads if leaf.module in QUERY else counts.kv_heads
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


def _head_count(leaf: ModuleLeaf, leaves: Leaves, counts: Structure) -> int | str:
    """Return the number of heads of a 2-D query or key, or why it is unknown."""
    width = width_of(leaf, leaves)
    if leaf.module in QUERY:
        if counts.heads is None:
            return "a query of shape (in, heads * head_dim) needs the number of heads: pass heads="
        _check_divides(leaf, width, counts.heads, "heads")
        return counts.heads
    query = beside(leaf, QUERY, leaves)
    dim = _head_dim(query, leaves, counts)
    if counts.kv_heads is not None:
        _check_divides(leaf, width, counts.kv_heads, "kv_heads")
        if dim is not None and width // counts.kv_heads != dim:
            raise ValueError(
                f"leaf '{leaf.path}' has head_dim {width // counts.kv_heads} with kv_heads="
                f"{counts.kv_heads}, its query has {dim} with heads={counts.heads}: query and key "
                "must have the same head_dim, so correct one count, or give these leaves rules."
            )
        return counts.kv_heads
    if dim is None:
        return "a key of shape (in, heads * head_dim) needs the number of its heads: pass kv_heads="
    if width % dim:
        raise ValueError(
            f"leaf '{leaf.path}' has {width} outputs, which head_dim {dim} (its query's, with "
            f"heads={counts.heads}) does not divide: correct heads or pass kv_heads."
        )
    return width // dim


def _head_dim(query: ModuleLeaf | None, leaves: Leaves, counts: Structure) -> int | None:
    """Return the head_dim of the query beside a key, or None if it is unknown.

    None also if the given heads do not divide the query's outputs: the query itself raises then.
    """
    if query is None:
        return None
    if len(query.inner_shape) == 3:
        return query.inner_shape[-1]
    if len(query.inner_shape) != 2 or counts.heads is None:
        return None
    width = width_of(query, leaves)
    return None if width % counts.heads else width // counts.heads


def _check_divides(leaf: ModuleLeaf, width: int, count: int, name: str) -> None:
    if width % count:
        raise ValueError(
            f"{name}={count} does not divide the {width} outputs of leaf '{leaf.path}', of "
            f"shape {leaf.shape}: pass its number of heads, or give the leaf a rule."
        )


def fused(leaf: ModuleLeaf, leaves: Leaves, counts: Structure) -> Block | str:
    """Return per-head blocks of query, key and value in one leaf, whose order is unknown."""
    what = "query, key and value in one (value per head too; for per neuron pass axes in rules)"
    shape = leaf.inner_shape
    if beside(leaf, QUERY, leaves) is not None:
        return "there is a separate query beside it, so its contents are unknown"
    if len(shape) == 4 and shape[1] == 3:
        text = f"per head (3 x {shape[2]} heads)"
        return layer_block(leaf, text, (0, 3), f"{what}, of shape (in, 3, heads, head_dim)")
    if counts.heads is None:
        return "query, key and value in one leaf need the number of heads: pass heads= (kv_heads=)"
    if len(shape) == 3:
        total = counts.heads + 2 * (counts.kv_heads or counts.heads)
        if shape[1] != total:
            return f"axis {leaf.inner[1]} has {shape[1]} entries, not {total} heads: pass kv_heads="
        return layer_block(
            leaf, f"per head ({total} heads)", (0, 2), f"{what}, of shape (in, heads, head_dim)"
        )
    if len(shape) != 2:
        return f"it is unknown which axes of shape {leaf.shape} are heads"
    kv = counts.kv_heads
    if kv is None:
        kv = _fused_key_heads(leaf, leaves, counts.heads)
    if kv is None:
        return "the number of key and value heads is unknown: pass kv_heads="
    total = counts.heads + 2 * kv
    _check_divides(leaf, width_of(leaf, leaves), total, "heads + 2 * kv_heads")
    return _per_head(leaf, leaves, total, what)


def _fused_key_heads(leaf: ModuleLeaf, leaves: Leaves, heads: int) -> int | None:
    """Return the key heads of a fused matrix, or None if they are ambiguous.

    The output projection, whose inputs are heads * head_dim, determines them; without one, only
    3 * in outputs do.
    """
    width, out = width_of(leaf, leaves), beside(leaf, OUT, leaves)
    if out is not None and len(out.inner_shape) == 2:
        queries = _inputs_of(out, leaves)
    else:
        queries = _inputs_of(leaf, leaves)
        if width != 3 * queries:
            return None
    _check_divides(leaf, queries, heads, "heads")
    kv, rest = divmod(width - queries, 2 * (queries // heads))
    return None if rest or kv < 1 else kv


def classify(leaf: ModuleLeaf, leaves: Leaves, counts: Structure) -> Block | str:
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


# ---- axes of a leaf, and blocks over them --------------------------------------------------------


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


def _inputs_of(leaf: ModuleLeaf, leaves: Leaves) -> int:
    """Return the number of inputs of one layer's matrix."""
    return leaf.inner_shape[1 - output_axis(leaf, leaves)]


def whole(leaf: ModuleLeaf, reason: str) -> Block:
    """Return one block for the tensor, or per layer if layers are stacked; elementwise if empty."""
    inner = leaf.inner if math.prod(leaf.shape) else ()
    text = "whole tensor" + (" of each layer" if leaf.stacked else "")
    return Block(inner, description=text if inner else "elementwise", reason=leaf.because(reason))


def layer_block(leaf: ModuleLeaf, text: str, axes: tuple[int, ...], reason: str) -> Block:
    """Return a block that averages over these axes of one layer's leaf."""
    return Block(tuple(leaf.inner[a] for a in axes), description=text, reason=leaf.because(reason))


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


# ---- descriptions --------------------------------------------------------------------------------

_F32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """Path, shape and block of one leaf in a `Description`."""

    path: str
    shape: tuple[int, ...]
    block: Block

    @property
    def values(self) -> int:
        """Return the number of entries of its v_mean."""
        return self.block.values(self.shape)

    @property
    def words(self) -> str:
        """Return a short description of its block."""
        block = self.block
        if block.description:
            return block.description
        over = f"mean over axes {block.axes}" if block.axes else ""
        of_heads = f"per head of axis {block.heads[0]} ({block.heads[1]})" if block.heads else ""
        return ", ".join(filter(None, (over, of_heads))) or "elementwise"


@dataclasses.dataclass(frozen=True)
class Description:
    """The block of each leaf, with its reason; print it for a table.

    Attributes:
      rows: one per leaf.
    """

    rows: tuple[Row, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the paths of the leaves that were not recognised and have the default."""
        return tuple(row.path for row in self.rows if not row.block.known)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def values(self) -> int:
        """Return the total number of entries of v_mean."""
        return sum(row.values for row in self.rows)

    @property
    def bytes(self) -> int:
        """Return the bytes of v_mean in f32."""
        return _F32_BYTES * self.values

    def __str__(self) -> str:
        """Return a line per leaf, with `?` if it was not recognised, and the totals."""
        cells = []
        for row in self.rows:
            mark, shape = " " if row.block.known else "?", "x".join(map(str, row.shape)) or "()"
            cells.append((mark, row.path, shape, row.words, str(row.values), row.block.reason))
        widths = [max((len(c[column]) for c in cells), default=0) for column in range(5)]
        lines = [
            f"{mark} {path:<{widths[1]}}  {shape:<{widths[2]}}  {words:<{widths[3]}}  "
            f"{values:>{widths[4]}}  {reason}"
            for mark, path, shape, words, values, reason in cells
        ]
        unknown = f", {len(self.unknown)} not recognised (marked ?)" if self.unknown else ""
        lines.append(
            f"{len(self.rows)} leaves{unknown}: {self.values} values of v_mean for "
            f"{self.parameters} parameters, {self.bytes / 2**20:.3f} MiB in f32"
        )
        return "\n".join(lines)


def describe(
    params: optax.Params,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    rules: Sequence[Rule] = (),
    default: str = "whole",
) -> Description:
    """Describe the block that `infer` gives each leaf, with the reason.

    The arguments and errors are those of `infer`.

    Returns:
      A `Description`; print it, or read its rows.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"embed": {"embedding": jnp.ones((50, 8))}, "odd": jnp.ones((4, 3))}
      >>> report = lowmem.blocks.describe(params)
      >>> report.values, report.unknown
      (51, ('odd',))
    """
    result = infer(params, heads=heads, kv_heads=kv_heads, rules=rules, default=default)
    shapes = {path: tuple(leaf.shape) for path, leaf in trees.named_leaves(params)}
    return Description(tuple(Row(path, shapes[path], block) for path, block in result.items()))
