"""`explain`: what happens to each leaf, and what is wrong with how an optimizer is put together."""

import collections
import dataclasses

import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.core.placement import placement
from optax_lowmem._src.core.policy import unmatched_patterns
from optax_lowmem._src.noise.states import FIELD
from optax_lowmem._src.wrappers import stale

_NO_SPLIT = "none: no optimizer here splits it, so steps under half an ulp of the weight are lost"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Storage of a tree of parameters under an optimizer.

    Attributes:
      decisions: one for each slot of each leaf.
      steps: for each leaf, the implementation of its step on this machine.
      warnings: misuses found; each says what to do.
    """

    decisions: tuple[scope.Decision, ...]
    steps: tuple[scope.Decision, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Leaves with equal slots together, one line for each way of a step, then the warnings."""
        if not self.decisions:
            return "nothing here keeps low-memory state"
        lines: list[str] = []
        for slots, paths in self._merged().items():
            lines += [trees.some_of(paths)]
            lines += [f"  {slot:<10}  {form or '-':<16}  {reason}" for slot, form, reason in slots]
        ways = collections.Counter((d.form, d.reason) for d in self.steps)
        lines += [f"step by {form} for {n} of {len(self.steps)} leaves: {reason}"
                  for (form, reason), n in ways.items()]  # fmt: skip
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])

    def _merged(self) -> dict[tuple[tuple[str, str | None, str], ...], list[str]]:
        """Return the paths of the leaves by their slots: name, form and reason of each."""
        slots: dict[str, list[tuple[str, str | None, str]]] = collections.defaultdict(list)
        for d in self.decisions:
            slots[d.path].append((d.slot, d.form, d.reason))
        merged: dict[tuple[tuple[str, str | None, str], ...], list[str]] = {}
        for path, own in slots.items():
            merged.setdefault(tuple(own), []).append(path)
        return merged


def explain(tx: optax.GradientTransformation, params: optax.Params) -> Explanation:
    """For each leaf: the codec of each slot, its split, the kernel of its step; or why it has none.

    Of parameters that lie on a mesh it says whose groups lie on two devices, so that their moments
    are gathered in each step.

    Also tries one step on a few numbers, where something around a split optimizer may change its
    updates, and warns where they are changed (by a later `scale`, `schedule_free`, `lookahead`,
    `reduce_on_plateau` around it), which would silently leave its corrections behind.

    Args:
      tx: any optax transformation.
      params: the weights as they are stored, or their `jax.eval_shape`.

    Returns:
      An `Explanation`; print it.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> print(lowmem.explain(lowmem.flash_lion(1e-4), params))
      w
        mu          softsign-int8     groups of 32, stochastic rounding
        correction  bits-24           24-bit master weights, stochastic rounding
      step by xla for 1 of 1 leaves: the default backend is cpu, and kernels are for NVIDIA GPUs
    """
    with scope.noting_policies() as policies:
        state, found = scope.dry_run(tx, params)
    decisions = [d for d in found if d.slot != "step"]
    split = any(d.slot in ("correction", FIELD) and d.form for d in decisions)
    warnings = unmatched_patterns(policies, params)
    warnings += stale.found(tx, params) if split and stale.suspected(state) else []
    settled = {d.path for d in decisions if d.slot == "correction"}
    decisions += [
        scope.Decision(path, "correction", None, _NO_SPLIT)
        for path, leaf in trees.named_leaves(params)
        if path not in settled and getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16)
    ]
    cut = _cut_groups(params, decisions)
    steps = tuple(
        dataclasses.replace(d, reason="; ".join([d.reason, *cut.get(d.path, ())]))
        for d in found
        if d.slot == "step"
    )
    return Explanation(tuple(decisions), steps, tuple(warnings))


def _cut_groups(params: optax.Params, decisions: list[scope.Decision]) -> dict[str, list[str]]:
    """Describe how shards cut through groups, by leaf; once for slots of one group size."""
    leaves = dict(trees.named_leaves(params))
    found: dict[str, list[str]] = collections.defaultdict(list)
    for decision in decisions:
        leaf, size = leaves.get(decision.path), decision.group_size
        sharding = getattr(leaf, "sharding", None)
        if leaf is None or size is None or not isinstance(sharding, NamedSharding):
            continue
        place = placement(decision.path, tuple(leaf.shape), sharding, sharding.mesh)
        reason = place.cut_groups(tuple(leaf.shape), size)
        several = decision.codec.codes_per_byte if decision.codec is not None else 1
        if reason and place.local(tuple(leaf.shape))[-1] % several:
            reason += f", and bytes of {several} codes too: those are whole along that axis"
        if reason is not None and reason not in found[decision.path]:
            found[decision.path].append(reason)
    return found
