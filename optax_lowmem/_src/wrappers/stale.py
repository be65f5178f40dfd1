"""Updates changed after the split of their master weights, whose corrections are then stale."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.core.typing import Shaped
from optax_lowmem._src.noise.states import FIELD
from optax_lowmem._src.wrappers.start import start

_PROBE_SIDES = 4, 64  # of a trial's leaves, at most; the larger where the smaller does not do
# of optax: what they hand out is an update of what they wrap, as it is
_PASSING = ("MaskedState", "PartitionState", "InjectHyperparamsState",
            "InjectStatefulHyperparamsState")  # fmt: skip
_SELECTING = ("MultiStepsState", "ApplyIfFiniteState")  # that, or zeros


def suspected(state: optax.OptState) -> bool:
    """Return whether, by the structure of a state, updates may be changed after a split."""
    return _wrapped(state, (*_PASSING, *_SELECTING), ours=True)


def _followed(state: optax.OptState) -> bool:
    """Return whether links of a chain follow a split, with no selecting wrapper around them."""
    return _wrapped(state, _PASSING, ours=False, otherwise=False)


def _wrapped(node: object, known: tuple[str, ...], ours: bool, otherwise: bool = True) -> bool:
    """Return whether a chain goes on after the split inside a state, or `otherwise` if unknown.

    Args:
      node: a state, or a part of one.
      known: names of the optax states to search.
      ours: whether to search states of this library.
      otherwise: the answer for any other state with a split inside.
    """
    if not _has_split(node) or _is_split(node) and not ours:
        return False
    if trees.is_named_tuple(node):
        if not (trees.is_ours(node) and ours) and type(node).__name__ not in known:
            return otherwise
    elif _is_chain(node) and not _has_split(list(_parts(node))[-1]):
        return True
    parts = list(_parts(node))
    return _has_split(parts) and any(_wrapped(part, known, ours, otherwise) for part in parts)


def _in_some_steps(node: object) -> bool:
    """Return whether a condition on the step, around or after the split, may change its updates."""
    if not _has_split(node) or _is_split(node):
        return False
    if type(node).__name__ == "ConditionallyTransformState":
        return True
    parts = list(_parts(node))
    split = next(index for index, part in enumerate(parts) if _has_split(part))
    after = parts[split + 1 :] if _is_chain(node) else []
    return any(map(_has_condition, after)) or any(map(_in_some_steps, parts))


def _has_condition(node: object) -> bool:
    conditions = "ConditionallyTransformState", "ConditionallyMaskState"
    return trees.holds(node, lambda inner: type(inner).__name__ in conditions)


def _is_split(node: object) -> bool:
    fields = getattr(node, "_fields", ())
    return ("correction" in fields or FIELD in fields) and trees.is_ours(node)


def _has_split(node: object) -> bool:
    return trees.holds(node, _is_split)


def _is_chain(node: object) -> bool:
    """Of optax.chain or optax.named_chain."""
    return type(node) in (tuple, OrderedDict)


def _parts(node: object) -> Iterator[Any]:
    yield from jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)


def found(tx: optax.GradientTransformation, params: optax.Params) -> list[str]:
    """Warnings for leaves whose final update is not what their split emitted, in a trial step.

    Args:
      tx: any optax transformation.
      params: the weights as they are stored, or their `jax.eval_shape`.
    """
    for side in _PROBE_SIDES:
        try:
            with jax.ensure_compile_time_eval():
                changed = _changed(tx, params, side)
            break
        except Exception as error:  # a trial must not take down what it is for
            failed = error
    else:
        return [f"could not try a step to look for stale corrections: {failed}"]
    if not changed:
        return []
    return [
        f"the updates of {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''} are changed "
        "after the split of their master weights, whose corrections then belong to other weights. "
        "Put what changes them inside: split_master_weights(wrapper(flash_adamw(..., "
        "storage=Storage(master_weight_bits=None))))."
    ]


def _changed(tx: optax.GradientTransformation, params: optax.Params, most: int) -> list[str]:
    rng = np.random.default_rng(0)

    def small(leaf: Shaped) -> jax.Array:
        shape = tuple(_shortened(side, most) for side in leaf.shape)
        dtype = jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jnp.asarray(rng.normal(size=shape)).astype(dtype)

    dtypes = {path: leaf.dtype for path, leaf in trees.named_leaves(params)}
    weights, state = start(tx, jax.tree.map(small, params), lambda path, leaf: dtypes[path])
    fast = weights.fast if isinstance(weights, optax.LookaheadParams) else weights
    grads = jax.tree.map(lambda w: jnp.full(w.shape, 0.5, jnp.float32), fast)
    with scope.emitting() as emitted:
        # jit may trace branches (MultiSteps, cond) whose values never leave it: run op by op
        with jax.disable_jit():
            final, _ = optax.with_extra_args_support(tx).update(
                grads, state, weights, value=jnp.float32(1), grad=grads, value_fn=None
            )
    # a schedule may start with a factor of 1: in a chain what is not the very array was changed
    untouched, in_some_steps = _followed(state), _in_some_steps(state)

    def differs(update: jax.Array, own: jax.Array) -> bool:
        if in_some_steps or untouched and update is not own:
            return True
        return bool(jnp.any(update != 0)) and bool(jnp.any(update != own))

    return [
        path
        for path, update in trees.named_leaves(final)
        if path in emitted and differs(update, emitted[path])
    ]


def _shortened(side: int, most: int) -> int:
    """A side halved until it is short enough: a number of heads still divides it, mostly."""
    while side > most and side % 2 == 0:
        side //= 2
    return min(side, most)
