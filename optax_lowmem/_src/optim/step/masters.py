"""Weights that an optimizer state keeps: f32 master weights, and weights without noise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.arrays import numerics, trees
from optax_lowmem._src.arrays.codecs import BitSplit, UlpSplit, split_of
from optax_lowmem._src.arrays.compiled import compiled
from optax_lowmem._src.arrays.typing import PyTree, Structure
from optax_lowmem._src.optim import context

FIELD = "clean"  # field of the states that keep weights without noise
NO_CORRECTION: Any = np.zeros((), np.int8)  # placeholder for a weight without a correction


def join_master(p: jax.Array, correction: jax.Array) -> jax.Array:
    """Join a parameter with its correction, or its 0-d placeholder, to the f32 master weight."""
    if not numerics.is_narrow(p.dtype):
        return p
    if correction.shape != p.shape:
        return numerics.widen(p)
    split = split_of(correction.dtype)
    if p.dtype == jnp.float16 and isinstance(split, BitSplit):  # the correction is a placeholder
        return numerics.widen(p)
    return split.join(p, correction)


def join_leaves(weights: list[jax.Array], corrections: list[jax.Array]) -> list[jax.Array]:
    """Apply `join_master` to each leaf, in one program; also takes `jax.ShapeDtypeStruct`s."""
    if any(isinstance(p, jax.ShapeDtypeStruct) for p in weights):
        return trees.widened(weights)
    rows = list(zip(weights, corrections, strict=True))
    narrow = [row for row in rows if numerics.is_narrow(row[0].dtype)]
    joined = iter(_joined(narrow) if narrow else [])
    return [next(joined) if numerics.is_narrow(p.dtype) else p for p, _ in rows]


@compiled
def _joined(rows: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    return [join_master(p, correction) for p, correction in rows]


def join_masters(params: optax.Params, correction: optax.Params) -> optax.Params:
    """Apply `join_master` to trees; metadata of a placeholder may differ from its weight's."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, join_leaves(leaves, jax.tree.leaves(correction)))


def splits_masters(tx: optax.GradientTransformation, params: optax.Params) -> bool:
    """Return whether a transformation splits the master weights of some leaf."""
    return bool(_decided(tx, params, "correction"))


def adds_noise(tx: optax.GradientTransformation, params: optax.Params) -> bool:
    """Return whether a transformation adds noise to the weights that the loss sees."""
    return bool(_decided(tx, params, FIELD))


def _decided(tx: optax.GradientTransformation, params: optax.Params, slot: str) -> set[str]:
    """Return the paths of the leaves for which `tx.init` decides to store a slot in some form."""
    with context.providing(context.Masters()):
        _, decisions = context.dry_run(tx, params)
    return {d.path for d in decisions if d.slot == slot and d.form is not None}


def master_params(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Reconstruct the f32 master weights from the weights and the optimizer state.

    Finds the corrections through chain, masked, partition, MultiSteps, inject_hyperparams and any
    other wrapper whose state is a pytree. Under `gaussws_noise` the result is without noise.

    Args:
      params: the weights.
      state: the optimizer's state.

    Returns:
      A tree of f32 arrays; a weight without a correction is only converted to f32.

    Raises:
      TypeError: if the arguments are swapped.
      ValueError: if a leaf has two corrections, or if a correction does not fit because the
        weight's name, dtype or shape differs from the state's.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> weights, state = lowmem.init(lowmem.flash_lion(1e-4), {"w": jnp.full(3, 0.1)})
      >>> lowmem.master_params(weights, state)["w"].dtype
      dtype('float32')
    """
    if next(trees.states_with(params, "correction", trees.is_ours), None) is not None:
        raise TypeError("the first argument is an optimizer's state: master_params(params, state)")
    treedef: Structure = jax.tree.structure(params)
    return treedef.unflatten(join_leaves(*kept_weights(params, state)))


def kept_weights(
    params: optax.Params, state: optax.OptState
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the arguments of `join_leaves`: weights without noise, and their corrections."""
    params = clean_params(params, state)
    corrections = corrections_of(params, state)
    rows = [(w, corrections.get(path, NO_CORRECTION)) for path, w in trees.named_leaves(params)]
    return [w for w, _ in rows], [correction for _, correction in rows]


def corrections_of(params: optax.Params, state: optax.OptState) -> dict[str, jax.Array]:
    """Return the corrections of 16-bit weights in an optimizer state, by path.

    Raises if a leaf has two corrections, or one for another name, dtype or shape.
    """
    corrections: dict[str, jax.Array] = {}
    weights = dict(trees.named_leaves(params))
    elsewhere: list[str] = []
    for result in trees.states_with(state, "correction", trees.is_ours):
        for path, correction in trees.named_leaves(result.correction):
            weight = weights.get(path)
            if weight is None:
                elsewhere += [path] if jnp.ndim(correction) else []
            elif _fits(path, weight, correction):
                if path not in corrections:
                    corrections[path] = correction
                elif weight.ndim:  # a 0-d one may be the placeholder of an inner optimizer
                    raise ValueError(
                        f"leaf '{path}' has two corrections in this state: two optimizers split "
                        "its master weight. Keep one split, and give the other optimizer "
                        "storage=Storage(master_weight_bits=None)."
                    )
    bare = [p for p, w in weights.items() if numerics.is_narrow(w.dtype) and p not in corrections]
    if bare and elsewhere:
        raise ValueError(
            f"the state has no correction of weight '{bare[0]}', but one of '{elsewhere[0]}', "
            "which is not a weight here: the weights were renamed or wrapped, or belong to another "
            "model. Pass the tree that the optimizer was initialized with, for example "
            "variables['params'] instead of variables."
        )
    return corrections


def _fits(path: str, weight: jax.Array, correction: jax.Array) -> bool:
    """Return whether an array is the correction of this weight, and not a placeholder.

    Raises if it is a correction whose dtype or shape does not fit the weight.
    """
    if not jnp.ndim(correction):
        return not jnp.ndim(weight) and weight.dtype != jnp.float32
    schemes = {jnp.dtype(jnp.bfloat16): (BitSplit, UlpSplit), jnp.dtype(jnp.float16): (UlpSplit,)}
    of_dtype = schemes.get(jnp.dtype(weight.dtype), ())
    if weight.shape == correction.shape and isinstance(split_of(correction.dtype), of_dtype):
        return True
    raise ValueError(
        f"weight '{path}' is {weight.dtype}{list(weight.shape)}, and this state corrects 16-bit "
        f"weights of shape {list(correction.shape)} with {correction.dtype}: the weight was cast "
        "or reshaped. Pass the weights that the optimizer updates."
    )


def clean_params(params: optax.Params, state: optax.OptState) -> PyTree:
    """Return the weights without noise, as the state stores them.

    Args:
      params: the parameters passed to the loss, including sampled weights.
      state: state of an optimizer that contains `gaussws_noise`, inside any wrapper.

    Returns:
      A tree like `params`, for evaluation and export (`master_params` returns f32 weights);
      `params` itself if the state has no `gaussws_noise`.

    Raises:
      ValueError: if a leaf has two clean weights.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem import gaussws
      >>> tx = lowmem.gaussws_noise(lowmem.flash_adamw(1e-3))
      >>> params, state = lowmem.init(tx, {"mlp": {"down_proj": {"kernel": jnp.ones((64, 64))}}})
      >>> sampled = params["mlp"]["down_proj"]["kernel"]
      >>> clean = gaussws.clean_params(params, state)["mlp"]["down_proj"]["kernel"]
      >>> bool((sampled == 1).all()), bool((clean == 1).all())
      (False, True)
    """
    results: dict[str, jax.Array] = {}
    leaves = trees.named_leaves(params)
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves}
    for node in trees.states_with(state, FIELD, trees.is_ours):
        for path, clean in trees.named_leaves(node.clean):
            if clean.ndim == 0 or shapes.get(path) != clean.shape:
                continue
            if path in results:
                raise ValueError(
                    f"leaf '{path}' has two clean weights in this state: two transformations add "
                    "noise to it. Keep one."
                )
            results[path] = clean
    if not results:
        return params
    selected = [results.get(path, leaf) for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), selected)
