"""Adam-mini and Q-Adam-mini: one second moment per block of weights (Q-Adam-mini, section 2)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import BlockStructure
from optax_lowmem._src.arrays.codecs import affine, sqrt
from optax_lowmem._src.arrays.hyperparameters import is_zero
from optax_lowmem._src.arrays.typing import Arrays, ScalarOrSchedule
from optax_lowmem._src.optim.blocks.structure import Structure
from optax_lowmem._src.optim.optimizers.adam import AdamRule, adam_moments, flash_adamw
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import direction, optimizer
from optax_lowmem._src.optim.step.rule import OF_BLOCK, Slot
from optax_lowmem._src.optim.step.storage import Storage, completed

_FLASH_ADAM_MINI = Storage(nu=None)
_Q_ADAM_MINI = Storage(mu=affine(), nu=None, group_size=256)
_Q_ADAMW = Storage(mu=affine(), nu=sqrt(), group_size=256)


@dataclasses.dataclass(frozen=True)
class AdamMiniRule(AdamRule):
    r"""m = b1 m + (1-b1) g, v = b2 v + (1-b2) mean(g^2), mhat / (sqrt(vhat + eps_root) + eps)."""

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("mu", signed=True),
        Slot("nu", signed=False, blockwise=True),
    )

    prepares = "blocks"

    def averaged(self, g: jax.Array, slots: Arrays, h: Arrays) -> jax.Array:
        """Return the new v; `g` is the mean of g^2."""
        return h["b2"] * slots["nu"] + h["one_minus_b2"] * g

    def prepare(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[Arrays, Arrays]:
        """Return 1 / (sqrt(vhat + eps_root) + eps) and the new v; `g` is the mean of g^2."""
        nu = self.averaged(g, slots, h)
        # for an infinite v, NaN (inf / inf) instead of 0, with which the block would silently stop
        one = jnp.where(nu < jnp.inf, jnp.float32(1), nu)
        return {OF_BLOCK: numerics.quotient(one, self.denominator(nu, h))}, {"nu": nu}

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        mu = h["b1"] * slots["mu"] + h["one_minus_b1"] * g
        return mu * h[OF_BLOCK], {"mu": mu}

    def momentum_divisor(self, slots: Arrays, h: Arrays) -> jax.Array:
        return numerics.quotient(jnp.float32(1), h[OF_BLOCK])


@with_common_arguments
def scale_by_adam_mini(
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    blocks: BlockStructure = Structure(),  # noqa: B008 (frozen)
    storage: Storage = Storage.full_precision(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    r"""`optax.scale_by_adam` with one second moment per block: only the direction of `adam_mini`.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad
      v_t = b_2 v_{t-1} + (1-b_2) \mathrm{Average}_{block}(g_t^2), \quad
      u_t = \frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} + \epsilon}

    (Q-Adam-mini, section 2.1.2; Adam-mini), without learning rate, weight decay or master weights:
    add the first two in an `optax.chain`, and wrap the chain in `split_master_weights`. The first
    five arguments, their order and their defaults are those of `optax.scale_by_adam`.

    Args:
      eps: added outside the root, as in Adam-mini's code.
      eps_root: added inside the root, as the paper's epsilon is.
      storage: codecs (f32 moments by default), group size, rounding, policy. `Storage(nu=None)`
        gives the moments of `flash_adam_mini`.

    Returns:
      An optax transformation: `update` returns u_t; multiply it by the learning rate and subtract.
      `nu` in its state has one value per block. Without `params`, `update` infers the blocks from
      the gradients, which lack the metadata of boxed parameters: if yours are boxed, pass `params`.

    Raises:
      ValueError: for a hyperparameter or block axis out of range, or a head count that does not
        divide its axis; inside a `shard_map` if a block may be on several devices.
      TypeError: for a 16-bit hyperparameter, or if `blocks` is not a `Structure`.

    Numerics: v is f32 and debiased. A NaN or infinity makes its whole block NaN, but no other
    tensor.

    Memory: 4 bytes of state per parameter and 4 bytes per block; 1.06 with `Storage(nu=None)`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_adam_mini(), optax.scale_by_learning_rate(1e-3))
      >>> params = {"embed": {"embedding": jnp.ones((64, 256))}}
      >>> tx.init(params)[0].nu["embed"]["embedding"].shape
      (64, 1)

    References:
      Han et al., Q-Adam-mini, 2025; Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More,
      2024, arXiv 2406.16793. Deviations: those of `adam_mini`.
    """
    return direction(
        AdamMiniRule(eps_root_is_zero=is_zero(eps_root)),
        adam_moments(b1, b2, eps, eps_root, nesterov=False),
        completed(storage, _FLASH_ADAM_MINI),
        {"mu": mu_dtype},
        _checked(blocks),
    )


@with_common_arguments
def adam_mini(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    blocks: BlockStructure = Structure(),  # noqa: B008 (frozen)
    storage: Storage = Storage.full_precision(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with one second moment for each block of weights.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad
      v_t = b_2 v_{t-1} + (1-b_2) \mathrm{Average}_{block}(g_t^2), \\
      \theta_t = \theta_{t-1} - \eta_t \left(\frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} +
      \epsilon} + \lambda \theta_{t-1}\right)

    (Q-Adam-mini, section 2.1.2; Adam-mini.) A block is a head of a query or key kernel, an output
    neuron of another kernel, a row of an embedding or output head; `lowmem.blocks.describe` prints
    the blocks of each leaf. The first nine arguments are those of `optax.adamw`.

    Args:
      eps: added outside the root, as in Adam-mini's code.
      eps_root: added inside the root, as the paper's epsilon is.
      storage: codecs (f32 moments by default), width of the master weights, rounding, policy.

    Returns:
      An optax transformation; `nu` in its state has one value per block.

    Raises:
      ValueError: for a hyperparameter or block axis out of range, or a head count that does not
        divide its axis; inside a `shard_map` if a block may be on several devices.

    Numerics: v is f32. A NaN or infinity makes its whole block NaN, but no other tensor.

    Memory: 4 bytes of state beside an f32 weight, and 4 bytes per block. `q_adam_mini` has 1.02
    beside an f32 weight, `flash_adam_mini` 2.06 beside a 2-byte weight.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"mlp": {"up_proj": {"kernel": jnp.ones((64, 128))}}}
      >>> lowmem.adam_mini(1e-3).init(params).nu["mlp"]["up_proj"]["kernel"].shape
      (1, 128)

    References:
      Han et al., Q-Adam-mini, 2025; Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More,
      2024, arXiv 2406.16793. Deviations from Adam-mini's code: see `lowmem.blocks.infer`. The
      debiasing is the same.
    """
    rule = AdamMiniRule(eps_root_is_zero=is_zero(eps_root))
    moments = adam_moments(b1, b2, eps, eps_root, nesterov=False)
    return optimizer(
        rule, moments, learning_rate, completed(storage, _FLASH_ADAM_MINI), b1,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr,
        slot_dtypes={"mu": mu_dtype}, structure=_checked(blocks),
    )  # fmt: skip


def _checked(blocks: BlockStructure) -> BlockStructure:
    if not callable(getattr(blocks, "infer", None)):
        raise TypeError(
            f"blocks must be a lowmem.blocks.Structure, got {blocks!r}: write "
            "blocks=lowmem.blocks.Structure(heads=..., kv_heads=...)"
        )
    return blocks


@with_common_arguments
def q_adam_mini(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    blocks: BlockStructure = Structure(),  # noqa: B008 (frozen)
    storage: Storage = _Q_ADAM_MINI,
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    """`adam_mini` with m as int8 with a zero-point (Q-Adam-mini, Case 2).

    m is quantized in groups of 256 (equation 1, `codecs.affine`) with stochastic rounding; v is
    f32, one value per block.

    Args:
      eps_root: added inside the root, as the paper's epsilon is.
      storage: codecs, group size, rounding, policy. The paper's Case 1, 8-bit v, is
        `Storage(mu=affine(), nu=linear(signed=False), group_size=256)`, where v of a leaf is
        flattened before it is grouped.

    Returns:
      A transformation whose `nu` has one value per block.

    Memory: 1.02 bytes of state per parameter and 4 per block (Table 3: mn + O(1)); 1 more per
    parameter for the correction of a 16-bit weight.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.q_adam_mini(1e-3)
      >>> params = {"embed": {"embedding": jnp.ones((64, 256))}}
      >>> round(lowmem.memory.report(tx, params).state_bytes / 64 / 256, 3)
      1.032

    References:
      Han et al., Q-Adam-mini, 2025. Deviations: the range of `codecs.affine` includes zero and has
      no floor. Rounding is stochastic in every leaf, at no cost in time; the paper's is stochastic
      in embeddings only (section 2.3.2, `rounding="embeddings"`). With rounding to nearest, m of an
      inactive neuron may never decay if its group has active neurons; since its v does decay, its
      weights diverge.
    """
    return adam_mini(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask,
        blocks=blocks, storage=completed(storage, _Q_ADAM_MINI), decouple_lr=decouple_lr,
    )  # fmt: skip


@with_common_arguments
def flash_adam_mini(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    blocks: BlockStructure = Structure(),  # noqa: B008 (frozen)
    storage: Storage = _FLASH_ADAM_MINI,
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    """`adam_mini` with FlashOptim's m and master weights: 4.06 bytes per parameter with its weight.

    m is companded int8 in groups of 32 with stochastic rounding; v is f32, one value per block; a
    16-bit weight has an 8-bit correction. The arguments are those of `q_adam_mini`.

    Returns:
      A transformation whose `nu` has one value per block.

    Memory: 2 (weight) + 1 (correction) + 1.06 (m) bytes, and 4 bytes per block.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adam_mini(1e-3)
      >>> params = {"embed": {"embedding": jnp.ones((64, 256), jnp.bfloat16)}}
      >>> round(lowmem.memory.report(tx, params).bytes_per_param, 2)
      4.08
    """
    return adam_mini(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask,
        blocks=blocks, storage=storage, decouple_lr=decouple_lr,
    )  # fmt: skip


@with_common_arguments
def q_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    storage: Storage = _Q_ADAMW,
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    """8-bit AdamW in groups of 256, the baseline of Q-Adam-mini (Table 1: Q-AdamW).

    `flash_adamw` with m as int8 with a zero-point and sqrt(v) as uint8.

    Returns:
      An optax transformation.

    Memory: 2.03 bytes of state per parameter beside f32 weights (Table 3: 2mn).

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.q_adamw(1e-3)
    """
    return flash_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask,
        storage=completed(storage, _Q_ADAMW), decouple_lr=decouple_lr,
    )  # fmt: skip
