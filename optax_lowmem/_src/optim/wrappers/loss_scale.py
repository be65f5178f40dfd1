"""Fixed loss scale that skips single tensors instead of steps (Wortsman et al., appendix G)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import array_metadata, numerics, trees
from optax_lowmem._src.arrays.hyperparameters import check_range, is_zero
from optax_lowmem._src.arrays.varying import mean_of_leaf


@dataclasses.dataclass(frozen=True, eq=False)
class _Unscaler:
    inner: optax.GradientTransformationExtraArgs
    scale: float

    def update(
        self, updates: Any, state: optax.OptState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        leaves, treedef = jax.tree.flatten(updates)
        finite = [mean_of_leaf(jnp.isfinite(g).astype(jnp.float32)) == 1 for g in leaves]
        # gradients that overflowed become 0, so that they do not affect a norm over the tree
        gradients = [
            jnp.where(ok, numerics.widen_float(g) * (1 / self.scale), 0)
            for g, ok in zip(leaves, finite, strict=True)
        ]
        steps, after = self.inner.update(
            jax.tree.unflatten(treedef, gradients), state, params, **extra
        )
        after_def: Any = jax.tree.structure(after)
        selected = [
            jnp.where(ok, step, jnp.zeros_like(step))
            for ok, step in zip(finite, jax.tree.leaves(steps), strict=True)
        ]
        marks = jax.tree.leaves(self._finite_per_leaf(after, array_metadata.like(updates, finite)))
        rows = zip(marks, jax.tree.leaves(after), after_def.flatten_up_to(state), strict=True)
        kept = [new if ok is True else jnp.where(ok, new, old) for ok, new, old in rows]
        kept = trees.keep_dtypes(state, after_def.unflatten(kept), updates)
        return jax.tree.unflatten(jax.tree.structure(steps), selected), kept

    def init(self, params: optax.Params) -> optax.OptState:
        state = self.inner.init(params)
        if next(trees.states_with(state, "accumulated", trees.is_ours), None) is not None:
            raise ValueError(
                "accumulate_gradients is inside per_tensor_loss_scale, where a skipped tensor "
                "would keep its sum while the micro-batches are still counted: put it outside, "
                "accumulate_gradients(per_tensor_loss_scale(tx, scale), ...)."
            )
        self._finite_per_leaf(state, params)
        return state

    def _finite_per_leaf(self, state: optax.OptState, finite: object) -> object:
        """Return `finite` of each state leaf's tensor, or True for leaves that have no tensor."""
        try:
            return optax.tree.map_params(
                lambda params: jax.eval_shape(self.inner.init, params),
                # nodes with metadata are leaves here, since their names may differ in the state
                lambda node, ok: [jax.tree.leaves(ok)[0] for _ in jax.tree.leaves(node)],
                state,
                finite,
                transform_non_params=lambda _: True,
                is_leaf=lambda node: (
                    isinstance(node, optax.MaskedNode) or array_metadata.has_metadata(node)
                ),
            )
        except (ValueError, IndexError) as error:
            raise ValueError(
                "per_tensor_loss_scale: the slots of this optimizer do not have one "
                "array per tensor, so single tensors cannot be skipped. Use "
                "optax.apply_if_finite, which skips whole steps, or another optimizer."
            ) from error


def per_tensor_loss_scale(
    inner: optax.GradientTransformation, scale: float
) -> optax.GradientTransformationExtraArgs:
    r"""Divide gradients by a fixed loss scale and skip each tensor whose gradient overflowed.

    A tensor with an Inf or NaN in its gradient keeps its weight, moments and correction in that
    step; the others are updated, and the scale never changes (Wortsman et al., appendix G). With a
    global, adaptive scale, one layer's Inf skips the whole step, and the scale is too low for
    thousands of steps.

    Args:
      inner: the whole optimizer. Step counters (for debiasing and schedules) always advance.
      scale: the factor by which the loss was multiplied, a power of two.

    Returns:
      An optax transformation with the state of `inner`.

    Raises:
      ValueError: for a scale that is not positive; in `init`, for an optimizer whose slots do not
        have one array per tensor (optax's sm3 and lbfgs), and for accumulate_gradients inside;
        inside a `shard_map` with `check_vma=False`.

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
    if is_zero(scale):
        raise ValueError("scale must be > 0: it is the factor by which the loss was multiplied")
    work = _Unscaler(trees.wrapped(inner), scale)
    return optax.GradientTransformationExtraArgs(work.init, work.update)
