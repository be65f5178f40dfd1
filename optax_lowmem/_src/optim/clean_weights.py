"""The weights without noise that a state of `gaussws_noise` keeps."""

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import PyTree

FIELD = "clean"  # field of the states that keep weights without noise


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
