"""Gradient accumulation that does not cost four bytes a parameter."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lowmem._core import numerics, random, scope, trees, varying
from optax_lowmem._core.hyperparameters import increment
from optax_lowmem.transforms.engine import Engine, Optimizer


class AccumulationState(NamedTuple):
    """The mean so far of a batch's gradients, and the inner state."""

    micro_step: jax.Array  # shape=(), dtype=jnp.int32; 0 ... every - 1
    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32; micro-batches seen
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    accumulated: Any  # bf16, of the parameters' shapes; None where the moments take the gradients
    inner_state: Any


def accumulate_gradients(
    tx: optax.GradientTransformation, every: int, into: str, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Steps once every `every` micro-batches, on the mean of their gradients.

    Into `bfloat16`: the mean is kept in bf16 with stochastic rounding, a += g / k, so that small
    gradients are not lost; 2 bytes a parameter (`optax.MultiSteps`: 4 for f32 gradients). Any `tx`.

    Into `moments`: no buffer at all; every micro-batch goes straight into the optimizer's moments
    and weights move with the last one. Exact up to the codecs for `flash_sgd` without Nesterov
    (m = mu m + sum g_i / k). For `flash_adam` and `flash_adamw` the second moment takes the sum of
    squares, (1-b2) sum (g_i / k)^2, instead of the square of the sum: Adam Accumulation (Zhang et
    al., 2023), the same in expectation where noise dominates the gradient, and steps up to sqrt(k)
    times larger where it does not.

    Args:
      tx: the optimizer; for `moments` one of `flash_sgd`, `flash_adam`, `flash_adamw` themselves.
      every: micro-batches in a step.
      into: `bfloat16` or `moments`; there is no default, since one rounds and one changes Adam.
      seed: of the stochastic rounding.

    Returns:
      An optax transformation whose updates are zero between steps.

    Raises:
      ValueError: for an unknown choice, or a rule that needs the whole gradient at once.

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.accumulate_gradients(lowmem.flash_adamw(3e-4), every=8, into="bfloat16")
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is a number of micro-batches, at least 1, got {every!r}")
    if into == "bfloat16":
        work = _Buffered(trees.wrapped(tx), every, seed)
        return optax.GradientTransformationExtraArgs(work.init, work.update)
    if into != "moments":
        raise ValueError(f"into must be 'bfloat16' or 'moments', got {into!r}")
    if not isinstance(tx, Optimizer) or not tx.engine.weights:
        raise ValueError(
            "into='moments' takes flash_sgd, flash_adam or flash_adamw itself: what stands around "
            "it (a chain, a mask), or follows a bare scale_by_*, would see micro-batches as steps. "
            "Use into='bfloat16'."
        )
    direct = _Direct(tx.engine, every)
    return optax.GradientTransformationExtraArgs(direct.init, direct.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffered:
    inner: optax.GradientTransformationExtraArgs
    every: int
    seed: int

    def init(self, params: Any) -> AccumulationState:
        for path, leaf in trees.named_leaves(params):
            trees.check_param(path, leaf)
        seed = scope.provided_seed(self.seed)
        buffer = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.bfloat16), params)
        return AccumulationState(_zero(), _zero(), seed, buffer, self.inner.init(params))

    def update(
        self, updates: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        trees.check_state(state, AccumulationState)
        gradients = trees.match("gradient", updates, state.accumulated)
        rows = zip(gradients, jax.tree.leaves(state.accumulated), strict=True)
        share = jnp.float32(1 / self.every)
        treedef = jax.tree.structure(updates)
        means = jax.tree.unflatten(
            treedef, [numerics.widen(a) + share * numerics.widen(g) for g, a in rows]
        )

        def step() -> tuple[Any, Any, Any]:
            new, inner = self.inner.update(means, state.inner_state, params, **extra)
            inner = trees.keep_dtypes(state.inner_state, inner)
            return new, inner, jax.tree.map(jnp.zeros_like, state.accumulated)

        def wait() -> tuple[Any, Any, Any]:
            shapes = jax.eval_shape(step)[0]
            nothing = jax.tree.map(
                lambda s: varying.over(jnp.zeros(s.shape, s.dtype), varying.axes_of(s)), shapes
            )
            return nothing, state.inner_state, self._rounded(means, state)

        last = state.micro_step == self.every - 1
        new, inner, buffer = lax.cond(last, step, wait)
        micro_step = jnp.where(last, 0, state.micro_step + 1)
        count = increment(state.count)
        return new, AccumulationState(micro_step, count, state.seed, buffer, inner)

    def _rounded(self, means: Any, state: AccumulationState) -> Any:
        leaves = [
            round_stochastically(mean, random.leaf_key(state.seed, state.count, path))
            for path, mean in trees.named_leaves(means)
        ]
        return jax.tree.unflatten(jax.tree.structure(means), leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class _Direct:
    engine: Engine
    every: int

    def init(self, params: Any) -> AccumulationState:
        zero = _zero()
        self.engine.rule.accumulating(self.engine.hyperparameters(zero), zero == 0, self.every)
        inner = self.engine.init(params)
        return AccumulationState(_zero(), _zero(), jnp.array(inner.seed), None, inner)

    def update(
        self, updates: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        del extra
        trees.check_state(state, AccumulationState)
        first, last = state.micro_step == 0, state.micro_step == self.every - 1
        h = self.engine.rule.accumulating(
            self.engine.hyperparameters(state.inner_state.count), first, self.every
        )
        for name in ("lr", "decay"):
            if name in h:
                h[name] = jnp.where(last, h[name], 0)
        count = increment(state.count)
        new, inner = self.engine.step(updates, state.inner_state, params, h, count)
        steps = jnp.where(last, state.inner_state.count + 1, state.inner_state.count)
        micro_step = jnp.where(last, 0, state.micro_step + 1)
        inner = inner._replace(count=steps)
        return new, AccumulationState(micro_step, count, state.seed, None, inner)


def _zero() -> jax.Array:
    """Another array each time: one in two places of a state could not be donated."""
    return jnp.zeros((), jnp.int32)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """bf16 of f32 values, up or down with the probabilities that keep the mean."""
    bits = numerics.to_bits(random.round_bits(x, key, 16)) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
