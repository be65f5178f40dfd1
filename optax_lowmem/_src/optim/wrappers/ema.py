"""Moving average of the master weights at 3 bytes per parameter, without stalling."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.arrays import random, trees
from optax_lowmem._src.arrays.codecs import BitSplit
from optax_lowmem._src.arrays.compiled import compiled, each
from optax_lowmem._src.arrays.hyperparameters import check_range, complement
from optax_lowmem._src.arrays.typing import PyTree, Scalar, Structure, Tree
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.masters import (
    join_leaves,
    join_master,
    join_masters,
    kept_weights,
)
from optax_lowmem._src.optim.step.storage import check_bits


class MasterEmaState(NamedTuple):
    """The average as bf16 and a correction, and the state of the optimizer."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    ema: PyTree  # bf16, the parameters' shapes
    ema_correction: PyTree  # int8 or int16
    inner_state: optax.OptState


@dataclasses.dataclass(frozen=True, eq=False)
class _Tracker:
    inner: optax.GradientTransformationExtraArgs
    decay: Scalar
    split: BitSplit
    seed: int

    def init(self, params: optax.Params) -> MasterEmaState:
        trees.check_params(params)
        inner = self.inner.init(params)
        weights = trees.with_values(params)
        ema, correction = self._trees(params, _split(self.split, *kept_weights(weights, inner)))
        seed = context.provided_seed(self.seed)
        return MasterEmaState(jnp.zeros((), jnp.int32), seed, ema, correction, inner)

    def update(
        self, updates: PyTree, state: MasterEmaState, params: PyTree = None, **extra: Any
    ) -> tuple[optax.Updates, MasterEmaState]:
        if params is None:
            raise ValueError(trees.NO_PARAMS_MSG)
        trees.check_state(state, MasterEmaState)
        trees.check_state_tree(state.ema, params)
        updates, inner = self.inner.update(updates, state.inner_state, params, **extra)
        new, count = optax.apply_updates(params, updates), optax.safe_increment(state.count)
        rows = zip(
            [random.path_hash(path) for path, _ in trees.named_leaves(params)],
            jax.tree.leaves(state.ema), jax.tree.leaves(state.ema_correction),
            *kept_weights(new, inner), strict=True,
        )  # fmt: skip
        averages = each(_averaged, list(rows), self.split, self.decay, state.seed, count)
        average, correction = self._trees(params, averages)
        return updates, MasterEmaState(count, state.seed, average, correction, inner)

    def _trees(self, params: Tree, pairs: list[tuple[jax.Array, jax.Array]]) -> tuple[Tree, Tree]:
        treedef: Structure = jax.tree.structure(params)
        ema, correction = zip(*pairs, strict=True) if pairs else ((), ())
        return treedef.unflatten(ema), treedef.unflatten(correction)


@compiled
def _split(
    split: BitSplit, weights: list[jax.Array], corrections: list[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    return [_split_one(split, w) for w in join_leaves(weights, corrections)]


def _split_one(split: BitSplit, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    ema = split.round(w, jnp.bfloat16)
    return ema, split.correction(w, ema)


def _averaged(
    path_hash: np.uint32,
    ema: jax.Array,
    kept: jax.Array,
    weight: jax.Array,
    correction: jax.Array,
    split: BitSplit,
    decay: Scalar,
    seed: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return a leaf's average after one step; at 24 bits it is rounded stochastically."""
    old = split.join(ema, kept)
    new = old + complement("decay", decay) * (join_master(weight, correction) - old)
    if split.bits == 24:
        new = random.round_bits(new, random.key_of_hash(seed, count, path_hash), 8)
    return _split_one(split, new)


def track_master_ema(
    inner: optax.GradientTransformation, decay: float | jax.Array, *, bits: int = 24, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Track the moving average e = decay e + (1 - decay) w of the master weights.

    In bf16 such an average stalls once (1 - decay) |w - e| is below 2^-9 |e|; at 24 bits with
    stochastic rounding its expectation moves at any distance.

    Numerics: stochastic rounding to 24 bits adds to each step an error of mean 0 and a standard
    deviation of at most 2^-16 M, where M is the largest |e| so far. Errors of earlier steps decay
    with the average, so the standard deviation of e is at most 2^-16 M / sqrt(1 - decay^2): 1.1e-4
    M at decay = 0.99, 3.4e-4 M at 0.999. The sum e + (1 - decay) (w - e) is rounded to f32 before,
    which adds at most 2^-24 M / (1 - decay); `bits=32` has this error only.

    Args:
      inner: the whole optimizer, including its split of master weights.
      decay: decay rate, in [0, 1).
      bits: 24 (3 bytes per parameter) or 32 (4 bytes).
      seed: seed of the stochastic rounding.

    Returns:
      An optax transformation with the same updates; `ema_params(state)` returns the average.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.track_master_ema(lowmem.flash_adamw(1e-3), 0.999)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((8, 8))})
      >>> float(lowmem.ema_params(state)["w"][0, 0])
      1.0
    """
    check_range("decay", decay, 0.0, 1.0)
    check_bits("bits", bits)
    work = _Tracker(trees.wrapped(inner), decay, BitSplit(bits), seed)
    return optax.GradientTransformationExtraArgs(work.init, work.update)


def ema_params(state: optax.OptState) -> optax.Params:
    """Return the average of the master weights (f32) from an optimizer state with any wrappers.

    Args:
      state: state of an optimizer that contains `track_master_ema`.

    Raises:
      ValueError: if the state has no average, or more than one.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.track_master_ema(optax.sgd(0.1), 0.999)
      >>> float(lowmem.ema_params(tx.init({"w": jnp.ones(3)}))["w"][0])
      1.0
    """
    result = list(trees.states_with(state, "ema_correction", trees.is_ours))
    if len(result) != 1:
        raise ValueError(
            f"the state has {len(result)} averages of master weights, expected one: wrap the "
            "optimizer in track_master_ema once"
        )
    return join_masters(result[0].ema, result[0].ema_correction)
