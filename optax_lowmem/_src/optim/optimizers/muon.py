"""Muon with 8-bit momentum: Newton-Schulz iterations for matrices, AdamW for all other leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.hyperparameters import (
    Formula,
    as_f32,
    bias_correction,
    check_choice,
    check_range,
    complement,
    following,
    is_zero,
)
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.optimizers.adam import AdamRule, adam_moments
from optax_lowmem._src.optim.optimizers.newton_schulz import (
    PRECONDITIONINGS,
    PRESETS,
    STANDARD,
    Coefficients,
    polar_factors,
)
from optax_lowmem._src.optim.step.engine import at_count, optimizer
from optax_lowmem._src.optim.step.matrix_axes import Dimensions, Matrices, MatrixAxes
from optax_lowmem._src.optim.step.rule import MatrixRule, Slot, UpdateRule
from optax_lowmem._src.optim.step.storage import Storage

_OF_ADAM = "adam_"  # prefix of AdamW's hyperparameters among Muon's


class FlashMuonState(NamedTuple):
    """State of Muon; every tree has the parameters' structure."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    mu: PyTree  # int8 codes of the parameter's shape, or f32
    mu_scale: PyTree  # shape[:-1] + (groups,), or 0-d
    nu: PyTree  # uint8 codes, or f32; 0-d for matrices, which have none
    nu_scale: PyTree
    correction: PyTree  # int8 or int16 beside 16-bit weights, or 0-d


@dataclasses.dataclass(frozen=True)
class OrthogonalRule(MatrixRule):
    r"""m = beta m + (1-beta) g; the direction approximates U V^T of the debiased m = U S V^T."""

    nesterov: bool = True  # use U V^T of the debiased beta m + (1-beta) g instead
    adaptive: bool = False  # multiply the direction by <m, U V^T>
    coefficients: Coefficients = (STANDARD,) * 5
    preconditioning: str = "frobenius"  # how singular values are bounded before the iterations
    # dtype of the products; None is bf16, or f32 if JAX's default backend is a CPU
    products: DTypeLike | None = None
    normalizes: bool = False  # divide by the root of the second moment of each output (NorMuon)

    state_type = FlashMuonState

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum, and v of each output if the rule `normalizes`."""
        nu = Slot("nu", signed=False, blockwise=True, compressed=False)
        return (Slot("mu", signed=True), *((nu,) if self.normalizes else ()))

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        """Return the debiased momentum and the new m."""
        mu = h["beta"] * slots["mu"] + h["one_minus_beta"] * g
        debiased = h["mu_bias_correction"] * mu
        return (debiased + h["g_scale"] * g if self.nesterov else debiased), {"mu": mu}

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the products."""
        by_default = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return by_default if self.products is None else self.products

    @property
    def of_whole_leaf(self) -> bool:
        """Whether the direction is scaled by the dual norm, a sum over the whole leaf."""
        return self.adaptive

    def block(self, matrices: Matrices) -> Block | None:
        """Return one value per output, the mean over fan-in, if the rule `normalizes`."""
        return Block(axes=matrices.rows, description="per output") if self.normalizes else None

    def scale_blocks(
        self, matrices: Matrices, direction: jax.Array, slots: Arrays, h: Arrays
    ) -> tuple[jax.Array, Arrays]:
        """Return 1 / (sqrt(v) + eps) of each output, times one factor per matrix, and the new v.

        With the factor, the scaled direction has the norm of the direction; or with
        `consistent_rms` that of U V^T, the root of min(fan_in, fan_out), which fixes its RMS.
        """
        fan_in, fan_out = matrices.fans(direction.shape)
        mean = Block(axes=matrices.rows).mean(jnp.square(direction.astype(jnp.float32)))
        nu = h["b2"] * slots["nu"] + h["one_minus_b2"] * mean
        factor = 1 / (jnp.sqrt(nu) + h["eps"])
        squares = fan_in * jnp.sum(mean * factor**2, axis=matrices.columns, keepdims=True)
        wanted = fan_in * jnp.sum(mean, axis=matrices.columns, keepdims=True)
        if "consistent_rms" in h:
            wanted = jnp.float32(min(fan_in, fan_out))
        return factor * (jnp.sqrt(wanted) / (jnp.sqrt(squares) + h["eps"])), {"nu": nu}

    def of_matrices(self, stack: jax.Array, h: Arrays) -> jax.Array:
        """Approximate U V^T of each matrix."""
        return polar_factors(stack, self.coefficients, self.preconditioning, h["eps"])

    def scale(
        self, matrices: Matrices, before: jax.Array, direction: jax.Array, h: Arrays
    ) -> jax.Array:
        """Return sqrt(max(1, fan_out / fan_in)), or consistent_rms sqrt(max(fan_in, fan_out))."""
        fan_in, fan_out = matrices.fans(before.shape)
        factor = jnp.float32(max(1.0, fan_out / max(1, fan_in)) ** 0.5)
        if "consistent_rms" in h:
            factor = h["consistent_rms"] * jnp.float32(max(fan_in, fan_out) ** 0.5)
        if self.adaptive:
            wide = before.astype(jnp.float32), direction.astype(jnp.float32)
            factor = factor * jnp.sum(wide[0] * wide[1])
        return factor


@dataclasses.dataclass(frozen=True)
class MuonRule(UpdateRule):
    """One rule for matrices and another for all other leaves."""

    of_matrix: OrthogonalRule = OrthogonalRule()
    rest: AdamRule = AdamRule(nesterov=True)  # its hyperparameters have the prefix "adam_"

    state_type = FlashMuonState
    prepares = "matrices"

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The moments; matrices have no second one unless their rule `normalizes`."""
        nu = Slot("nu", signed=False, skips_matrices=not self.of_matrix.normalizes)
        return Slot("mu", signed=True), nu

    def for_leaf(self, matrices: Matrices | None) -> UpdateRule:
        """Return the rule for a leaf; `matrices` is None if it is not a matrix."""
        return self.rest if matrices is None else self.of_matrix

    def hyperparameters_of(self, matrices: Matrices | None, h: Arrays) -> Arrays:
        """Select Muon's or Adam's hyperparameters for a leaf; `gradient_scale` is shared."""
        if matrices is not None:
            return {name: x for name, x in h.items() if not name.startswith(_OF_ADAM)}
        of_adam = {k.removeprefix(_OF_ADAM): x for k, x in h.items() if k.startswith(_OF_ADAM)}
        shared = {name: x for name, x in h.items() if name == "gradient_scale"}
        return {**of_adam, **shared}

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        """Raise an error: each leaf is updated by the rule that `for_leaf` returns."""
        raise NotImplementedError(
            "MuonRule has no update of its own: use for_leaf(matrices).update"
        )


def _hyperparameters_at(
    beta: Scalar,
    eps: Scalar,
    nesterov: bool,
    consistent_rms: Scalar | None,
    normuon_b2: Scalar | None,
    adam: Formula,
    adam_learning_rate: ScalarOrSchedule,
    adam_weight_decay: Scalar | None,
    count: jax.Array,
) -> Arrays:
    step = following(count)
    beta_now, one_minus = as_f32("beta", beta), complement("beta", beta)
    h = {"beta": beta_now, "one_minus_beta": one_minus, "eps": as_f32("eps", eps)}
    if nesterov:  # the next step's momentum, debiased for that step
        h["mu_bias_correction"] = beta_now / bias_correction("beta", beta, following(step))
        h["g_scale"] = one_minus / bias_correction("beta", beta, step)
    else:
        h["mu_bias_correction"] = 1 / bias_correction("beta", beta, step)
    if consistent_rms is not None:
        h["consistent_rms"] = as_f32("consistent_rms", consistent_rms)
    if normuon_b2 is not None:
        h["b2"] = as_f32("normuon_b2", normuon_b2)
        h["one_minus_b2"] = complement("normuon_b2", normuon_b2)
    rate = at_count("adam_learning_rate", adam_learning_rate, count)
    of_adam = {**adam(count), "lr": rate}
    if adam_weight_decay is not None:
        of_adam["decay"] = as_f32("adam_weight_decay", adam_weight_decay) * rate
    return {**h, **{f"{_OF_ADAM}{name}": x for name, x in of_adam.items()}}


def _coefficients(ns_coeffs: PyTree, ns_steps: int) -> Coefficients:
    """Return (a, b, c) of each iteration."""
    if type(ns_steps) is not int or ns_steps < 1:
        raise TypeError(
            f"ns_steps must be an int of at least 1 known when tracing, got {ns_steps!r}. Use "
            "lowmem.inject_hyperparams, which does not inject it, or list it in static_args."
        )
    given = ns_coeffs
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PRESETS:
            raise ValueError(f"ns_coeffs must be one of {tuple(PRESETS)} or numbers: {ns_coeffs!r}")
        given = PRESETS[ns_coeffs]
    try:
        rows = [row if isinstance(row, Sequence) else (row,) for row in given]
        flat = len(rows) == 3 and all(len(row) == 1 for row in rows)
        result = [tuple(float(row[0]) for row in rows)] if flat else rows
        numbers = [tuple(map(float, row)) for row in result]
    except TypeError as error:
        raise TypeError(
            f"ns_coeffs takes three numbers, or three for each iteration, got {ns_coeffs!r}"
        ) from error
    if not numbers or any(len(row) != 3 for row in numbers):
        raise ValueError(f"ns_coeffs must have shape (3,) or (n, 3), got {ns_coeffs!r}")
    if not all(math.isfinite(number) for row in numbers for number in row):
        raise ValueError(f"ns_coeffs must be finite numbers, got {ns_coeffs!r}")
    if flat:
        numbers *= ns_steps
    elif len(numbers) > ns_steps:
        raise ValueError(
            f"ns_coeffs is for {len(numbers)} iterations and ns_steps={ns_steps}: pass a larger "
            "ns_steps, or fewer coefficients."
        )
    return tuple((a, b, c) for a, b, c in numbers)


def _products(ns_dtype: DTypeLike | None) -> jnp.dtype | None:
    """Return the checked dtype of the products, or None for the default."""
    dtype = None if ns_dtype is None else jnp.dtype(ns_dtype)
    if dtype not in (None, jnp.float32, jnp.bfloat16):
        raise ValueError(f"ns_dtype must be float32, bfloat16 or None, got {ns_dtype!r}")
    return dtype


def flash_muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: Sequence[float] | Sequence[Sequence[float]] | str = STANDARD,
    ns_steps: int = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: optax.MaskOrFn = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.999,
    adam_eps_root: float | jax.Array = 0.0,
    adam_weight_decay: float | jax.Array = 0.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Dimensions = None,
    consistent_rms: float | jax.Array | None = None,
    normuon_b2: float | jax.Array | None = None,
    ns_dtype: DTypeLike | None = None,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon with 8-bit momentum and split master weights: 4.06 bytes per parameter with its weight.

    .. math::
      m_t = \beta m_{t-1} + (1-\beta) g_t, \quad
      \tilde m_t = \frac{\beta m_t}{1-\beta^{t+1}} + \frac{(1-\beta) g_t}{1-\beta^t}
      = U \Sigma V^\top, \\
      \theta_t = \theta_{t-1} - \eta_t \left(s\, U V^\top + \lambda \theta_{t-1}\right)

    for matrices, with :math:`U V^\top` approximated by iterating
    :math:`X \leftarrow a X + (b A + c A^2) X, A = X X^\top`; AdamW for all other leaves. The
    arguments up to `consistent_rms`, their order and their defaults are those of
    `optax.contrib.muon`. As there, a matrix is a leaf with two dimensions, embeddings and output
    heads included, unless `muon_weight_dimension_numbers` says otherwise. Deviations: if leaves
    stack layers or experts, as `blocks.infer` recognises them, the dimensions of one layer count;
    biases and the scales of norms, stacked or not, are never matrices. Muon's authors use AdamW for
    embeddings and output heads.

    Args:
      learning_rate: number, f32 scalar or schedule.
      ns_coeffs: (a, b, c) for all iterations; or one such triple per iteration, whose number then
        is the number of iterations; or a preset: `standard` or `dion` as in optax,
        `polar_express`, or `turbo`, four iterations for `preconditioning="aol"`. Known when
        tracing.
      ns_steps: number of iterations; at least the number of triples.
      beta: decay of the momentum, in [0, 1).
      eps: added to the norm by which `frobenius` and `spectral` divide a matrix, and to Adam's
        root.
      weight_decay: for matrices: number, f32 scalar or schedule; decoupled, times the learning
        rate.
      weight_decay_mask: where `weight_decay` applies; only matrices are affected.
      mu_dtype: dtype of the momentum in leaves where it is not compressed; f32 by default.
      nesterov: as in the formula, and as in `optax.nadamw` for other leaves; False uses the
        debiased m.
      adaptive: multiply by the dual norm, the sum of :math:`\tilde m_t \odot U V^\top` over a leaf.
      preconditioning: scaling before the iterations: `frobenius` (divide by the norm), `spectral`
        (by the largest singular value, from an SVD), `aol` or `schatten` (by a bound from A).
      adam_b1: decay of the first moment of other leaves, in [0, 1).
      adam_b2: decay of their second moment, in [0, 1).
      adam_eps_root: added inside their root.
      adam_weight_decay: weight decay of other leaves.
      adam_learning_rate: learning rate of other leaves: number, f32 scalar or schedule; None is
        `learning_rate`.
      muon_weight_dimension_numbers: a tree like the parameters, or a prefix of it, with an
        `optax.contrib.MuonDimensionNumbers` for each matrix and None for other leaves; or a
        function from the parameters to such a tree. If a leaf has more than two dimensions (an
        attention or convolution kernel), the dimensions that are not named are batch dimensions.
      consistent_rms: s = consistent_rms sqrt(max(fan_in, fan_out)) instead of
        sqrt(max(1, fan_out / fan_in)): with 0.2, AdamW's learning rate and weight decay fit.
      normuon_b2: decay of the second moment of each output (NorMuon, 0.95), in [0, 1); None does
        not normalize. With O the approximation of U V^T, v_t = b2 v_{t-1} + (1 - b2) mean(O^2) over
        the inputs and :math:`\hat O = O / \left(\sqrt{v_t} + \epsilon\right)`, the direction is
        :math:`\|O\|_F\, \hat O / \|\hat O\|_F`, or with `consistent_rms`
        :math:`\sqrt{\min(m, n)}\, \hat O / \|\hat O\|_F`.
      ns_dtype: dtype of the products: None is bf16, or f32 if JAX's default backend is a CPU, where
        bf16 is no faster. f32 products have the precision of `jax_default_matmul_precision`.
      storage: codecs (`mu`, and `nu` of other leaves), group size, width of the master weights,
        rounding, policy.
      decouple_lr: decay matrices by `weight_decay * lr / peak`.

    Returns:
      An optax transformation; `nu` in its state is 0-d for matrices, which have no second moment,
      or has one f32 value per output with `normuon_b2`.

    Raises:
      ValueError: for a hyperparameter out of range, coefficients of another shape, dimension
        numbers that do not fit a leaf; inside a `shard_map` if a matrix may be on several devices.
      TypeError: for a 16-bit hyperparameter, or traced `ns_steps` or `ns_coeffs`.

    Numerics: with f32 products and moments the steps equal optax's up to rounding. int8 momentum
    changes directions by about 0.1 of their norm and bf16 products by 0.05, since the iterations
    amplify rounding errors where singular values are small. A matrix with one side twice the
    other or more is iterated on the Gram matrix of its short side and multiplied once (with
    `polar_express`, or more than five iterations, once per two or three of them). A NaN or infinity
    in a matrix makes that matrix NaN, and no other.

    Memory: 2 (weight) + 1 (correction) + 1.06 (m) bytes for matrices, 5.19 for other leaves, and 4
    bytes per output of a matrix with `normuon_b2`: 0.002 per parameter if it has 2,048 inputs. A
    step also needs room for one stack of matrices of equal shape, of up to 2^23 elements (or one
    larger matrix), and for its products. On a mesh the whole matrices of a stack are distributed
    over the devices: they are moved once before the iterations, and once after.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_muon(2e-2)
      >>> params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
      >>> params, state = lowmem.init(tx, params)
      >>> state.mu["kernel"].dtype, state.nu["kernel"].shape, state.nu["bias"].shape
      (dtype('int8'), (), (128,))

    References:
      Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon
      is Scalable for LLM Training, 2025; Gupta et al., Effective Quantization of Muon Optimizer
      States, 2025 (8-bit momentum); Amsel et al., The Polar Express, 2025 (coefficients);
      Boissin et al., Turbo-Muon, 2025 (four iterations); Li et al., NorMuon, 2025, arXiv 2510.05491
      (`normuon_b2`: with `consistent_rms=0.2` and `nesterov=False` the paper's Algorithm 1; without
      `consistent_rms` the authors' `normuon.py`, which keeps the norm of O. Neither debiases v or
      the momentum; debiasing m changes :math:`U V^\top` in the first steps with `nesterov`.
      :math:`\epsilon` is 1e-10 in `normuon.py`, whose means for convolutions are over one axis).
    """
    check_choice("preconditioning", preconditioning, PRECONDITIONINGS)
    check_range("beta", beta, 0.0, 1.0)
    check_range("adam_weight_decay", adam_weight_decay, 0.0)
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    check_range("adam_learning_rate", rate, 0.0)
    if consistent_rms is not None:
        check_range("consistent_rms", consistent_rms, 0.0)
    if normuon_b2 is not None:
        check_range("normuon_b2", normuon_b2, 0.0, 1.0)
    adam = adam_moments(adam_b1, adam_b2, eps, adam_eps_root, nesterov)
    decay = None if is_zero(adam_weight_decay) else adam_weight_decay
    iterations = _coefficients(ns_coeffs, ns_steps)
    rule = OrthogonalRule(
        nesterov, adaptive, iterations, preconditioning, _products(ns_dtype), normuon_b2 is not None
    )
    of_adam = AdamRule(nesterov=nesterov, eps_root_is_zero=is_zero(adam_eps_root))
    arguments = beta, eps, nesterov, consistent_rms, normuon_b2, adam, rate, decay
    return optimizer(
        MuonRule(rule, of_adam), Formula(_hyperparameters_at, arguments), learning_rate, storage,
        weight_decay=weight_decay, mask=weight_decay_mask, decouple_lr=decouple_lr,
        slot_dtypes={"mu": mu_dtype}, matrices=MatrixAxes(muon_weight_dimension_numbers),
        rates={"adam_learning_rate": rate},
    )  # fmt: skip
