"""Weights and the state that an optimizer starts from: 16 bits, and corrections."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from optax_lowmem._core import scope, trees
from optax_lowmem._core.compiled import compiled
from optax_lowmem.codecs import MasterSplit, master_split

WeightDtype = Any | Callable[[str, Any], Any]


def _weight_dtype(dtype: WeightDtype, path: str, leaf: Any) -> jnp.dtype:
    """What a leaf becomes; what is no float stays, and only an optimizer that takes it minds."""
    if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.dtype
    trees.check_param(path, leaf)
    if callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype"):
        dtype = dtype(path, leaf)
    try:
        chosen = jnp.dtype(cast(Any, dtype)) if dtype is not None else None  # else it is float64
    except TypeError:
        chosen = dtype
    if chosen not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"dtype of parameter '{path}': weights are kept in 'bfloat16', 'float16' or 'float32', "
            f"not {str(chosen)!r}"
        )
    return chosen


def start(tx: Any, params: Any, dtype: WeightDtype, seed: Any = None) -> tuple[Any, Any]:
    """`lowmem.init`, without a look at how `tx` is put together."""
    trees.check_transformation(tx, "pass (tx, params), in this order.")
    leaves, treedef = jax.tree.flatten(params)
    names = [name for name, _ in trees.named_leaves(params)]
    dtypes = [_weight_dtype(dtype, n, leaf) for n, leaf in zip(names, leaves, strict=True)]
    splits = _splits(tx, treedef, leaves, dtypes, names)
    masters = scope.Masters(seed=seed, originals=dict(zip(names, leaves, strict=True)))
    own = [splits.get(name) for name in names]
    weights, corrections = _split_leaves(own, leaves, dtypes)
    masters.corrections |= {n: c for n, c in zip(names, corrections, strict=True) if c is not None}
    tree = jax.tree.unflatten(treedef, weights)
    with scope.providing(masters):
        state = tx.init(tree)
    seen = [masters.sampled.get(name, weight) for name, weight in zip(names, weights, strict=True)]
    return jax.tree.unflatten(treedef, seen), state


def _splits(
    tx: Any, treedef: Any, leaves: list[Any], dtypes: list[Any], names: list[str]
) -> dict[str, MasterSplit]:
    """The split of each leaf, from a dry run of `tx.init`."""
    shapes = [jax.ShapeDtypeStruct(a.shape, d) for a, d in zip(leaves, dtypes, strict=True)]
    abstract = jax.tree.unflatten(treedef, shapes)
    _, decisions = scope.dry_run(tx, abstract)
    forms = {d.path: d.form for d in decisions if d.slot == "correction" and d.form}
    by_name = dict(zip(names, dtypes, strict=True))
    unknown = [path for path in forms if path not in by_name]
    if unknown:
        raise ValueError(
            f"the master weight of '{unknown[0]}' is split inside a wrapper that has other leaves "
            f"({', '.join(names[:3])} ...), such as optax.lookahead: put split_master_weights "
            "around the wrapper, and storage=Storage(master_weight_bits=None) inside."
        )
    return {path: _split_named(form, by_name[path]) for path, form in forms.items()}


def _split_named(form: str, dtype: jnp.dtype) -> MasterSplit:
    scheme, bits = form.split("-")
    return master_split(dtype, int(bits), scheme)


def _split_leaves(
    splits: list[MasterSplit | None], leaves: list[Any], dtypes: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Weights and corrections; a leaf that stays as it is, is itself."""
    rows = list(zip(splits, leaves, dtypes, strict=True))
    changed = [split is not None or leaf.dtype != dtype for split, leaf, dtype in rows]
    made = iter(_made([row for row, new in zip(rows, changed, strict=True) if new]))
    pairs = [next(made) if new else (leaf, None) for leaf, new in zip(leaves, changed, strict=True)]
    return [weight for weight, _ in pairs], [correction for _, correction in pairs]


# one program: the integer temporaries of a split are fused away
@compiled
def _made(rows: list[tuple[MasterSplit | None, Any, Any]]) -> list[tuple[Any, Any]]:
    return [
        (leaf.astype(dtype), None)
        if split is None
        else split.split(leaf.astype(jnp.float32), dtype)
        for split, leaf, dtype in rows
    ]
