"""Reset moments to zero on request, for whole parameters or some of their elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim.wrappers import slots
from optax_lowmem._src.optim.wrappers.compressor import CompressedState


def reset(state: optax.OptState, where: PyTree = True) -> optax.OptState:
    r"""Reset the moments of an optimizer state to zero where `where` is True.

    Use it for revived neurons, dead features of a sparse autoencoder, or replaced rows of a
    vocabulary. In every codec the code 0 stands for 0, so reset moments are exactly 0, and codes of
    neighbors in the same group do not change. Corrections are kept, so master weights do not
    change; nor do the step count, the seed and accumulated gradients.

    Works through `optax.chain`, `masked`, `partition`, `MultiSteps`, `compress_state` and other
    wrappers, for states of this library and of optax, under `jit`, and keeps shardings. A moment
    that many elements share (`flash_adam_mini`, `flash_factored_adamw`) is reset if the mask is
    True, or if the mask fits the moment's shape.

    Args:
      state: the optimizer's state.
      where: a tree with the parameters' structure, or a prefix of it. Its leaves are True or False
        for a whole parameter, or boolean arrays with the parameter's number of axes that broadcast
        to its shape: `rows[:, None]` or `columns[None, :]`. Masks of whole rows also reset the
        scales of groups, which clears moments that are not finite.

    Returns:
      The new state, with the same structure, shapes and dtypes.

    Raises:
      ValueError: for a mask that fits no moment of its parameter, and a name that the state does
        not have.
      TypeError: for a mask that is not boolean.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((64, 64))}, state, params)
      >>> dead = jnp.arange(64) < 2
      >>> state = lowmem.reset(state, where={"w": dead[:, None]})
      >>> state.mu["w"][:3, 0].tolist()
      [0, 0, 127]
    """
    masks = dict(trees.named_leaves(where))
    for path, mask in masks.items():
        if jnp.result_type(mask) != jnp.bool_:
            raise TypeError(
                f"where{_indexed(path)} is {jnp.result_type(mask)}, but must be True, False or a "
                "boolean array, for example (steps_since_active > 1000)[:, None]."
            )
    fitting = dict.fromkeys(masks, False)  # whether some moment of the parameter has been reset

    def set_zero(path: str, x: jax.Array, scales: bool) -> jax.Array:
        parts = path.split("/")
        prefixes = ("/".join(parts[:i]) for i in range(len(parts), -1, -1))  # the longest first
        prefix = next((prefix for prefix in prefixes if prefix in masks), None)
        if prefix is None:
            return x
        new = _zeros_where(x, masks[prefix], scales)
        fitting[prefix] |= new is not None
        return x if new is None else new

    def set_tree(tree: PyTree, scales: bool = False) -> PyTree:
        leaves = [set_zero(path, x, scales) for path, x in trees.named_leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    # names of the slots that compress_state stores as codes
    coded = {
        name.split("_scale")[0]
        for node in trees.states_with(state, "scales", _is_compressed)
        for name in node.scales
    }

    def visit(node: PyTree, field: str, value: PyTree) -> PyTree:
        if field == "scales" and _is_compressed(node):
            return {name: set_tree(tree, scales=True) for name, tree in value.items()}
        if field.endswith("_scale") and hasattr(node, field.removesuffix("_scale")):
            return set_tree(value, scales=True)
        is_slot = hasattr(node, f"{field}_scale") or field in coded or slots.is_known(node, field)
        return set_tree(value) if is_slot else value

    new = slots.map_slots(visit, state)
    for path, fits in fitting.items():
        if not fits:
            raise ValueError(
                f"where{_indexed(path)} fits no moment of this state: it must have the name of a "
                "parameter or subtree, and a mask must have the parameter's number of axes, each "
                f"of length 1 or the parameter's; got shape {np.shape(masks[path])}."
            )
    return new


def _is_compressed(node: object) -> bool:
    return isinstance(node, CompressedState)


def _indexed(path: str) -> str:
    return f"['{path}']" if path else ""


def _zeros_where(x: jax.Array, mask: PyTree, scales: bool) -> jax.Array | None:
    """Return `x` with zeros where the mask is True, or None if the mask does not fit `x`.

    Scales accept only masks of whole rows, since their shape does not determine their groups.
    """
    if np.ndim(mask) == 0:
        return jnp.where(mask, jnp.zeros_like(x), x)
    if np.ndim(mask) != x.ndim:
        return None
    whole_rows = mask.shape[-1] == 1
    if scales and not whole_rows:
        return None
    if not whole_rows and x.dtype == jnp.uint8 and mask.shape[-1] > x.shape[-1]:
        mask = _bits_of_bytes(mask, x.shape[-1])
        return None if mask is None or not _fits(mask, x) else x & ~mask
    return jnp.where(mask, jnp.zeros_like(x), x) if _fits(mask, x) else None


def _fits(mask: PyTree, x: jax.Array) -> bool:
    return all(size in (1, whole) for size, whole in zip(mask.shape, x.shape, strict=True))


def _bits_of_bytes(mask: jax.Array, count: int) -> jax.Array | None:
    """Return the mask of the bits in `count` bytes that store masked 4- or 2-bit codes, or None."""
    length = mask.shape[-1]
    each = next((n for n in (2, 4) if -(-length // n) == count), None)
    if each is None:
        return None
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, each * count - length)]
    codes = jnp.pad(mask, padding).reshape(*mask.shape[:-1], count, each)
    bits = jnp.asarray([((1 << 8 // each) - 1) << 8 // each * i for i in range(each)], jnp.uint8)
    return jnp.sum(jnp.where(codes, bits, jnp.uint8(0)), axis=-1, dtype=jnp.uint8)
