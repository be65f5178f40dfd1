"""AdamW that stores second moments as means of rows and columns (Adafactor, section 3)."""

from __future__ import annotations

import dataclasses
import math
import warnings

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.block import Block, Factors, is_int
from optax_lowmem._src.arrays.hyperparameters import is_zero
from optax_lowmem._src.arrays.roles.roles import Role, roles
from optax_lowmem._src.arrays.typing import Arrays, ScalarOrSchedule
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.blocks.structure import Structure
from optax_lowmem._src.optim.optimizers.adam import adam_moments
from optax_lowmem._src.optim.optimizers.adam_mini import AdamMiniRule
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import direction, optimizer
from optax_lowmem._src.optim.step.rule import OF_BLOCK
from optax_lowmem._src.optim.step.storage import Storage, completed

# warn of unfactored leaves with at least this shorter axis and size, and this share of a model
_SHORT, _LARGE, _SHARE = 32, 1 << 16, 0.01
_OWN = Storage(nu=None)
_LEAST = 128  # optax.adafactor's; the arguments default to None, which injection does not trace


@dataclasses.dataclass(frozen=True)
class FactoredRule(AdamMiniRule):
    r"""Adam that computes vhat of each element from the means of its row and its column."""

    def prepare(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[Arrays, Arrays]:
        """Return the new means, as an operand and as the slot; `g` is the means of g^2."""
        nu = self.averaged(g, slots, h)
        return {OF_BLOCK: nu}, {"nu": nu}

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        mu = h["b1"] * slots["mu"] + h["one_minus_b1"] * g
        return numerics.quotient(mu, self.denominator(h[OF_BLOCK], h)), {"mu": mu}

    def momentum_divisor(self, slots: Arrays, h: Arrays) -> jax.Array:
        return self.denominator(h[OF_BLOCK], h)


@dataclasses.dataclass(frozen=True)
class Factorable:
    """A `BlockStructure` that factors the two largest axes of the matrices of each layer."""

    min_dim_size_to_factor: int | None = None  # least size of both axes; None is 128

    def __post_init__(self) -> None:
        size = self.min_dim_size_to_factor
        if size is not None and (not is_int(size) or size < 1):
            raise ValueError(
                "min_dim_size_to_factor must be an int of at least 1, known when tracing, or None; "
                f"got {size!r}. Use lowmem.inject_hyperparams, or list it in static_args."
            )

    def infer(self, params: optax.Params) -> dict[str, Block]:
        """Return the factored axes of each leaf, or a block for each element."""
        return {path: self._block_of(role) for path, role in roles(params).items()}

    def _block_of(self, role: Role) -> Block:
        least, each = self.min_dim_size_to_factor or _LEAST, "a value per element"
        if role.is_vector:
            return Block(description=each, reason=role.leaf.because("it has no rows and columns"))
        one, other = sorted(int(i) for i in np.argsort(role.shape, kind="stable")[-2:])
        if min(role.shape[one], role.shape[other]) < least:
            reason = f"fewer than two axes have size {least} or more"
            return Block(description=each, reason=role.leaf.because(reason))
        axes = role.axes[one], role.axes[other]
        reason = role.leaf.because(f"of axes {axes[0]} and {axes[1]}, its largest")
        return Factors(axes, description="rows and columns", reason=reason)

    def embeddings(self, params: optax.Params) -> set[str]:
        """Return the paths of the embedding tables."""
        return Structure().embeddings(params)

    def warn(self, params: optax.Params) -> None:
        """Warn if the default minimum size leaves much of a model unfactored."""
        if self.min_dim_size_to_factor is not None or context.is_recording():
            return
        sizes = {path: math.prod(role.leaf.shape) for path, role in roles(params).items()}
        shorter = {
            path: sorted(role.shape)[-2]
            for path, role in roles(params).items()
            if not role.is_vector
        }
        results = [
            path
            for path, size in shorter.items()
            if _SHORT <= size < _LEAST and sizes[path] > _LARGE
        ]
        if sum(sizes[path] for path in results) > _SHARE * sum(sizes.values()):
            size = min(shorter[path] for path in results)
            leaf = roles(params)[results[0]].leaf
            of_layer = " of each layer" if leaf.stacked else ""
            warnings.warn(
                f"'{results[0]}'{f' and {len(results) - 1} more' if results[1:] else ''} of shape "
                f"{leaf.shape} keeps a second moment per element, 4 bytes per parameter: "
                f"fewer than two axes{of_layer} have size {_LEAST} or more. "
                f"min_dim_size_to_factor={size} keeps means of rows and columns instead, "
                f"{_LEAST} silences this warning.",
                stacklevel=2,
            )


@with_common_arguments
def scale_by_factored_adam(
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    min_dim_size_to_factor: int | None = None,
    storage: Storage = Storage.full_precision(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    r"""`optax.scale_by_adam` with second moments of rows and columns.

    Only the direction of `flash_factored_adamw`, whose docstring has the mathematics, without
    learning rate, weight decay or master weights: add the first two in an `optax.chain`, and wrap
    the chain in `split_master_weights`. The first five arguments, their order and their defaults
    are those of `optax.scale_by_adam`.

    Args:
      min_dim_size_to_factor: least size of a layer's two largest axes; smaller leaves keep an f32
        value per element. None is 128, as in `optax.adafactor`.
      storage: codecs (f32 moments by default), group size, rounding, policy.

    Returns:
      An optax transformation: `update` returns the direction; multiply it by the learning rate and
      subtract. `nu` in its state has R and C of a matrix in one array.

    Raises:
      ValueError: for a hyperparameter or size out of range; inside a `shard_map` if rows may be
        on several devices.
      TypeError: for a 16-bit hyperparameter.

    Numerics, deviations and source: see `flash_factored_adamw`.

    Memory: 4 bytes of state per parameter, and 4 bytes per row and column.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_factored_adam(), optax.scale_by_learning_rate(1e-3))
      >>> tx.init({"w": jnp.ones((128, 256))})[0].nu["w"].shape
      (384,)
    """
    return direction(
        FactoredRule(eps_root_is_zero=is_zero(eps_root)),
        adam_moments(b1, b2, eps, eps_root, nesterov=False),
        completed(storage, _OWN),
        {"mu": mu_dtype},
        Factorable(min_dim_size_to_factor),
    )


@with_common_arguments
def flash_factored_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    min_dim_size_to_factor: int | None = None,
    storage: Storage = _OWN,
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with 8-bit m, v as means of rows and columns, and split master weights.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad
      R_t = b_2 R_{t-1} + (1-b_2) \mathrm{mean}_j\, g_t^2, \quad
      C_t = b_2 C_{t-1} + (1-b_2) \mathrm{mean}_i\, g_t^2, \\
      v_t = \frac{R_t C_t^\top}{\mathrm{mean}_i R_t}, \quad
      \theta_t = \theta_{t-1} - \eta_t \left(\frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} +
      \epsilon} + \lambda \theta_{t-1}\right)

    for matrices, which are a leaf's two largest axes (Adafactor, section 3 and Algorithm 4, with
    means instead of sums); AdamW for all other leaves, biases and the scales of norms included.
    Axes that stack layers or experts, as `blocks.infer` recognises them, are neither rows nor
    columns. The first nine arguments are those of `optax.adamw`.

    Args:
      b2: decay of nu, in [0, 1), or a schedule that starts at 0 such as `b2_schedule()`, which is
        Adafactor's.
      min_dim_size_to_factor: least size of both axes; smaller leaves keep an f32 value per element.
        None is 128, as in `optax.adafactor`.
      storage: codecs, group size, width of the master weights, rounding, policy.
        `Storage.four_bit(nu=None, group_size=32)` keeps m in 4 bits: 3.56 bytes in all.

    Returns:
      An optax transformation; `nu` in its state has R and C of a matrix concatenated along the last
      axis, after the leaf's other axes.

    Raises:
      ValueError: for a hyperparameter or size out of range; inside a `shard_map` if rows may be
        on several devices.
      TypeError: for a 16-bit hyperparameter.

    Numerics: R and C are f32. v has the same row and column means as AdamW's; steps differ from
    AdamW's for elements whose v is far from the product. A NaN or infinity in a matrix makes that
    matrix NaN, and no other tensor.

    Memory: 2 (weight) + 1 (correction) + 1.06 (m) bytes, and 4 bytes per row and column; 8.06 bytes
    in an unfactored leaf, such as an attention kernel of shape (width, heads, 64). The GPU and TPU
    kernels support it (`lowmem.explain` reports which leaves use them).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_factored_adamw(1e-3)
      >>> params = {"kernel": jnp.ones((256, 512), jnp.bfloat16)}
      >>> tx.init(params).nu["kernel"].shape
      (768,)
      >>> round(lowmem.memory.report(tx, params).bytes_per_param, 2)
      4.09

    References:
      Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
      arXiv 1804.04235; Zhai et al., Scaling Vision Transformers, 2022 (with a first moment, at
      AdamW's rates). Deviations: biases, norms and stacked axes are not factored, whatever their
      sizes; updates are not clipped (use `optax.clip_by_block_rms` after `scale_by_factored_adam`),
      steps are not relative to a weight's size, and debiasing and eps are Adam's.
    """
    rule = FactoredRule(eps_root_is_zero=is_zero(eps_root))
    moments = adam_moments(b1, b2, eps, eps_root, nesterov=False)
    return optimizer(
        rule, moments, learning_rate, completed(storage, _OWN), b1,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr,
        slot_dtypes={"mu": mu_dtype}, structure=Factorable(min_dim_size_to_factor),
    )  # fmt: skip
