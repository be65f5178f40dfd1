"""Initialize 16-bit weights and an optimizer state with their corrections."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.codecs import MasterSplit, master_split
from optax_lowmem._src.core import context, trees
from optax_lowmem._src.core.compiled import compiled

WeightDtype: TypeAlias = DTypeLike | Callable[[str, Any], DTypeLike]


def _weight_dtype(dtype: WeightDtype, path: str, leaf: object) -> jnp.dtype:
    """Return the dtype in which a leaf is stored.

    A leaf that is not a float keeps its dtype; an optimizer that has to step it raises an error.
    """
    if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.dtype
    trees.check_param(path, leaf)
    if callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype"):
        dtype = dtype(path, leaf)
    try:
        chosen = jnp.dtype(cast(Any, dtype)) if dtype is not None else None  # dtype(None) is f64
    except TypeError:
        chosen = dtype
    if chosen not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"dtype of parameter '{path}': weights must be stored in 'bfloat16', 'float16' or "
            f"'float32', not {str(chosen)!r}"
        )
    return chosen


def start(
    tx: optax.GradientTransformation,
    params: optax.Params,
    dtype: WeightDtype,
    seed: ArrayLike | None = None,
    allow_rounding: bool = True,
) -> tuple[optax.Params, optax.OptState]:
    """Return the result of `lowmem.init`, without warnings."""
    trees.check_transformation(tx, "pass (tx, params), in this order.", params)
    leaves, treedef = jax.tree.flatten(params)
    names = [name for name, _ in trees.named_leaves(params)]
    dtypes = [_weight_dtype(dtype, n, leaf) for n, leaf in zip(names, leaves, strict=True)]
    splits, settled = _splits(tx, treedef, leaves, dtypes, names)
    if not allow_rounding:
        _check_rounding(names, leaves, dtypes, settled)
    masters = context.Masters(seed=seed, originals=dict(zip(names, leaves, strict=True)))
    own = [splits.get(name) for name in names]
    weights, corrections = _split_leaves(own, leaves, dtypes)
    masters.corrections |= {n: c for n, c in zip(names, corrections, strict=True) if c is not None}
    tree = jax.tree.unflatten(treedef, weights)
    with context.providing(masters):
        state = tx.init(tree)
    seen = [masters.sampled.get(name, weight) for name, weight in zip(names, weights, strict=True)]
    return jax.tree.unflatten(treedef, seen), state


def _splits(
    tx: optax.GradientTransformation,
    treedef: PyTreeDef,
    leaves: list[jax.Array],
    dtypes: list[jnp.dtype],
    names: list[str],
) -> tuple[dict[str, MasterSplit], set[str]]:
    """Dry-run `tx.init`; return splits by leaf, and all leaves with a decision about a split."""
    shapes = [jax.ShapeDtypeStruct(a.shape, d) for a, d in zip(leaves, dtypes, strict=True)]
    abstract = jax.tree.unflatten(treedef, shapes)
    _, decisions = context.dry_run(tx, abstract)
    forms = {d.path: d.form for d in decisions if d.slot == "correction" and d.form}
    by_name = dict(zip(names, dtypes, strict=True))
    unknown = [path for path in forms if path not in by_name]
    if unknown:
        raise ValueError(
            f"the master weight of '{unknown[0]}' is split inside a wrapper such as "
            f"optax.lookahead, whose leaves have other names ({', '.join(names[:3])} ...): put "
            "split_master_weights around the wrapper, and storage=Storage(master_weight_bits=None) "
            "inside."
        )
    settled = {d.path for d in decisions if d.slot == "correction"}
    splits = {}
    for path, form in forms.items():
        scheme, bits = form.split("-")
        splits[path] = master_split(by_name[path], int(bits), scheme)
    return splits, settled


def _check_rounding(
    names: list[str], leaves: list[jax.Array], dtypes: list[jnp.dtype], settled: set[str]
) -> None:
    """Raise if an f32 leaf would be rounded to 16 bits and no optimizer decided on its split."""
    lost = [
        (name, dtype)
        for name, leaf, dtype in zip(names, leaves, dtypes, strict=True)
        if leaf.dtype == jnp.float32 and dtype != jnp.float32 and name not in settled
    ]
    if lost:
        (name, dtype), more = lost[0], f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(
            f"'{name}'{more} would be rounded from float32 to {jnp.dtype(dtype).name}, and no "
            "optimizer stores the correction: steps under half an ulp of a weight would be lost. "
            "Put split_master_weights around the whole optimizer; or keep such leaves in f32 with "
            "dtype=jnp.float32, or a function (path, leaf) -> dtype; or pass allow_rounding=True, "
            "for example for frozen weights."
        )


def _split_leaves(
    splits: list[MasterSplit | None], leaves: list[jax.Array], dtypes: list[jnp.dtype]
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Return weights and corrections; unchanged leaves are returned unmodified."""
    rows = list(zip(splits, leaves, dtypes, strict=True))
    changed = [split is not None or leaf.dtype != dtype for split, leaf, dtype in rows]
    made = iter(_made([row for row, new in zip(rows, changed, strict=True) if new]))
    pairs = [next(made) if new else (leaf, None) for leaf, new in zip(leaves, changed, strict=True)]
    return [weight for weight, _ in pairs], [correction for _, correction in pairs]


# compiled as one program, which fuses the integer temporaries of a split
@compiled
def _made(
    rows: list[tuple[MasterSplit | None, jax.Array, jnp.dtype]],
) -> list[tuple[jax.Array, jax.Array | None]]:
    return [
        (leaf.astype(dtype), None)
        if split is None
        else split.split(leaf.astype(jnp.float32), dtype)
        for split, leaf, dtype in rows
    ]
