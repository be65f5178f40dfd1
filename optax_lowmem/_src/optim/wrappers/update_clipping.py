"""AdaFactor's update clipping around any Adam-like optimizer (StableAdamW's Algorithm 2)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import numerics, trees
from optax_lowmem._src.arrays.hyperparameters import (
    Formula,
    as_f32,
    check_decay,
    check_range,
    decay_at,
)
from optax_lowmem._src.arrays.typing import PyTree, Scalar, ScalarOrSchedule, Tree
from optax_lowmem._src.optim.clipping import check_threshold, clipped_share, rms_of_ratio
from optax_lowmem._src.optim.step.masters import splits_masters
from optax_lowmem._src.optim.wrappers.slots import facts, map_slots


class UpdateClippingState(NamedTuple):
    """State of `update_clipping`."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    inner_state: optax.OptState


def _second_moments(state: optax.OptState) -> dict[str, jax.Array]:
    """Return {leaf path: second moment} from the only slot of a state that is a second moment."""
    results: list[optax.Params] = []
    of_library: list[str] = []

    def visit(node: object, field: str, value: Tree) -> Tree:
        known = facts(node, field)
        if known != facts(node, field, ours=True):
            of_library.append(field)
        if known.moment == 2 and not known.running_maximum:
            results.append(value)
        return value

    map_slots(visit, state)
    if len(results) != 1:
        if of_library:  # codes, or means of many elements
            why = (
                "this library's optimizers store it in another form. Clip a direction by "
                "optax.clip_by_block_rms(1.0) after it"
            )
        else:
            why = f"this state has {len(results)}. Wrap such an optimizer"
        raise ValueError(
            "update_clipping needs an optimizer with one second moment (optax.adamw, "
            f"scale_by_adam, ...); {why}, or use lowmem.stable_adamw."
        )
    moments = dict(trees.named_leaves(results[0]))
    for path, leaf in moments.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the second moment of '{path}' is stored as {leaf.dtype} codes, which "
                "update_clipping cannot read: put update_clipping inside, "
                "compress_state(update_clipping(...)), or use lowmem.stable_adamw."
            )
    return moments


@dataclasses.dataclass(frozen=True, eq=False)
class _Clipper:
    inner: optax.GradientTransformationExtraArgs
    b2: ScalarOrSchedule
    eps: Scalar
    threshold: Scalar

    def init(self, params: optax.Params) -> UpdateClippingState:
        if splits_masters(self.inner, params):
            raise ValueError(
                "update_clipping around an optimizer that splits master weights makes their "
                "corrections stale: put it inside, split_master_weights(update_clipping(...)), or "
                "use lowmem.stable_adamw."
            )
        inner = self.inner.init(params)
        if jax.tree.leaves(params):
            _second_moments(inner)
        return UpdateClippingState(jnp.zeros((), jnp.int32), inner)

    def update(
        self, updates: PyTree, state: UpdateClippingState, params: PyTree = None, **extra: Any
    ) -> tuple[optax.Updates, UpdateClippingState]:
        trees.check_state(state, UpdateClippingState)
        new, inner = self.inner.update(updates, state.inner_state, params, **extra)
        count = optax.safe_increment(state.count)
        debias = Formula(_debias, (self.b2,))(state.count)["debias"]
        moments = _second_moments(inner)
        eps, threshold = as_f32("eps", self.eps), as_f32("threshold", self.threshold)
        leaves = []
        for (path, update), g in zip(
            trees.named_leaves(new), jax.tree.leaves(updates), strict=True
        ):
            if path in moments:  # others are masked out here
                u = numerics.widen(moments[path]) * debias
                share = clipped_share(rms_of_ratio(numerics.widen(g), u, eps), threshold)
                update = (numerics.widen(update) * share).astype(update.dtype)
            leaves.append(update)
        tree = jax.tree.unflatten(jax.tree.structure(new), leaves)
        return tree, UpdateClippingState(count, inner)


def _debias(b2: ScalarOrSchedule, count: jax.Array) -> dict[str, jax.Array]:
    return {"debias": 1 / decay_at("b2", b2, count).correction}


def update_clipping(
    inner: optax.GradientTransformation,
    *,
    b2: ScalarOrSchedule,
    eps: float | jax.Array,
    threshold: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Divide each tensor's update of an Adam-like optimizer, decay included, by max(1, RMS_t / d).

    .. math::
      \mathrm{RMS}_t = \sqrt{\mathrm{E}[g_t^2 / \max(\hat u_t, \epsilon^2)]}

    where u_t is the debiased second moment after this step's gradient (Wortsman et al., Algorithm 2
    and appendix F.2). `stable_adamw` does the same in one pass over 8-bit state.

    Args:
      inner: the optimizer, including learning rate and weight decay, with a second moment in f32.
        Put 8-bit moments and split master weights around this:
        `split_master_weights(compress_state(update_clipping(optax.adamw(...)), ...))`.
      b2: the optimizer's b2 (number or schedule), for debiasing.
      eps: the optimizer's eps.
      threshold: d, the largest RMS_t that is not clipped.

    Returns:
      An optax transformation.

    Raises:
      ValueError: in `init`, for an optimizer that splits master weights, or whose state has no
        second moment, more than one, or one stored as codes.

    Memory: 4 bytes in total.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> adamw = optax.adamw(1e-3, b2=0.99, eps=1e-6, weight_decay=1e-2)
      >>> tx = lowmem.update_clipping(adamw, b2=0.99, eps=1e-6)
      >>> state = tx.init({"w": jnp.ones(3)})
    """
    check_decay("b2", b2)
    check_range("eps", eps, 0.0)
    check_threshold(threshold)
    work = _Clipper(trees.wrapped(inner), b2, eps, threshold)
    return optax.GradientTransformationExtraArgs(work.init, work.update)
