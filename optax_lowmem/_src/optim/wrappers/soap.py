"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners, with an 8-bit state."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.block import is_int
from optax_lowmem._src.arrays.hyperparameters import (
    as_f32,
    bias_correction,
    check_range,
    complement,
)
from optax_lowmem._src.arrays.sharding import left_to_xla, sharding_of
from optax_lowmem._src.arrays.typing import Arrays, PyTree, ScalarOrSchedule, Structure
from optax_lowmem._src.optim.step.matrix_axes import Dimensions, Matrices, MatrixAxes
from optax_lowmem._src.optim.step.storage import Storage, completed
from optax_lowmem._src.optim.wrappers.compress import compress_state
from optax_lowmem._src.optim.wrappers.split import split_master_weights


class SoapState(NamedTuple):
    """State of SOAP; every tree has the parameters' structure."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    mu: optax.Updates  # of the parameter's shape
    nu: optax.Updates  # of the parameter's shape; of a matrix, in the eigenbasis
    left: optax.Updates  # L, [matrices, fan_in, fan_in]; 0-d where there is none
    right: optax.Updates  # R, [matrices, fan_out, fan_out]
    q_left: optax.Updates  # eigenvectors of L, one per column
    q_right: optax.Updates  # eigenvectors of R


class _Sides(NamedTuple):
    """L and R of one parameter, or their eigenvectors; 0-d for a side without any."""

    left: PyTree
    right: PyTree


def _rotated(stack: jax.Array, q: _Sides) -> jax.Array:
    """Return Q_L^T X Q_R of each matrix."""
    if q.left.ndim:
        stack = jnp.einsum("sij,sik->sjk", q.left, stack)
    return jnp.einsum("sjk,skl->sjl", stack, q.right) if q.right.ndim else stack


def _rotated_back(stack: jax.Array, q: _Sides) -> jax.Array:
    """Return Q_L X Q_R^T of each matrix."""
    return _rotated(stack, _Sides(*(x.swapaxes(1, 2) if x.ndim else x for x in q)))


def _products(stack: jax.Array) -> _Sides:
    """Return G G^T and G^T G of each matrix."""
    return _Sides(
        jnp.einsum("sij,skj->sik", stack, stack), jnp.einsum("sij,sik->sjk", stack, stack)
    )


# Each returns the new eigenvectors of P, and the order of the old ones that they come from.


def _same_basis(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, jnp.broadcast_to(jnp.arange(p.shape[-1]), p.shape[:-1])


def _first_basis(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.linalg.eigh(p)[1][..., ::-1], _same_basis(p, q)[1]


def _next_basis(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Orthogonal iteration, once, after sorting by the diagonal of Q^T P Q."""
    eigenvalues = jnp.einsum("sij,sik,skj->sj", q, p, q)
    order = jnp.argsort(-eigenvalues, axis=-1)
    return jnp.linalg.qr(p @ jnp.take_along_axis(q, order[:, None, :], axis=-1))[0], order


class _Leaf(NamedTuple):
    """The state of one parameter."""

    mu: PyTree
    nu: PyTree
    sides: _Sides
    q: _Sides


def _adam(
    g: jax.Array, mu: jax.Array, nu: jax.Array, q: _Sides, h: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return Adam's direction in the basis of `q`, rotated back, and the new moments."""
    g = g * h["not_first"]
    mu = h["b1"] * mu + h["one_minus_b1"] * g
    nu = h["b2"] * nu + h["one_minus_b2"] * _rotated(g, q) ** 2
    root = jnp.sqrt(h["nu_bias_correction"] * nu) + h["eps"]
    return _rotated_back(h["mu_bias_correction"] * _rotated(mu, q) / root, q), mu, nu


def _step_matrices(
    matrices: Matrices, g: jax.Array, leaf: _Leaf, basis: jax.Array, h: Arrays
) -> tuple[jax.Array, _Leaf]:
    """Return the direction of a stack of matrices, and its new state.

    `basis` is the index of the new eigenvectors: the same, the next or the first.
    """
    g, mu, nu = (matrices.to_stack(x) for x in (g, leaf.mu, leaf.nu))
    direction, mu, nu = _adam(g, mu, nu, leaf.q, h)
    sides, q = list(leaf.sides), list(leaf.q)
    for i, product in enumerate(_products(g)):
        if sides[i].ndim:
            sides[i] = h["b2"] * sides[i] + h["one_minus_b2"] * product
            bases = _same_basis, _next_basis, _first_basis
            q[i], order = lax.switch(basis, bases, sides[i], q[i])
            nu = jnp.take_along_axis(nu, jnp.expand_dims(order, 2 - i), axis=1 + i)
    direction, mu, nu = (matrices.from_stack(x, leaf.mu.shape) for x in (direction, mu, nu))
    return direction, _Leaf(mu, nu, _Sides(*sides), _Sides(*q))


@dataclasses.dataclass(frozen=True, eq=False)
class _Soap:
    b1: float | jax.Array
    b2: float | jax.Array
    eps: float | jax.Array
    frequency: int
    largest: int
    axes: MatrixAxes

    def init(self, params: optax.Params) -> SoapState:
        """Return zeros; the first step computes the eigenvectors."""
        trees.check_params(params)
        axes = self.axes.of(params)

        def zeros(path: str, p: jax.Array) -> tuple[jax.Array, ...]:
            moment = jnp.zeros_like(p, jnp.float32)
            sides = self._sides(axes.get(path), p.shape)
            squares = [jnp.zeros((count, n, n) if n else (), jnp.float32) for count, n in sides]
            return moment, moment, *squares, *squares

        leaves = [zeros(path, p) for path, p in trees.named_leaves(params)]
        treedef: Structure = jax.tree.structure(params)
        fields = zip(*leaves, strict=True) if leaves else [()] * 6
        return SoapState(jnp.zeros((), jnp.int32), *map(treedef.unflatten, fields))

    def _sides(
        self, matrices: Matrices | None, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, int]]:
        """Yield (number of matrices, size) of L and R; the size is 0 if there is none."""
        for size in (0, 0) if matrices is None else matrices.fans(shape):
            count = 0 if matrices is None else matrices.count(shape)
            yield count, size if size <= self.largest else 0

    def update(
        self, updates: optax.Updates, state: SoapState, params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, SoapState]:  # fmt: skip
        """Return the direction of each parameter, zeros in the first step, and the new state."""
        trees.check_state(state, SoapState)
        axes, leaves = self.axes.of(updates), trees.named_leaves(updates)
        count, h = state.count, self._hyperparameters(state.count)
        basis = jnp.where(count == 0, 2, jnp.where(count % self.frequency == 0, 1, 0))
        fields = [jax.tree.leaves(tree) for tree in state[1:]]
        directions, new = [], []
        for (path, g), mu, nu, left, right, *q in zip(leaves, *fields, strict=True):
            leaf, wide = _Leaf(mu, nu, _Sides(left, right), _Sides(*q)), g.astype(jnp.float32)
            if path in axes:
                step, of = functools.partial(_step_matrices, axes[path]), sharding_of(g)
                replicated = _Sides(None, None)
                shardings = of, _Leaf(of, of, replicated, replicated)
                with jax.default_matmul_precision("float32"):
                    direction, leaf = left_to_xla(step, shardings, wide, leaf, basis, h)
            else:
                direction, mu, nu = _adam(wide, leaf.mu, leaf.nu, leaf.q, h)
                leaf = leaf._replace(mu=mu, nu=nu)
            directions.append(direction.astype(g.dtype))
            new.append((leaf.mu, leaf.nu, *leaf.sides, *leaf.q))
        treedef: Structure = jax.tree.structure(updates)
        columns = zip(*new, strict=True) if new else [()] * 6
        after = SoapState(optax.safe_increment(count), *map(treedef.unflatten, columns))
        return treedef.unflatten(directions), after

    def _hyperparameters(self, count: jax.Array) -> Arrays:
        steps = jnp.maximum(count, 1)  # of the moments, which start with the second step
        b1, b2 = ("b1", self.b1), ("b2", self.b2)
        return {
            "b1": as_f32(*b1), "one_minus_b1": complement(*b1),
            "b2": as_f32(*b2), "one_minus_b2": complement(*b2), "eps": as_f32("eps", self.eps),
            "mu_bias_correction": 1 / bias_correction(*b1, steps),
            "nu_bias_correction": 1 / bias_correction(*b2, steps),
            "not_first": (count > 0).astype(jnp.float32),
        }  # fmt: skip


def scale_by_soap(
    b1: float | jax.Array = 0.95,
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10_000,
    *,
    muon_weight_dimension_numbers: Dimensions = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescale gradients by SOAP, with an f32 state.

    Only the direction of `flash_soap`, whose docstring has the mathematics and the arguments. Its
    state is that of an ordinary optax transformation, for `compress_state` or on its own: for a
    matrix of shape (m, n) 4 (2 + 2 m / n + 2 n / m) bytes per parameter.

    Args:
      b1: decay of M, in [0, 1).
      b2: decay of V, L and R, in [0, 1).
      eps: added to the root of V.
      precondition_frequency: number of steps between two bases.
      max_precondition_dim: the largest side of a matrix that has a preconditioner.
      muon_weight_dimension_numbers: the axes of matrices, as in `flash_muon`.

    Returns:
      An optax transformation: `update` returns the direction; multiply it by the learning rate and
      subtract.

    Raises:
      ValueError: for a hyperparameter out of range.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_soap(), optax.scale_by_learning_rate(3e-3))
      >>> tx.init({"w": jnp.ones((32, 64))})[0].left["w"].shape
      (1, 32, 32)
    """
    check_range("b1", b1, 0.0, 1.0)
    check_range("b2", b2, 0.0, 1.0)
    for name, value in (
        ("precondition_frequency", precondition_frequency),
        ("max_precondition_dim", max_precondition_dim),
    ):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
    soap = _Soap(
        b1, b2, eps, precondition_frequency, max_precondition_dim,
        MatrixAxes(muon_weight_dimension_numbers),
    )  # fmt: skip
    return optax.GradientTransformationExtraArgs(soap.init, soap.update)


def flash_soap(
    learning_rate: ScalarOrSchedule = 3e-3,
    b1: float | jax.Array = 0.95,
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 1e-2,
    mask: optax.MaskOrFn = None,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10_000,
    *,
    muon_weight_dimension_numbers: Dimensions = None,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    r"""SOAP with 8-bit moments and preconditioners, and split master weights.

    .. math::
      L_t = b_2 L_{t-1} + (1-b_2) G_t G_t^\top, \quad
      R_t = b_2 R_{t-1} + (1-b_2) G_t^\top G_t, \quad
      M_t = b_1 M_{t-1} + (1-b_1) G_t, \\
      V_t = b_2 V_{t-1} + (1-b_2) (Q_L^\top G_t Q_R)^2, \quad
      \theta_t = \theta_{t-1} - \eta_t \left(Q_L
      \frac{Q_L^\top \hat M_t Q_R}{\sqrt{\hat V_t} + \epsilon} Q_R^\top
      + \lambda \theta_{t-1}\right)

    for matrices: Adam in the eigenbasis of Shampoo's preconditioners (SOAP, Algorithm 3). The first
    step computes :math:`Q_L` and :math:`Q_R`, the eigenvectors of :math:`L` and :math:`R`, and
    moves nothing. Every `precondition_frequency` steps they are replaced by one orthogonal
    iteration, the QR decomposition of :math:`L Q_L` (Algorithm 4), in f32. Adam for all other
    parameters.

    Args:
      learning_rate: number, f32 scalar or schedule.
      b1: decay of M, in [0, 1).
      b2: decay of V, L and R, in [0, 1).
      eps: added to the root of V.
      weight_decay: decoupled, times the learning rate.
      mask: tree of bools, or a function of the parameters: where weight decay applies.
      precondition_frequency: number of steps between two bases.
      max_precondition_dim: the largest side of a matrix that has a preconditioner; longer sides
        (the vocabulary of an embedding) are not rotated.
      muon_weight_dimension_numbers: the axes of matrices, as in `flash_muon`; by default matrices
        are recognised by their names and shapes, and stacked layers are one matrix each.
      storage: codecs, group size, master weights, rounding, seed and policy. L, R and their
        eigenvectors are stored like `mu`.

    Returns:
      An optax transformation. `lowmem.step` steps it without a kernel: products and QR
      decompositions take most of the time.

    Raises:
      ValueError: for a hyperparameter out of range.

    Numerics: products and decompositions are in f32. Decoded eigenvectors Q are orthogonal to about
    2 % (the largest singular value of Q^T Q - I); each decomposition starts from them.

    Memory: for a matrix of shape (m, n), 2 (weight) + 1 (correction) + 2.19 (M and V) bytes, and
    2.13 (m / n + n / m) bytes: 9.4 bytes if m = n. In f32, SOAP takes 28 bytes.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_soap(3e-3)
      >>> params, state = lowmem.init(tx, {"w": jax.random.normal(jax.random.key(0), (64, 128))})
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((64, 128))}, state, params)

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024, arXiv 2409.11321.
      Deviations: M is kept in the parameter's own basis, where the authors' code rotates it at each
      change of the basis; the two are equal for orthogonal bases. Weight decay uses the weight
      before the step. Axes of convolutions are not merged.
    """
    storage = completed(storage)
    assert storage.group_size is not None
    scale = scale_by_soap(
        b1, b2, eps, precondition_frequency, max_precondition_dim,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
    )  # fmt: skip
    tx: optax.GradientTransformation = optax.chain(
        scale,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    of_mu = ("mu", "left", "right", "q_left", "q_right")
    every = {**dict.fromkeys(of_mu, storage.mu), "nu": storage.nu}
    codecs: dict[str, PyTree] = {name: codec for name, codec in every.items() if codec is not None}
    if codecs:
        tx = compress_state(
            tx, group_size=storage.group_size, rounding=storage.rounding, seed=storage.seed,
            policy=storage.policy, **codecs,
        )  # fmt: skip
    if storage.master_weight_bits is None:
        if storage.master_rounding == "stochastic":
            raise ValueError(
                "flash_soap rounds bf16 weights without master weights to nearest: use "
                "Storage(master_weight_bits=24), or master_rounding=None."
            )
        return optax.with_extra_args_support(tx)
    return split_master_weights(
        tx, storage.master_weight_bits, split=storage.split, update_dtype=storage.update_dtype,
        rounding=storage.master_rounding or "stochastic", seed=storage.seed,
        group_size=storage.group_size,
    )  # fmt: skip
