"""`explain`: how each leaf is stored and stepped, and warnings about misused wrappers."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.sharding import named_sharding
from optax_lowmem._src.arrays.shards import Shards, cut_reason, divides
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.storage import unmatched_patterns
from optax_lowmem._src.optim.wrappers.stale_corrections import rounded_distances, stale_corrections

_NO_SPLIT = "none: no optimizer splits this leaf, so steps under half an ulp of a weight are lost"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How an optimizer stores and steps a tree of parameters.

    `decisions` are one for each slot of each leaf, `steps` the implementation of each leaf's step
    on this machine, and `warnings` misuses, each with advice.
    """

    decisions: tuple[context.Decision, ...]
    steps: tuple[context.Decision, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Return slots by groups of leaves, a line for each implementation, then the warnings."""
        if not self.decisions:
            return "no leaf has low-memory state"
        lines: list[str] = []
        by_path: dict[str, list[str]] = collections.defaultdict(list)
        for d in self.decisions:
            by_path[d.path].append(f"  {d.slot:<10}  {d.form or '-':<16}  {d.reason}")
        merged: dict[tuple[str, ...], list[str]] = {}  # leaves with equal slots
        for path, rows in by_path.items():
            merged.setdefault(tuple(rows), []).append(path)
        for slots, paths in merged.items():
            lines += [trees.some_of(paths), *slots]
        ways = collections.Counter((d.form, d.reason) for d in self.steps)
        lines += [f"{form} updates {n} of {len(self.steps)} leaves: {reason}"
                  for (form, reason), n in ways.items()]  # fmt: skip
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


def explain(tx: optax.GradientTransformation, params: optax.Params) -> Explanation:
    """Explain each leaf's codecs, split and kernel, or why it has none.

    For parameters sharded over a mesh, it reports the leaves with groups that span two devices,
    whose moments are gathered in each step.

    If a transformation around an optimizer that splits or rounds 16-bit weights may change its
    updates, one step is tried on small leaves. A warning reports updates that change after the
    split (by a later `scale`, `schedule_free`, `lookahead` or `reduce_on_plateau`): this would
    silently make the corrections stale, or round stochastically rounded weights again, to nearest.

    Args:
      tx: any optax transformation.
      params: the stored weights, or their `jax.eval_shape`.

    Returns:
      An `Explanation`; print it.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> print(lowmem.explain(lowmem.flash_lion(1e-4), params))
      w
        mu          softsign-int8     groups of 32, stochastic rounding
        correction  bits-24           24-bit master weights, stochastic rounding
      xla updates 1 of 1 leaves: the default backend is cpu, and kernels are for GPUs and TPUs
    """
    state, result = context.dry_run(tx, params)
    decisions = [d for d in result if d.slot != "step"]
    warnings = unmatched_patterns((pattern for d in result for pattern in d.patterns), params)
    changes = stale_corrections(tx, params, state, decisions)
    warnings += [*changes.errors, *changes.warnings]
    warnings += rounded_distances(state)
    settled = {d.path for d in decisions if d.slot == "correction"}
    decisions += [
        context.Decision(path, "correction", None, _NO_SPLIT)
        for path, leaf in trees.named_leaves(params)
        if path not in settled and getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16)
    ]
    cut = _cut_groups(params, decisions)
    steps = []
    for decision in result:
        if decision.choose is None:
            continue
        form, reason = decision.choose()
        reasons = [reason]
        if form != "xla" and jax.device_count() > 1:
            reasons.append("on several devices as lowmem.implementations(compiled) says")
        reason = "; ".join([*reasons, *cut.get(decision.path, ())])
        steps.append(dataclasses.replace(decision, form=form, reason=reason, choose=None))
    return Explanation(tuple(decisions), tuple(steps), tuple(warnings))


def _cut_groups(params: optax.Params, decisions: list[context.Decision]) -> dict[str, list[str]]:
    """Describe how shards cut through groups, by leaf, without duplicates."""
    leaves = dict(trees.named_leaves(params))
    results: dict[str, list[str]] = collections.defaultdict(list)
    for decision in decisions:
        leaf, size = leaves.get(decision.path), decision.group_size
        sharding = getattr(leaf, "sharding", None)
        if leaf is None or size is None or not isinstance(sharding, NamedSharding):
            continue
        shape = tuple(leaf.shape)
        sharding = named_sharding(decision.path, shape, sharding, sharding.mesh)
        parts = Shards.of(sharding, len(shape)).parts[-1]
        reason = cut_reason(shape[-1], parts, size)
        several = decision.codec.codes_per_byte if decision.codec is not None else 1
        if reason and not divides(parts, shape[-1], several):
            reason += f", and through bytes of {several} codes: these are replicated on that axis"
        if reason is not None and reason not in results[decision.path]:
            results[decision.path].append(reason)
    return results
