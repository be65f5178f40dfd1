"""Plan the memory of a training step from shapes alone: what fits, and the largest batch."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.core import trees
from optax_lowmem._src.memory.state import UNITS, report, unit_of

RESIDENT, RELEASE = "resident", "release"
MODES = (RESIDENT, RELEASE)
_MOST = 2**16  # rows of a batch


class Activations(NamedTuple):
    """Bytes of activations at the two peaks of a step.

    Attributes:
      loss: while the loss and the gradient of its logits are computed, before other gradients.
      backward: beside the gradients of the weights.
    """

    loss: int
    backward: int


@dataclasses.dataclass(frozen=True)
class ModePlan:
    """Bytes of a training step in one mode.

    Attributes:
      name: `resident`: all gradients exist at once; `release`: those of one layer, and of what is
        outside the layers.
      weights: bytes of the weights, frozen ones included.
      state: bytes of the optimizer state.
      gradients: bytes of the gradients.
      activations: bytes of activations by batch size.
      batch: largest batch that fits; 0 if none does.
    """

    name: str
    weights: int
    state: int
    gradients: int
    activations: Callable[[int], Activations]
    batch: int = 0

    def total_bytes(self, batch: int) -> int:
        """Return the peak of a step with `batch` rows."""
        loss, backward = self.activations(batch)
        return self.weights + self.state + max(loss, self.gradients + backward)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The modes of a training step and what fits; print it for a table.

    Attributes:
      budget: bytes that the step may use.
      modes: a plan of each mode, the fastest first.
    """

    budget: int
    modes: tuple[ModePlan, ...]

    @property
    def best(self) -> ModePlan | None:
        """Return the first mode that fits, or None."""
        return next((mode for mode in self.modes if mode.batch), None)

    def __str__(self) -> str:
        """Return a table of the modes at their largest batch."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        unit = unit_of(self.budget)
        heads = ("weights", "state", "gradients", "activations", "total", "batch")
        first = f"{unit} of {self.budget / UNITS[unit]:.2f}"
        yield f"{first:<16}" + "".join(f"{head:>13}" for head in heads)
        for mode in self.modes:
            batch = max(mode.batch, 1)
            total = mode.total_bytes(batch)
            fixed = (mode.weights, mode.state, mode.gradients)
            sizes = (*fixed, max(total - sum(fixed), 0), total)
            cells = "".join(f"{size / UNITS[unit]:>13.2f}" for size in sizes)
            yield f"{mode.name:<16}{cells}{mode.batch or 'none fits':>13}"


def plan(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    budget: int,
    activations: Callable[[int], int | Activations],
    frozen: optax.Params = (),
    stacks: Sequence[str] = (),
    modes: Sequence[str] = MODES,
) -> Plan:
    """Plan the memory of a training step, from shapes alone.

    Args:
      tx: the optimizer.
      params: the trained weights as stored, or their `jax.eval_shape`.
      budget: bytes of the device that the step may use.
      activations: batch -> bytes of activations, such as those of `activation_report`; or
        `Activations`, if the loss is computed before the gradients need memory.
      frozen: weights without gradient and state.
      stacks: paths of stacked layers, as in `release.Layered`.
      modes: of `resident` and `release`; without stacks, `release` is left out.

    Returns:
      A `Plan`; print it for a table.

    Raises:
      ValueError: for an unknown mode, or a path that is not in the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
      >>> of_batch = lambda batch: batch * 2048 * 4096 * 2
      >>> plan = lowmem.memory.plan(
      ...     lowmem.flash_adamw(1e-3), params, budget=2**28, activations=of_batch
      ... )
      >>> plan.best.name, plan.best.batch
      ('resident', 8)
    """
    unknown = set(modes) - set(MODES)
    if unknown:
        raise ValueError(f"modes must be among {', '.join(MODES)}, got {sorted(unknown)}")
    sizes = {path: _bytes(leaf) for path, leaf in trees.named_leaves(params)}
    for path in stacks:
        if not any(name.startswith(f"{path}/") for name in sizes):
            raise ValueError(f"there is no stack '{path}' in the parameters")

    def of_batch(batch: int) -> Activations:
        size = activations(batch)
        return size if isinstance(size, Activations) else Activations(0, size)

    of_params = report(tx, params)
    weights = of_params.params_bytes + sum(map(_bytes, jax.tree.leaves(frozen)))
    gradients = {RESIDENT: sum(sizes.values())}
    if stacks:
        gradients[RELEASE] = _released(sizes, dict(trees.named_leaves(params)), stacks)
    plans = []
    for name in modes:
        if name in gradients:
            mode = ModePlan(name, weights, of_params.state_bytes, gradients[name], of_batch)
            plans.append(dataclasses.replace(mode, batch=_largest(mode, budget)))
    return Plan(budget, tuple(plans))


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _released(sizes: dict[str, int], leaves: dict[str, Any], stacks: Sequence[str]) -> int:
    """Return the bytes of the gradients outside the stacks, and of the largest layer."""
    of_stacks = dict.fromkeys(stacks, 0)
    rest = 0
    for path, size in sizes.items():
        stack = next((s for s in stacks if path.startswith(f"{s}/")), None)
        if stack is None:
            rest += size
        else:
            of_stacks[stack] += size // leaves[path].shape[0]
    return rest + max(of_stacks.values())


def _largest(mode: ModePlan, budget: int) -> int:
    """Return the largest batch that fits, by bisection."""
    fits, too_large = 0, _MOST
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if mode.total_bytes(middle) <= budget:
            fits = middle
        else:
            too_large = middle
    return fits
