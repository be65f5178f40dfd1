"""The XLA path of the step, in the form that compiles best for the platform."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from optax_lowmem._src.core import explicit
from optax_lowmem._src.step import on_mesh, packed, reference
from optax_lowmem._src.step.batch import LeafBatch, Stepped
from optax_lowmem._src.step.plan import LeafState
from optax_lowmem._src.step.rule import UpdateRule
from optax_lowmem._src.step.scopes import scope

# traced once per shape and plan: tracing it per leaf would dominate the tracing time
plain = jax.jit(reference.fused_update, static_argnames=("rule", "plan", "two_passes"))


def step(rule: UpdateRule, batch: LeafBatch) -> list[Stepped]:
    """Step each parameter; on Explicit axes the results keep its sharding."""
    # without the barrier XLA inlines these constants, and the steps of equal leaves differ
    numbers = jax.lax.optimization_barrier(list(map(jnp.uint32, batch.numbers)))
    return [_step(rule, batch, i, number) for i, number in enumerate(numbers)]


def _step(rule: UpdateRule, batch: LeafBatch, i: int, number: jax.Array) -> Stepped:
    """Step one parameter.

    Args:
      rule: the optimizer's arithmetic.
      batch: the parameters.
      i: the index of the parameter.
      number: `batch.numbers[i]`, as an array.
    """
    plan, arrays = batch.plans[i], (batch.gradients[i], batch.weights[i], batch.states[i])
    like, results = jax.tree.flatten(on_mesh.result_like(*arrays))

    def step(
        g: jax.Array,
        p: jax.Array | None,
        state: LeafState,
        h: Mapping[str, jax.Array],
        keys: jax.Array,
        number: jax.Array,
    ) -> list[jax.Array]:
        arguments, platform = (rule, plan.nameless, g, p, state, h), jax.default_backend()
        if packed.supported(plan, platform) is None:
            return jax.tree.leaves(packed.fused_update_among(*arguments, keys, number))
        two_passes = platform == "gpu" and plan.grouped
        return jax.tree.leaves(plain(*arguments, keys[batch.numbers[i]], two_passes=two_passes))

    shardings = list(map(explicit.sharding_of, like))
    with scope([plan.path], "xla"):
        result = explicit.left_to_xla(step, shardings, *arrays, batch.h(i), batch.keys, number)
    return jax.tree.unflatten(results, result)
