"""`explain`: what happens to each leaf, and what is wrong with how an optimizer is put together."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._core import scope, trees
from optax_lowmem.gaussws.states import FIELD
from optax_lowmem.transforms.masters import init

_PROBE_SIDE = 4


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a tree of parameters is stored under an optimizer.

    Attributes:
      decisions: one for each slot of each leaf.
      steps: for each leaf, what computes its step on this machine.
      warnings: misuses found; each says what to do.
    """

    decisions: tuple[scope.Decision, ...]
    steps: tuple[scope.Decision, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """One line a leaf and slot, one for each way that steps are computed, then the warnings."""
        width = max([len(d.path) for d in self.decisions], default=0)
        lines = [
            f"{d.path:<{width}}  {d.slot:<10}  {d.form or '-':<16}  {d.reason}"
            for d in self.decisions
        ]
        ways = collections.Counter((d.form, d.reason) for d in self.steps)
        lines += [f"step by {form} for {n} of {len(self.steps)} leaves: {reason}"
                  for (form, reason), n in ways.items()]  # fmt: skip
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


def explain(tx: optax.GradientTransformation, params: Any) -> Explanation:
    """For each leaf: the codec of each slot, its split, the kernel of its step; or why it has none.

    Also tries one step on a few numbers and warns where the updates of a split optimizer are
    changed after it (by a later `scale`, `schedule_free`, `lookahead`, `reduce_on_plateau` around
    it), which would silently leave its corrections behind.

    Args:
      tx: any optax transformation.
      params: the weights as they are stored, or their `jax.eval_shape`.

    Returns:
      An `Explanation`; print it.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> print(lowmem.explain(lowmem.flash_lion(1e-4), params))
      w  mu          softsign-int8     groups of 32, stochastic rounding
      w  correction  bits-24           24-bit master weights
      step by xla for 1 of 1 leaves: the default backend is cpu, and kernels are for NVIDIA GPUs
    """
    _, found = scope.dry_run(tx, params)
    decisions = [d for d in found if d.slot != "step"]
    split = any(d.slot in ("correction", FIELD) and d.form for d in decisions)
    warnings = _stale_corrections(tx, params) if split else ()
    steps = tuple(d for d in found if d.slot == "step")
    return Explanation(tuple(decisions), steps, tuple(warnings))


def _stale_corrections(tx: optax.GradientTransformation, params: Any) -> list[str]:
    """Warnings for leaves whose final update is not what their split emitted."""
    rng = np.random.default_rng(0)

    def small(leaf: Any) -> jax.Array:
        shape = tuple(min(side, _PROBE_SIDE) for side in leaf.shape)
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    probe = jax.tree.map(small, params)
    dtypes = {path: leaf.dtype for path, leaf in trees.named_leaves(params)}
    try:
        weights, state = init(tx, probe, lambda path, leaf: dtypes[path])
        fast = weights.fast if isinstance(weights, optax.LookaheadParams) else weights
        grads = jax.tree.map(lambda w: jnp.full(w.shape, 0.5, jnp.float32), fast)
        with scope.emitting() as emitted:
            # jit may trace branches (MultiSteps, cond) whose values never leave it: run op by op
            with jax.disable_jit():
                final, _ = optax.with_extra_args_support(tx).update(
                    grads, state, weights, value=jnp.float32(1), grad=grads, value_fn=None
                )
    except Exception as error:  # a probe must not take `explain` down with it
        return [f"could not try a step to look for stale corrections: {error}"]
    changed = [
        path
        for path, update in trees.named_leaves(final)
        if path in emitted and bool(jnp.any(update != 0)) and bool(jnp.any(update != emitted[path]))
    ]
    if not changed:
        return []
    return [
        f"the updates of {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''} are changed "
        "after the split of their master weights, whose corrections then belong to other weights. "
        "Put what changes them inside: split_master_weights(wrapper(flash_adamw(..., "
        "storage=Storage(master_weight_bits=None))))."
    ]
