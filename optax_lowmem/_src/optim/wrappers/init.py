"""`lowmem.init`: 16-bit weights and their optimizer state."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import patterns, trees
from optax_lowmem._src.arrays.codecs import MasterSplit, master_split
from optax_lowmem._src.arrays.compiled import compiled
from optax_lowmem._src.arrays.typing import Arrays, PyTree
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.storage import unmatched_patterns
from optax_lowmem._src.optim.wrappers.stale_corrections import rounded_distances, stale_corrections

WeightDtype: TypeAlias = DTypeLike | Callable[[str, PyTree], DTypeLike]


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    dtype: WeightDtype = jnp.bfloat16,
    *,
    keep_f32: Sequence[str] = (),
    seed: ArrayLike | None = None,
    allow_rounding: bool = False,
) -> tuple[optax.Params, optax.OptState]:
    """Return 16-bit weights and an optimizer state that together hold f32 parameters.

    Every split inside `tx` (through chain, masked, partition, MultiSteps, inject_hyperparams) gets
    the corrections of its leaves. A leaf without a split would be rounded to nearest, and every
    later step under half an ulp would be lost: this raises an error unless `allow_rounding` is set.
    float16 parameters become bfloat16, too, unless you pass `dtype=jnp.float16`; corrections keep
    the bits that bfloat16 has not.

    Args:
      tx: an optimizer.
      params: f32 parameters, or 16-bit ones.
      dtype: bfloat16, float16 or float32 for the weights, or a function (path, leaf) -> dtype.
      keep_f32: glob patterns on leaf paths, such as `("*norm*",)`: these weights are f32 whatever
        `dtype` is.
      seed: seed of stochastic rounding, an integer that replaces `Storage.seed`; may be traced (one
        for each member of an ensemble). For a key of `jax.random`, pass `jax.random.bits(key)`.
      allow_rounding: round leaves that no optimizer splits to 16-bit weights, for example frozen
        ones. Not needed for optimizers with `Storage(master_weight_bits=None)`.

    Returns:
      (weights, state). Leaves that are neither cast nor split are the given arrays, so a step that
      donates the weights also donates these. Under `gaussws_noise` weights have their first noise.
      Peak memory is that of params, weights and state, plus temporaries of one leaf.

    Raises:
      TypeError: for float64 parameters, and for parameters that are not floats unless a mask or
        partition excludes them; excluded ones are returned unmodified. For a string as `keep_f32`.
      ValueError: if two optimizers split one leaf, a leaf would lose precision, a transformation
        after the optimizer changes the updates of leaves with a correction (found by a trial step
        on small leaves), or a pattern of `keep_f32` matches no leaf.

    Memory: 2 bytes per 16-bit weight plus 1 or 2 for its correction, 4 per f32 weight.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> weights, state = lowmem.init(tx, {"w": jnp.full((64, 64), 0.1)})
      >>> float(weights["w"][0, 0]), float(lowmem.master_params(weights, state)["w"][0, 0])
      (0.10009765625, 0.10000038146972656)
      >>> params = {"w": jnp.ones((64, 64)), "norm": jnp.ones(64)}
      >>> weights, state = lowmem.init(tx, params, keep_f32=("*norm*",))
      >>> weights["w"].dtype, weights["norm"].dtype
      (dtype(bfloat16), dtype('float32'))
    """
    trees.check_transformation(tx, "pass (tx, params), in this order.", params)
    leaves, treedef = dict(trees.named_leaves(params)), jax.tree.structure(params)
    kept = patterns.matching("keep_f32", keep_f32, list(leaves))
    dtypes = {
        path: _weight_dtype(jnp.float32 if path in kept else dtype, path, leaf)
        for path, leaf in leaves.items()
    }
    shapes = [jax.ShapeDtypeStruct(leaf.shape, dtypes[path]) for path, leaf in leaves.items()]
    like = jax.tree.unflatten(treedef, shapes)
    state_like, decisions = context.dry_run(tx, like)
    splits = _splits(decisions, dtypes)
    if not allow_rounding:
        _check_rounding(leaves, dtypes, decisions)
    changes = stale_corrections(tx, like, state_like, decisions)
    for error in changes.errors:
        raise ValueError(error)
    changed = {
        path: (splits.get(path), leaf, dtypes[path])
        for path, leaf in leaves.items()
        if path in splits or leaf.dtype != dtypes[path]
    }
    for path, (_, leaf, _) in changed.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"parameter '{path}' is a ShapeDtypeStruct, which has no values: for the "
                "shapes of weights and state call this inside jax.eval_shape."
            )
    stored = dict(zip(changed, _stored(list(changed.values())), strict=True))
    corrections = {path: c for path, (_, c) in stored.items() if c is not None}
    masters = context.Masters(corrections, seed=seed, originals=leaves)
    weights = [stored[path][0] if path in stored else leaf for path, leaf in leaves.items()]
    with context.providing(masters):
        state = tx.init(jax.tree.unflatten(treedef, weights))
    # weights to which an optimizer has added noise
    weights = [masters.sampled.get(path, w) for path, w in zip(leaves, weights, strict=True)]
    params = jax.tree.unflatten(treedef, weights)
    for warning in (
        *unmatched_patterns((pattern for d in decisions for pattern in d.patterns), params),
        *changes.warnings,
        *rounded_distances(state),
    ):
        warnings.warn(warning, stacklevel=2)
    return params, state


def splits_of_f32(tx: optax.GradientTransformation, params: optax.Params) -> set[str]:
    """Return the paths of the f32 parameters that an optimizer splits if their weights are bf16."""

    def is_f32(leaf: PyTree) -> bool:
        return bool(getattr(leaf, "dtype", None) == jnp.float32)

    def narrow(leaf: PyTree) -> PyTree:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) if is_f32(leaf) else leaf

    _, decisions = context.dry_run(tx, jax.tree.map(narrow, params))
    split = {d.path for d in decisions if d.slot == "correction" and d.form}
    if not split:
        return split
    return {path for path, leaf in trees.named_leaves(params) if is_f32(leaf)} & split


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


def _splits(
    decisions: list[context.Decision], dtypes: Mapping[str, jnp.dtype]
) -> dict[str, MasterSplit]:
    """Return the split of each leaf whose master weight is split."""
    splits = {}
    for decision in decisions:
        if decision.slot != "correction" or not decision.form:
            continue
        if decision.path not in dtypes:
            raise ValueError(
                f"the master weight of '{decision.path}' is split inside a wrapper such as "
                "optax.lookahead, whose leaves have other names "
                f"({', '.join(list(dtypes)[:3])} ...): put split_master_weights around the "
                "wrapper, and storage=Storage(master_weight_bits=None) inside."
            )
        scheme, bits = decision.form.split("-")
        splits[decision.path] = master_split(dtypes[decision.path], int(bits), scheme)
    return splits


def _check_rounding(
    leaves: Arrays, dtypes: Mapping[str, jnp.dtype], decisions: list[context.Decision]
) -> None:
    """Raise if a leaf would be rounded to another dtype and no optimizer decided on its split."""
    decided = {d.path for d in decisions if d.slot == "correction"}
    lost = [
        path
        for path, leaf in leaves.items()
        if dtypes[path] not in (leaf.dtype, jnp.float32) and path not in decided
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(
            f"'{lost[0]}'{more} would be rounded from {leaves[lost[0]].dtype} to "
            f"{dtypes[lost[0]].name}, and no optimizer stores the correction: steps under half an "
            "ulp of a weight would be lost. Put split_master_weights around the whole optimizer; "
            "or keep such leaves in f32 with keep_f32=, patterns of their paths; or pass "
            "allow_rounding=True, for example for frozen weights."
        )


# compiled as one program, which fuses the integer temporaries of a split
@compiled
def _stored(
    rows: list[tuple[MasterSplit | None, jax.Array, jnp.dtype]],
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Return the weight and the correction of each (split, f32 parameter, dtype)."""
    return [
        (leaf.astype(dtype), None)
        if split is None
        else split.split(leaf.astype(jnp.float32), dtype)
        for split, leaf, dtype in rows
    ]
