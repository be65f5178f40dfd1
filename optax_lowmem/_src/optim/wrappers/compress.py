"""8-bit state for any optax optimizer."""

from typing import TypeGuard

import jax
import numpy as np
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.codecs import GroupCodec
from optax_lowmem._src.arrays.hyperparameters import check_range
from optax_lowmem._src.optim.step.storage import Policy, codec_of
from optax_lowmem._src.optim.wrappers.compressor import Compressor, Select


def compress_state(
    inner: optax.GradientTransformation,
    *,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
    **slot_codecs: GroupCodec | str | None,
) -> optax.GradientTransformationExtraArgs:
    """Store named slots of any optax optimizer's state with 8-bit codecs.

    Args:
      inner: any optax transformation, including chains.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` (unbiased, so slow averages never stall) or `nearest`; a running
        maximum such as amsgrad's `nu_max` is always rounded to nearest.
      seed: seed of the hash for stochastic rounding.
      policy: leaves and slots to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype as in optax, or `float32`.
        (Inside `split_master_weights` gradients, and therefore updates, are f32.)
      **slot_codecs: a codec for each slot by the name of its field, such as `mu=softsign()` or
        `mu="int8"`, a name of `codecs.NAMES`: with a sign for slots that may be negative, without
        one for others. Slots of optimizers outside of optax must be registered for names
        (`register_slot`).

    Returns:
      An optax transformation. Its state keeps the inner state's types, with codes in their slots.

    Raises:
      ValueError: in `init`, for a slot that the state does not have (the error lists its slots),
        a name for a slot that is not registered, a slot that cannot be rounded (centered
        `rmsprop`), moments whose shape is not their parameter's (`optax.contrib.galore`), a signed
        slot with an unsigned codec, or around an optimizer that splits master weights.

    Memory: 1.06 bytes (e8m8 scales) or 1.13 bytes (f32 scales) per value instead of 4.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.compress_state(optax.adan(1e-3), m="int8")
      >>> state = tx.init({"w": jnp.ones((64, 128))})
      >>> optax.tree.get(state, "m")["w"].dtype
      dtype('int8')
    """
    if not slot_codecs:
        raise ValueError("compress_state needs a codec for at least one slot, such as mu='int8'")
    for name, codec in slot_codecs.items():
        codec_of(name, codec, signed=False)

    return Compressor(
        trees.wrapped(inner), lambda field, _: slot_codecs.get(field), tuple(slot_codecs),
        group_size, rounding, seed, policy, update_dtype,
    ).transformation()  # fmt: skip


# ---- FlashOptim's two moment codecs, as wrappers of a transformation or as links of a chain ------


def _select_moment(moment: int, codec: GroupCodec | str | None) -> Select:
    chosen = "int8" if codec is None else codec
    codec_of("codec", chosen, signed=False)
    return lambda field, known: chosen if known.moment == moment else None


def _is_decay(inner: object) -> TypeGuard[float]:
    if not isinstance(inner, int | float | np.number | jax.Array):
        return False
    check_range("the decay", inner, 0.0, 1.0)
    return True


def compand_momentum(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | str | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Store the first moment of a transformation as companded int8 (FlashOptim, equation 3).

    Args:
      inner: a transformation of optax with a first moment in f32 (`mu`, `trace`, `m`, `ema`,
        `exp_avg`), or `scale_by_adam_mini`; or a decay b for a plain link of a chain,
        m = b m + (1-b) g without debiasing.
      codec: the codec, or its name; `"int8"` (softsign) by default.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: seed of the hash for stochastic rounding.
      policy: leaves to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype, or `float32`.

    Returns:
      An optax transformation; 1.06 bytes per value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.compand_momentum(optax.trace(0.9)), optax.scale(-0.1))
    """
    if _is_decay(inner):
        inner = optax.ema(inner, debias=False)
    select = _select_moment(1, codec)
    return Compressor(
        trees.wrapped(inner), select, (), group_size, rounding, seed, policy, update_dtype
    ).transformation()


def sqrt_variance_quant(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | str | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Store the root of a transformation's second moment as uint8 (FlashOptim, equation 4).

    Args:
      inner: a transformation of optax with a non-negative second moment in f32 (`nu`, `n`,
        `exp_avg_sq`, `sum_of_squares`), or `scale_by_adam_mini`, whose block-wise values are
        grouped as one flat vector; or a decay b for a plain link of a chain, g / sqrt(v) with
        v = b v + (1-b) g^2.
      codec: the codec, or its name; `"int8"` (sqrt) by default.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: seed of the hash for stochastic rounding.
      policy: leaves to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype, or `float32`.

    Returns:
      An optax transformation; 1.13 bytes per value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.compand_momentum(lowmem.sqrt_variance_quant(optax.scale_by_adam()))
    """
    if _is_decay(inner):
        inner = optax.scale_by_rms(inner)
    select = _select_moment(2, codec)
    return Compressor(
        trees.wrapped(inner), select, (), group_size, rounding, seed, policy, update_dtype
    ).transformation()
