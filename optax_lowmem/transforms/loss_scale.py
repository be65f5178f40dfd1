"""A fixed loss scale that skips tensors, not steps (Wortsman et al., appendix G)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._core import numerics, trees
from optax_lowmem._core.hyperparameters import check_range
from optax_lowmem._core.reductions import mean_of_leaf


def _is_finite(g: jax.Array) -> jax.Array:
    return mean_of_leaf(jnp.isfinite(g).astype(jnp.float32)) == 1


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


@dataclasses.dataclass(frozen=True, eq=False)
class _Unscaler:
    inner: optax.GradientTransformationExtraArgs
    scale: float

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        finite = jax.tree.map(_is_finite, updates)

        def unscaled(g: jax.Array, ok: jax.Array) -> jax.Array:
            # 0, so that a norm over the tree is one of the others
            return jnp.where(ok, numerics.widen_float(g) * (1 / self.scale), 0)

        gradients = jax.tree.map(unscaled, updates, finite)
        new, after = self.inner.update(gradients, state, params, **extra)
        new = jax.tree.map(lambda u, ok: jnp.where(ok, u, jnp.zeros_like(u)), new, finite)
        kept = jax.tree.map(
            lambda ok, a, b: a if ok is True else jnp.where(ok, a, b),
            self._marks(after, finite),
            after,
            state,
        )
        return new, trees.keep_dtypes(state, kept, updates)

    def init(self, params: Any) -> Any:
        state = self.inner.init(params)
        if next(trees.states_with(state, "accumulated"), None) is not None:
            raise ValueError(
                "gradients are accumulated inside per_tensor_loss_scale, where a tensor that is "
                "skipped keeps its sum and not its place in the count: put accumulate_gradients "
                "around it, accumulate_gradients(per_tensor_loss_scale(tx, scale), ...)."
            )
        self._marks(state, params)
        return state

    def _marks(self, state: Any, finite: Any) -> Any:
        """For each leaf of the state what `finite` has for its tensor, True where it is of none."""
        try:
            return optax.tree.map_params(
                self.inner,
                lambda leaf, ok: leaf if _is_masked(leaf) else ok,
                state,
                finite,
                transform_non_params=lambda _: True,
                is_leaf=_is_masked,
            )
        except (ValueError, IndexError) as error:
            raise ValueError(
                "per_tensor_loss_scale: the state of this optimizer is not one "
                "array a tensor, so that no tensor can be skipped alone. Use "
                "optax.apply_if_finite, which skips whole steps, or another optimizer."
            ) from error


def per_tensor_loss_scale(
    inner: optax.GradientTransformation, scale: float
) -> optax.GradientTransformationExtraArgs:
    r"""Divides gradients by a fixed loss scale and skips each tensor whose gradient overflowed.

    A tensor with an Inf or NaN in its gradient keeps its weight, its moments and its correction in
    that step; the others take theirs, and the scale never changes (Wortsman et al., appendix G).
    With a global, adaptive scale one layer's Inf skips the step of all, and the scale is too low
    for thousands.

    Args:
      inner: the whole optimizer. Counters (of steps, for bias and schedules) go on for all.
      scale: what the loss was multiplied by, a power of two.

    Returns:
      An optax transformation with the state of `inner`.

    Raises:
      ValueError: for a scale that is not positive; in `init`, for an optimizer whose state is not
        one array a tensor (optax's sm3 and lbfgs), and for accumulate_gradients inside; inside a
        `shard_map` with `check_vma=False`.

    Memory: none.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.per_tensor_loss_scale(lowmem.flash_adamw(1e-3), 2.0**16)
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3)}
      >>> grads = {"a": jnp.full(3, jnp.inf), "b": jnp.full(3, 2.0**16)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> bool((updates["a"] == 0).all()), bool((updates["b"] != 0).all())
      (True, True)
    """
    check_range("scale", scale, 0.0)
    if isinstance(scale, int | float) and scale == 0:
        raise ValueError("scale must be > 0: it is what the loss was multiplied by")
    work = _Unscaler(trees.wrapped(inner), scale)
    return optax.GradientTransformationExtraArgs(work.init, work.update)
