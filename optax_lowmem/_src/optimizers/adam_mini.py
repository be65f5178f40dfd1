"""Adam-mini and Q-Adam-mini: one second moment per block of weights (Q-Adam-mini, section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.blocks.structure import Structure
from optax_lowmem._src.codecs import affine, sqrt
from optax_lowmem._src.core import numerics
from optax_lowmem._src.core.block import BlockStructure
from optax_lowmem._src.core.typing import ScalarOrSchedule
from optax_lowmem._src.optimizers.adam import AdamRule, adam_moments, flash_adamw, is_zero
from optax_lowmem._src.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optimizers.schedule import direction, optimizer
from optax_lowmem._src.step.rule import OF_BLOCK, Slot
from optax_lowmem._src.step.storage import Storage, completed

_FLASH_ADAM_MINI = Storage(nu=None)
_Q_ADAM_MINI = Storage(mu=affine(), nu=None, group_size=256)
_Q_ADAMW = Storage(mu=affine(), nu=sqrt(), group_size=256)


@dataclasses.dataclass(frozen=True)
class AdamMiniRule(AdamRule):
    r"""m = b1 m + (1-b1) g, v = b2 v + (1-b2) mean(g^2), mhat / (sqrt(vhat + eps_root) + eps)."""

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("mu", signed=True),
        Slot("nu", signed=False, shared=True),
    )

    prepares = "blocks"

    def averaged(
        self, g: jax.Array, slots: Mapping[str, jax.Array], h: Mapping[str, jax.Array]
    ) -> jax.Array:
        """The new v; `g` is the mean of g^2."""
        return h["b2"] * slots["nu"] + h["one_minus_b2"] * g

    def prepare(
        self, g: jax.Array, slots: Mapping[str, jax.Array], h: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """1 / (sqrt(vhat + eps_root) + eps), and the new v; `g` is the mean of g^2."""
        nu = self.averaged(g, slots, h)
        # of an infinite v inf / inf, not 0: the block would stop for good, and nobody would see it
        one = jnp.where(nu < jnp.inf, jnp.float32(1), nu)
        return {OF_BLOCK: numerics.quotient(one, self.denominator(nu, h))}, {"nu": nu}

    def update(
        self, g: jax.Array, slots: Mapping[str, jax.Array], h: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The direction and the new m."""
        mu = h["b1"] * slots["mu"] + h["one_minus_b1"] * g
        return mu * h[OF_BLOCK], {"mu": mu}


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
    r"""`optax.scale_by_adam` with one second moment per block: the direction of `adam_mini` alone.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad
      v_t = b_2 v_{t-1} + (1-b_2) \mathrm{Average}_{block}(g_t^2), \quad
      u_t = \frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} + \epsilon}

    (Q-Adam-mini, section 2.1.2; Adam-mini), without learning rate, weight decay or master weights:
    those are other links of a chain, and `split_master_weights` around it. The first five
    arguments, their order and their defaults are those of `optax.scale_by_adam`.

    Args:
      eps: added outside the root, as in Adam-mini's code.
      eps_root: added inside the root, where the paper has its epsilon.
      storage: codecs (f32 moments by default), group size, rounding, policy. `Storage(nu=None)` has
        the moments of `flash_adam_mini`.

    Returns:
      An optax transformation: `update` gives u_t, to be subtracted times the learning rate. Its
      state's `nu` has one value per block. Without `params` it takes the blocks from the gradients,
      which have the names and shapes, and none of the metadata of boxed parameters: pass them too.

    Raises:
      ValueError: for a hyperparameter out of range, a block axis out of range, a head count that
        does not divide; inside a `shard_map` where a block may be on several devices.
      TypeError: for a 16-bit hyperparameter, or `blocks` that are no `Structure`.

    Numerics: v in f32, debiased. One NaN or infinity makes a whole block NaN, and no other tensor.

    Memory: 4 bytes of state per parameter and 4 bytes per block; 1.06 with `Storage(nu=None)`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_adam_mini(), optax.scale_by_learning_rate(1e-3))
      >>> params = {"embed": {"embedding": jnp.ones((64, 256))}}
      >>> tx.init(params)[0].nu["embed"]["embedding"].shape
      (64, 1)

    References:
      Han et al., Q-Adam-mini, 2025; Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More,
      2024. Deviations: as of `adam_mini`.
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
    neuron of another kernel, a row of an embedding or output head: `lowmem.blocks.describe` prints
    what each leaf gets. The first nine arguments are those of `optax.adamw`.

    Args:
      eps: added outside the root, as in Adam-mini's code.
      eps_root: added inside the root, where the paper has its epsilon.
      storage: codecs (f32 moments by default), width of the master weights, rounding, policy.

    Returns:
      An optax transformation, whose state's `nu` has one value per block.

    Raises:
      ValueError: for a hyperparameter out of range, a block axis out of range, a head count that
        does not divide; inside a `shard_map` where a block may be on several devices.

    Numerics: v in f32. One NaN or infinity makes a whole block NaN, and no other tensor.

    Memory: 4 bytes of state beside an f32 weight, and 4 bytes per block; `q_adam_mini` 1.02 and
    `flash_adam_mini` 2.06 beside a 2-byte weight.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"mlp": {"up_proj": {"kernel": jnp.ones((64, 128))}}}
      >>> lowmem.adam_mini(1e-3).init(params).nu["mlp"]["up_proj"]["kernel"].shape
      (1, 128)

    References:
      Han et al., Q-Adam-mini, 2025; Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More,
      2024. Deviations from Adam-mini's code: see `lowmem.blocks.infer`; debiased as there.
    """
    rule = AdamMiniRule(eps_root_is_zero=is_zero(eps_root))
    return optimizer(
        rule,
        adam_moments(b1, b2, eps, eps_root, nesterov=False),
        learning_rate,
        completed(storage, _FLASH_ADAM_MINI),
        weight_decay=weight_decay,
        mask=mask,
        decouple_lr=decouple_lr,
        slot_dtypes={"mu": mu_dtype},
        structure=_checked(blocks),
    )


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

    m lies in groups of 256 (equation 1, `codecs.affine`), rounded stochastically; v is f32, one
    value per block.

    Args:
      eps_root: added inside the root, the paper's epsilon.
      storage: codecs, group size, rounding, policy. The paper's Case 1, 8-bit v, is
        `Storage(mu=affine(), nu=linear(signed=False), group_size=256)`, its groups along all values
        of a leaf in one row.

    Returns:
      An optax transformation.

    Memory: 1.02 bytes of state per parameter beside f32 weights (Table 3: mn + O(1)), 1 more beside
    16-bit ones.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.q_adam_mini(1e-3)
      >>> params = {"embed": {"embedding": jnp.ones((64, 256))}}
      >>> round(lowmem.memory.report(tx, params).state_bytes / 64 / 256, 3)
      1.032

    References:
      Han et al., Q-Adam-mini, 2025. Deviations: `codecs.affine` has zero in its range and no floor;
      rounding is stochastic in every leaf, at 1.00 times the time, where the paper has it in
      embeddings only (section 2.3.2, `rounding="embeddings"`): the m of a neuron that sleeps beside
      live ones is stuck in its codes while its v decays, and its weights run away.
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

    m is companded int8 in groups of 32, rounded stochastically; v is f32, one value per block; a
    16-bit weight has 8 more bits. The arguments are those of `q_adam_mini`.

    Returns:
      An optax transformation.

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
