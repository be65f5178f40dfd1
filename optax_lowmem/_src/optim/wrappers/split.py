"""Split master weights into 16-bit weights and corrections, for any optimizer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import array_metadata, numerics, random, trees
from optax_lowmem._src.arrays.codecs import MasterSplit
from optax_lowmem._src.arrays.compiled import each, unstacked
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step import MASTER, split_update
from optax_lowmem._src.optim.step.masters import adds_noise, join_masters, splits_masters
from optax_lowmem._src.optim.step.plan import choose_split, split_decision
from optax_lowmem._src.optim.step.state import check_order, initial_correction, promoted
from optax_lowmem._src.optim.step.storage import NEAREST_OR_NOT, Storage, check_bits


class SplitState(NamedTuple):
    """Corrections of the 16-bit weights, and the state of the optimizer of the master weights."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    correction: PyTree  # 8 or 16 bits beside 16-bit weights; 0-d beside f32 ones
    inner_state: optax.OptState


@dataclasses.dataclass(frozen=True, eq=False)
class _Splitter:
    inner: optax.GradientTransformationExtraArgs
    storage: Storage

    def init(self, params: optax.Params) -> SplitState:
        """Initialize the inner state, and corrections (from `lowmem.init` if it provides them)."""
        trees.check_params(params)
        if adds_noise(self.inner, params):
            raise ValueError(
                "split_master_weights around gaussws_noise: the noise must be outermost, put the "
                "split inside it, gaussws_noise(split_master_weights(...))."
            )
        corrections = []
        for path, leaf in trees.named_leaves(params):
            dtype = jnp.dtype(leaf.dtype)
            split = choose_split(self.storage, path, dtype)
            context.record(split_decision(self.storage, path, dtype, split))
            none = jnp.zeros((), jnp.int8)
            corrections.append(initial_correction(split, path, leaf) if split else none)
        correction = array_metadata.with_metadata_of(params, corrections)
        if splits_masters(self.inner, params):
            raise ValueError(
                "split_master_weights around an optimizer that splits master weights itself: give "
                "the inner optimizer storage=Storage(master_weight_bits=None)."
            )
        with context.absorbing() as decisions:
            inner = self.inner.init(join_masters(params, correction))
        for decision in decisions:  # those about corrections are made by this wrapper
            if decision.slot != "correction":
                context.record(decision)
        seed = context.provided_seed(self.storage.seed)
        return SplitState(jnp.zeros((), jnp.int32), seed, correction, inner)

    def update(
        self, updates: PyTree, state: SplitState, params: PyTree = None, **extra: Any
    ) -> tuple[optax.Updates, SplitState]:
        """Update the masters; return updates that reach the new 16-bit weights exactly."""
        if params is None:
            raise ValueError(trees.NO_PARAMS_MSG)
        trees.check_state(state, SplitState)
        # optax.lookahead gets gradients of its fast parameters, and updates fast and slow ones
        fast = params.fast if isinstance(params, optax.LookaheadParams) else params
        trees.match("gradient", updates, fast)
        trees.check_state_tree(state.correction, params)
        if fast is params:
            check_order(jax.tree.leaves(updates), params, state.correction)
        masters = join_masters(params, state.correction)
        gradients = trees.widened(updates)
        steps, inner = self.inner.update(gradients, state.inner_state, masters, **extra)
        if any(jnp.ndim(c) for c in jax.tree.leaves(state.correction)):
            steps, params = numerics.forbid_differentiation((steps, params))
        count, named = optax.safe_increment(state.count), trees.named_leaves(params)
        # the engine's keys, so that a fused optimizer draws the same bits
        keys = unstacked(random.leaf_keys(state.seed, count, [path for path, _ in named]))
        # under optax.lookahead gradients have other paths
        dtypes = {path: g.dtype for path, g in trees.named_leaves(updates)}
        leaves = zip(
            named, jax.tree.leaves(steps), jax.tree.leaves(state.correction), keys, strict=True
        )
        rows = [
            (
                self._split_of(path, p, correction), p, step, correction, key,
                self._update_dtype(p.dtype, dtypes.get(path)),
            )
            for (path, p), step, correction, key in leaves
        ]  # fmt: skip
        landed = each(_moved, rows, self.storage.group_size)
        for (path, _), (split, *_), (update, _) in zip(named, rows, landed, strict=True):
            if split is not None:
                context.emit(path, update)
        correction = array_metadata.with_metadata_of(params, [c for _, c in landed])
        updates = jax.tree.unflatten(jax.tree.structure(params), [u for u, _ in landed])
        return updates, SplitState(count, state.seed, correction, inner)

    def _update_dtype(self, dtype: jnp.dtype, of_gradient: jnp.dtype | None) -> jnp.dtype:
        preferred = {"param": dtype, "gradient": of_gradient}.get(self.storage.update_dtype)
        return dtype if preferred == dtype else jnp.dtype(jnp.float32)

    def _split_of(self, path: str, p: jax.Array, correction: jax.Array) -> MasterSplit | None:
        """Return the split of a weight; raise if its correction does not fit."""
        split = choose_split(self.storage, path, p.dtype)
        if p.dtype == jnp.float32 and jnp.ndim(correction) and correction.shape == p.shape:
            raise ValueError(promoted(path, correction.dtype))
        if split is not None and (correction.dtype, correction.shape) != (split.dtype, p.shape):
            raise ValueError(
                f"the correction of '{path}' is {correction.dtype}{list(correction.shape)}, but "
                f"{split.name} stores {split.dtype} for {p.dtype}{list(p.shape)}. The state was "
                "made or restored with other settings: use those, or call init again."
            )
        return split


def _moved(
    split: MasterSplit | None,
    p: jax.Array,
    step: jax.Array,
    correction: jax.Array,
    key: jax.Array,
    update_dtype: jnp.dtype,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the update that moves a weight by `step`, and its new correction."""
    random_bits = None
    if split is not None and split.stochastic:
        random_bits = random.leaf_bits(key, p.shape, group_size, MASTER)
    return split_update(split, p, -numerics.widen(step), correction, update_dtype, random_bits)


def split_master_weights(
    inner: optax.GradientTransformation,
    bits: int = 24,
    *,
    split: str = "bits",
    update_dtype: str = "float32",
    rounding: str = "stochastic",
    seed: int = 0,
    group_size: int = 32,
) -> optax.GradientTransformationExtraArgs:
    """Give an optimizer f32 master weights for 16-bit parameters, at 1 or 2 bytes each.

    `inner` gets f32 parameters and f32 gradients. Applying the returned update gives exactly the
    16-bit rounding of its result, and the rounding error is stored as a correction. Nothing may
    change the update after the split, since this makes the corrections stale.

    Args:
      inner: the whole optimizer, including learning rate, weight decay, schedule_free, lookahead.
      bits: 24 or 32; 32 for optimizers that use differences of weights (`mechanize`, `dog`,
        `dowg`, `lbfgs`), for which `lowmem.init` warns at 24.
      split: `bits`, or `ulp` for FlashOptim's Algorithm 1; fp16 always uses `ulp`.
      update_dtype: `float32`; `gradient` for `optax.apply_if_finite` and similar wrappers; or
        `param` for loops that add updates without a cast. See `Storage`.
      rounding: rounding of 24-bit masters, `stochastic` (unbiased) or `nearest`, which loses steps
        below 2^-17 of a weight.
      seed: seed of the hash for stochastic rounding; `lowmem.init(..., seed=)` overrides it.
      group_size: number of neighbors on the last axis that share a part of the hash; a fused
        optimizer whose `Storage` has the same group size draws the same bits.

    Returns:
      An optax transformation.

    Raises:
      ValueError: for other `bits`, if `params` is missing, or around an optimizer that splits.

    Memory: 1 or 2 bytes of state per parameter; the update uses temporary f32 masters.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.split_master_weights(optax.contrib.muon(0.02))
    """
    check_bits("bits", bits)
    check_choice("rounding", rounding, NEAREST_OR_NOT)
    storage = Storage(
        master_weight_bits=bits, split=split, update_dtype=update_dtype, master_rounding=rounding,
        seed=seed, group_size=group_size,
    )  # fmt: skip
    work = _Splitter(trees.wrapped(inner), storage)
    return optax.GradientTransformationExtraArgs(work.init, work.update)
