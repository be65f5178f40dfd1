"""The arithmetic of an optimizer step, apart from how its slots are stored."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from optax_lowmem._src.step.matrix_axes import Matrices

OF_BLOCK = "of_block"  # the operand that `prepare` gives of blocks: one value each


@dataclasses.dataclass(frozen=True)
class Slot:
    """A state field with one value per parameter, or one a block of them.

    Attributes:
      name: `mu` or `nu`.
      signed: whether its values may be negative.
      shared: by the elements of a `Block`.
      of_rest: kept of leaves that are no matrices alone, by a rule that tells them apart.
    """

    name: str
    signed: bool
    shared: bool = False
    of_rest: bool = False


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """f32 arithmetic of one step on elements; pure jnp, called by the XLA path and by kernels.

    Attributes:
      prepares: what `prepare` looks at before any `update`: `leaf`, which costs a pass over
        gradient and slots, `blocks`, one over the gradient, or None. `matrices` is of a
        `MatrixRule`, whose direction is there after a pass of its own.
    """

    prepares: ClassVar[str | None] = None

    @property
    @abc.abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the rule, in the order of its state."""

    @property
    def elementwise_slots(self) -> int:
        """Return the number of slots with one value per element."""
        return sum(not slot.shared for slot in self.slots)

    @property
    @abc.abstractmethod
    def state_type(self) -> Any:  # a type[NamedTuple], which mypy would not let us call
        """The NamedTuple of the state: count, seed, slots, their scales, correction."""

    @abc.abstractmethod
    def update(
        self, g: jax.Array, slots: Mapping[str, jax.Array], h: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Direction (to be subtracted times the learning rate) and new slots.

        Args:
          g: gradient, f32.
          slots: decoded slots, f32, of g's shape; not the shared ones.
          h: the step's hyperparameters, f32 scalars, which may be traced, and the operands of
            `prepare`, which broadcast to the elements.
        """

    def of_leaf(self, matrices: Matrices | None) -> "UpdateRule":
        """Return the rule of a leaf of these matrices, or of none: itself, unless it has parts."""
        del matrices
        return self

    def hyperparameters_of(
        self, matrices: Matrices | None, h: Mapping[str, jax.Array]
    ) -> Mapping[str, jax.Array]:
        """Those of `h` that are of the rule `of_leaf`, by its names."""
        del matrices
        return h

    def prepare(
        self, g: jax.Array, slots: Mapping[str, jax.Array], h: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Operands of `update` that depend on many elements, and the new shared slots.

        `update` finds the operands in h, broadcast to the elements.

        Args:
          g: gradient of a whole `leaf`; of `blocks` the mean of its square over each.
          slots: decoded slots with a value an element; of `blocks` the shared ones.
          h: as of `update`.
        """
        return {}, {}

    def accumulating(
        self, h: Mapping[str, jax.Array], first: jax.Array, every: int
    ) -> dict[str, jax.Array]:
        """`h` for one of `every` micro-batches that all go into the moments of one step.

        Raises:
          ValueError: for a rule whose direction needs the whole gradient at once.
        """
        raise ValueError(
            f"{type(self).__name__} needs the whole gradient at once, so micro-batches cannot go "
            "into its moments: use accumulate_gradients(..., into='bfloat16')."
        )


class MatrixRule(UpdateRule):
    """A rule whose direction is taken of whole matrices, of what `update` gives of each element."""

    prepares = "matrices"

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the matrices, and so of what `update` gives of each element."""

    @property
    def of_whole_leaf(self) -> bool:
        """Return whether `scale` depends on all matrices of a leaf together."""
        return False

    @abc.abstractmethod
    def of_matrices(self, stack: jax.Array, h: Mapping[str, jax.Array]) -> jax.Array:
        """The directions of [matrices, rows, columns], in the same dtype."""

    @abc.abstractmethod
    def scale(
        self,
        matrices: Matrices,
        before: jax.Array,
        direction: jax.Array,
        h: Mapping[str, jax.Array],
    ) -> jax.Array:
        """A factor of the learning rate of a leaf, f32 [].

        Args:
          matrices: of the leaf.
          before: what `update` gave of its elements.
          direction: what `of_matrices` made of that.
          h: as of `update`.
        """
