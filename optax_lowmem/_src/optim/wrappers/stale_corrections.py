"""Find updates that are changed after the split of master weights, which makes corrections stale.

optax wrappers are closures, so a step is tried on small leaves, and the updates that the split
emitted are compared with those that the whole transformation returns.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import PyTree, Shaped
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.masters import FIELD

_PROBE_SIDES = 4, 64  # maximum side of leaves in a trial step; the larger if the smaller fails
_MICRO_BATCHES = 64  # maximum number of micro-batches in a trial step
# states of optax wrappers that return the updates of what they wrap unchanged
_PASSING = ("MaskedState", "PartitionState", "InjectHyperparamsState",
            "InjectStatefulHyperparamsState")  # fmt: skip
_SELECTING = ("MultiStepsState", "ApplyIfFiniteState")  # these updates, or zeros
_INSIDE = (
    "split_master_weights(wrapper(flash_adamw(..., storage=Storage(master_weight_bits=None))))"
)


def _follows_split(
    node: object, known: tuple[str, ...], ours: bool, otherwise: bool = True
) -> bool:
    """Return whether links of a chain follow the split in a state, or `otherwise` if unknown.

    Only the states of optax named in `known` and, with `ours`, of this library are searched.
    """
    if not _has_split(node) or _is_split(node) and not ours:
        return False
    if trees.is_named_tuple(node):
        if not (trees.is_ours(node) and ours) and type(node).__name__ not in known:
            return otherwise
    elif _is_chain(node) and not _has_split(list(_children(node))[-1]):
        return True
    parts = list(_children(node))
    return _has_split(parts) and any(_follows_split(part, known, ours, otherwise) for part in parts)


def _in_some_steps(node: object) -> bool:
    """Return whether a condition on the step, around or after a split, may change its updates."""
    if not _has_split(node) or _is_split(node):
        return False
    if type(node).__name__ == "ConditionallyTransformState":
        return True
    parts = list(_children(node))
    split = next(index for index, part in enumerate(parts) if _has_split(part))
    after = parts[split + 1 :] if _is_chain(node) else []
    conditions = "ConditionallyTransformState", "ConditionallyMaskState"
    return trees.holds(after, lambda inner: type(inner).__name__ in conditions) or any(
        map(_in_some_steps, parts)
    )


def _is_split(node: object) -> bool:
    fields = getattr(node, "_fields", ())
    return ("correction" in fields or FIELD in fields) and trees.is_ours(node)


def _has_split(node: object) -> bool:
    return trees.holds(node, _is_split)


def _is_chain(node: object) -> bool:
    """Return whether this is the state of optax.chain or optax.named_chain."""
    return type(node) in (tuple, OrderedDict)


def _children(node: object) -> Iterator[PyTree]:
    yield from jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)


@dataclasses.dataclass(frozen=True)
class ChangesAfter:
    """The messages of a trial step: `errors` and `warnings`."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def stale_corrections(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    decisions: list[context.Decision],
) -> ChangesAfter:
    """Return messages about leaves whose update is changed after the split, found in a trial step.

    A split emits updates to weights with a correction, or rounded stochastically; the final updates
    of the step must be equal to these. If they are not, a correction is wrong (an error), or a
    weight is rounded twice (a warning). No step is tried if there are no such weights, or if the
    structure of the state shows that nothing changes their updates. `params` and `state` may be
    their `jax.eval_shape`.
    """
    split = any(d.slot in ("correction", FIELD) and (d.form or d.stochastic) for d in decisions)
    if not split or not _follows_split(state, (*_PASSING, *_SELECTING), ours=True):
        return ChangesAfter()
    for side in _PROBE_SIDES:
        try:
            with jax.ensure_compile_time_eval():
                changed = _changed(tx, params, side)
            break
        except Exception as error:  # a failed trial becomes a warning, not an error of the caller
            failed = error
    else:
        message = f"could not try a step to look for stale corrections: {failed}"
        return ChangesAfter(warnings=(message,))
    rounded = {d.path for d in decisions if d.slot == "correction" and not d.form}
    of_split = [path for path in changed if path not in rounded]
    of_rounded = [path for path in changed if path in rounded]
    stale = (
        f"the updates of {trees.some_of(of_split)} are changed after the split of their "
        "master weights into 16 bits and a correction, which no longer fit together then. Put the "
        "transformation that changes them before the optimizer; or, if it must follow (here "
        f"`wrapper`), inside of the split: {_INSIDE}."
    )
    twice = (
        f"the updates of {trees.some_of(of_rounded)} are changed after their 16-bit weights "
        "were rounded stochastically: the changes are rounded to nearest, and steps under half "
        "an ulp of a weight are lost. Put the transformation that changes them before the "
        f"optimizer; or, if it must follow (here `wrapper`), inside of a split: {_INSIDE}."
    )
    return ChangesAfter((stale,) * bool(of_split), (twice,) * bool(of_rounded))


# Optimizers of optax that use differences of weights, which the rounding of masters distorts.
# (No loss was measured for prodigy, dadapt_adamw, cocob, madgrad, momo, schedule_free.)
_DISTANCES = {
    "MechanicState": "mechanize", "DoGState": "dog", "DoWGState": "dowg",
    "ScaleByLBFGSState": "lbfgs",
}  # fmt: skip


def rounded_distances(state: optax.OptState) -> list[str]:
    """Return warnings for optimizers inside a 24-bit split that use differences of weights."""
    results: set[str] = set()
    for node in trees.states_with(state, "correction", trees.is_ours):
        if any(c.ndim and c.dtype.itemsize == 1 for c in jax.tree.leaves(node.correction)):
            inside = jax.tree.leaves(
                getattr(node, "inner_state", ()), is_leaf=lambda n: type(n).__name__ in _DISTANCES
            )
            results |= _DISTANCES.keys() & {type(inner).__name__ for inner in inside}
    return [
        f"optax's {_DISTANCES[kind]} uses differences of weights, which the rounding of 24-bit "
        "master weights distorts: use 32 bits, split_master_weights(..., bits=32) or "
        "Storage(master_weight_bits=32)."
        for kind in sorted(results)
    ]


def _changed(tx: optax.GradientTransformation, params: optax.Params, most: int) -> list[str]:
    """Return the leaves whose updates are not the split's in a step; their sides are shortened."""
    rng = np.random.default_rng(0)

    def small(leaf: Shaped) -> jax.Array:
        shape = tuple(_shortened(side, most) for side in leaf.shape)
        return jnp.asarray(rng.normal(size=shape)).astype(leaf.dtype)

    weights = jax.tree.map(small, params)
    with context.recording():  # without the warnings of a user's `init`
        state = tx.init(weights)
    fast = _fast_weights(weights)
    grads = jax.tree.map(lambda w: jnp.full(w.shape, 0.5, jnp.float32), fast)
    # under jit, values of branches (MultiSteps, cond) are tracers that must not leave them
    with context.emitting() as emitted, jax.disable_jit():
        for _ in range(_MICRO_BATCHES):
            updates, state = _update(tx, grads, state, weights, fast)
            if not any(_micro_steps(state)):
                break
        else:
            raise ValueError(f"no batch of at most {_MICRO_BATCHES} micro-batches")
    final = _fast_weights(updates)
    # values may be equal by chance (a schedule that starts at 1): in a chain, compare identity
    by_identity = _follows_split(state, _PASSING, ours=False, otherwise=False)
    in_some_steps = _in_some_steps(state)

    def differs(update: jax.Array, of_split: jax.Array) -> bool:
        if in_some_steps or by_identity and update is not of_split:
            return True
        # a step that a wrapper skips has updates of zeros
        return bool(jnp.any(update != 0)) and bool(jnp.any(update != of_split))

    return [
        path
        for path, update in trees.named_leaves(final)
        if path in emitted and differs(update, emitted[path])
    ]


def _fast_weights(tree: PyTree) -> PyTree:
    """Return what the optimizer inside `optax.lookahead` steps; other trees unchanged."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def _micro_steps(state: optax.OptState) -> Iterator[int]:
    """Yield the number of micro-batches of a batch that each gradient accumulation has seen."""
    for name, field in (("MultiStepsState", "mini_step"), ("AccumulationState", "micro_step")):
        for node in trees.states_with(state, field):
            if type(node).__name__ == name:
                yield int(getattr(node, field))


def _update(
    tx: optax.GradientTransformation, grads: PyTree, state: PyTree, weights: PyTree, at: PyTree
) -> tuple[optax.Updates, optax.OptState]:
    """Call `tx.update` with as many of optax's extra arguments as it accepts.

    They belong to the loss sum(w / 2 + (w - at)^2), whose gradient at `at` is `grads`.
    """

    def value_fn(params: optax.Params, grad_fn: object = None) -> jax.Array:
        wide = trees.widened(params), trees.widened(at)
        terms = jax.tree.map(lambda w, a: jnp.sum(w / 2 + (w - a) ** 2), *wide)
        return jnp.asarray(sum(jax.tree.leaves(terms)), jnp.float32)

    extra = {"value": value_fn(at), "grad": grads, "value_fn": value_fn,
             "grad_fn": lambda params, index: grads}  # fmt: skip
    update, failed = optax.with_extra_args_support(tx).update, TypeError()
    # Which arguments an `update` inside a wrapper accepts shows in a call only: some optimizers of
    # optax refuse those of others. https://github.com/google-deepmind/optax/issues/1131
    for count in range(len(extra), -1, -1):
        for names in itertools.combinations(extra, count):
            try:
                return update(grads, state, weights, **{name: extra[name] for name in names})
            except TypeError as error:
                failed = error if count == len(extra) else failed
    raise failed


def _shortened(side: int, most: int) -> int:
    """Halve a side until it is at most `most`, so that a number of heads usually divides it."""
    while side > most and side % 2 == 0:
        side //= 2
    return min(side, most)
