"""The arithmetic of an optimizer step, independent of how its slots are stored."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.optim.step.matrix_axes import Matrices

OF_BLOCK = "of_block"  # the operand that `prepare` returns for blocks: one value per block


@dataclasses.dataclass(frozen=True)
class Slot:
    """A state field with one value per element of a parameter, or per block of elements."""

    name: str  # `mu` or `nu`: the field of `Storage` that has its codec
    signed: bool  # whether its values may be negative
    blockwise: bool = False  # whether the elements of a `Block` share one value
    skips_matrices: bool = False  # whether leaves that are matrices do not have it
    compressed: bool = True  # whether its codec is used; else its values are f32


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """Elementwise f32 arithmetic of a step: pure jnp, called by the XLA path and by kernels."""

    # what `prepare` reads before `update`: `leaf` (an additional pass over gradient and slots),
    # `blocks` (an additional pass over the gradient), or None; `matrices` marks a `MatrixRule`
    prepares: ClassVar[str | None] = None

    @property
    @abc.abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the rule, in the order of its state's fields."""

    @property
    @abc.abstractmethod
    def state_type(self) -> Any:  # a type[NamedTuple], which mypy would not let us call
        """The NamedTuple of the state: count, seed, slots, their scales, correction."""

    @abc.abstractmethod
    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        """Return the direction (to be multiplied by -lr) and the new slots, all f32 of g's shape.

        `slots` are decoded, without the block-wise ones. `h` are the step's hyperparameters, f32
        scalars, and the operands that `prepare` returned, which broadcast to the elements.
        """

    def for_leaf(self, matrices: Matrices | None) -> "UpdateRule":
        """Return the rule for a leaf, given its matrices or None; by default this rule."""
        return self

    def hyperparameters_of(self, matrices: Matrices | None, h: Arrays) -> Arrays:
        """Select the hyperparameters of the rule `for_leaf`, under the names that it uses."""
        return h

    def prepare(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[Arrays, Arrays]:
        """Return operands of `update` that depend on many elements, and the new block-wise slots.

        For `leaf`, g is the gradient of a whole leaf, and the slots are as in `update`. For
        `blocks`, g is the mean of its square over each block, and slots are the block-wise ones.
        """
        return {}, {}

    def momentum_divisor(self, slots: Arrays, h: Arrays) -> jax.Array:
        """Return by what the slot mu is divided in the direction; `slots` are the new values.

        Raises for a rule whose direction is not proportional to mu.
        """
        name = type(self).__name__
        raise NotImplementedError(f"the direction of {name} is not proportional to a momentum")

    def accumulating(self, h: Arrays, first: jax.Array, every: int) -> Arrays:
        """Return `h` for one of `every` micro-batches accumulated into the moments of one step.

        Raises for a rule whose direction needs the whole gradient at once.
        """
        raise ValueError(
            f"{type(self).__name__} needs the whole gradient at once, so micro-batches cannot go "
            "into its moments: use accumulate_gradients(..., into='bfloat16')."
        )


class MatrixRule(UpdateRule):
    """A rule that computes the direction from whole matrices, after an elementwise `update`."""

    prepares = "matrices"

    @property
    @abc.abstractmethod
    def dtype(self) -> DTypeLike:
        """The dtype of the matrices: the dtype in which the results of `update` are stored."""

    @property
    def of_whole_leaf(self) -> bool:
        """Return whether `scale` depends on all matrices of a leaf jointly."""
        return False

    def block(self, matrices: Matrices) -> Block | None:
        """Return which elements of a leaf share a value of block-wise slots."""
        return None

    def scale_blocks(
        self, matrices: Matrices, direction: jax.Array, slots: Arrays, h: Arrays
    ) -> tuple[jax.Array, Arrays]:
        """Return a factor of each block's direction, f32, and the new block-wise slots."""
        raise NotImplementedError(f"{type(self).__name__} has no block-wise slots")

    @abc.abstractmethod
    def of_matrices(self, stack: jax.Array, h: Arrays) -> jax.Array:
        """Return the directions of a stack [matrices, rows, columns], in its dtype."""

    @abc.abstractmethod
    def scale(
        self, matrices: Matrices, before: jax.Array, direction: jax.Array, h: Arrays
    ) -> jax.Array:
        """Return the factor of a leaf's learning rate, f32 [].

        `before` is the direction that `update` returned, `direction` the result of `of_matrices`.
        """


class AnyHyperparameters(Mapping[str, jax.Array]):
    """A mapping that contains every name, so that a traced step includes all its branches."""

    def __getitem__(self, name: str) -> jax.Array:
        return jnp.float32(0.5)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
