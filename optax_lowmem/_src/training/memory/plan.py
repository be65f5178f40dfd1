"""Plan the memory of a training step from shapes alone: what fits, and the largest batch."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.training.memory.state import UNITS, Report, report, unit_of

RESIDENT, RELEASE, OFFLOAD, STREAM = "resident", "release", "offload", "stream"
STREAM_FROZEN = "stream-frozen"
MODES = (RESIDENT, RELEASE, OFFLOAD, STREAM, STREAM_FROZEN)
_IN_FLIGHT = 3  # layers that are copied and on the device: one copied in, one at work, one out
_MOST = 2**16  # rows of a batch


class Activations(NamedTuple):
    """Bytes of activations, and of gradients outside the stacked layers, at points of a step.

    Attributes:
      loss: while the loss and the gradient of its logits are computed.
      layers: in the backward pass of a layer.
      end: in the backward pass of what comes before the layers.
    """

    loss: int
    layers: int
    end: int


class Fixed(NamedTuple):
    """Bytes on the device, beside activations, at a point of a step."""

    weights: int
    state: int
    gradients: int


class Copies(NamedTuple):
    """Bytes that a step copies between host and device, beside inputs of layers.

    Attributes:
      forward: to the device in the forward pass: weights.
      backward: to the device in the backward pass: weights and state.
      back: from the device in the backward pass.
    """

    forward: int
    backward: int
    back: int

    def tokens(self, parameters: int, flops: float, link: float) -> float:
        """Return the tokens per step whose computation takes as long as the copies.

        A forward pass takes 2 FLOP per parameter and token, a backward pass 4, and 2 more since
        layers are recomputed. Both passes must last as long as their copies.

        Args:
          parameters: number of parameters.
          flops: FLOP per second of the device.
          link: bytes per second between host and device, in each direction.
        """
        each = max(self.forward / 2, max(self.backward, self.back) / 6) / parameters
        return each * flops / link


@dataclasses.dataclass(frozen=True)
class ModePlan:
    """Bytes of a training step in one mode.

    Attributes:
      name: `resident`: all gradients exist at once; `release`: those of one layer; `offload`:
        likewise, and the state is on the host, but for that of a few layers; `stream`: likewise,
        and so are the weights; `stream-frozen`: the frozen weights are on the host, but for a few
        layers, and the trained ones and their state are not.
      fixed: bytes of weights (frozen ones included), state and gradients at the points of
        `Activations`.
      activations: bytes of activations by batch size.
      host: bytes on the host, of the state, of weights and state, or of frozen weights.
      copies: what a step copies of them.
      batch: largest batch that fits; 0 if none does.
    """

    name: str
    fixed: tuple[Fixed, Fixed, Fixed]
    activations: Callable[[int], Activations]
    host: int = 0
    copies: Copies = Copies(0, 0, 0)
    batch: int = 0

    def peak(self, batch: int) -> tuple[int, int, int, int]:
        """Return the bytes of weights, state, gradients and activations at the peak of a step."""
        points = zip(self.fixed, self.activations(batch), strict=True)
        return max(((*fixed, size) for fixed, size in points), key=sum)

    def total_bytes(self, batch: int) -> int:
        """Return the bytes of the device at the peak of a step with `batch` rows."""
        return sum(self.peak(batch))


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
        heads = ("weights", "state", "gradients", "activations", "total", "on the host")
        yield f"{unit:<15}" + "".join(f"{head:>13}" for head in heads) + "   largest batch"
        for mode in self.modes:
            batch = max(mode.batch, 1)
            sizes = (*mode.peak(batch), mode.total_bytes(batch), mode.host or None)
            cells = "".join(
                f"{'' if size is None else f'{size / UNITS[unit]:.2f}':>13}" for size in sizes
            )
            lacks = (mode.total_bytes(batch) - self.budget) / UNITS[unit]
            fits = str(mode.batch) if mode.batch else f"none: {lacks:.2f} {unit} too large"
            yield f"{mode.name:<15}{cells}   {fits}"


def plan(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    budget: int,
    activations: Callable[[int], int | Activations],
    frozen: optax.Params = (),
    stacks: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    accumulate: bool = False,
) -> Plan:
    """Plan the memory of a training step, from shapes alone.

    Args:
      tx: the optimizer.
      params: the trained weights as stored, or their `jax.eval_shape`.
      budget: bytes of the device that the step may use.
      activations: batch -> bytes of activations beside all gradients, such as those of
        `activation_report`; or `Activations`, which has the gradients outside the stacks.
      frozen: weights without gradient and state.
      stacks: paths of stacked layers, as in `release.Layered`.
      modes: of `resident`, `release`, `offload`, `stream` and `stream-frozen`; all but the first
        need stacks, which for the last one are in `frozen`.
      accumulate: whether a step adds up the gradients of several batches, in the dtype of the
        weights, or with `offload` and `stream` layer by layer in f32. `release` cannot, and is left
        out.

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
    rest_in_activations = isinstance(activations(1), Activations)

    def of_batch(batch: int) -> Activations:
        size = activations(batch)
        return size if isinstance(size, Activations) else Activations(0, size, 0)

    of_params = report(tx, params)
    weights, state = of_params.params_bytes, of_params.state_bytes
    base = trees.nbytes(frozen)
    hosts = {
        OFFLOAD: (state, Copies(0, state, state)),
        STREAM: (weights + state, Copies(weights, weights + state, weights + state)),
        STREAM_FROZEN: (base, Copies(base, base, 0)),
    }
    plans = []
    leaves, frozen_leaves = (dict(trees.named_leaves(tree)) for tree in (params, frozen))
    for name, fixed in _fixed(
        of_params, leaves, frozen_leaves, stacks, rest_in_activations, accumulate
    ):
        if name in modes:
            mode = ModePlan(name, fixed, of_batch, *hosts.get(name, ()))
            largest = bisect.bisect_right(range(1, _MOST), budget, key=mode.total_bytes)
            plans.append(dataclasses.replace(mode, batch=largest))
    return Plan(budget, tuple(plans))


def _fixed(
    of_params: Report,
    params: dict[str, Any],
    frozen_params: dict[str, Any],
    stacks: Sequence[str],
    rest_in_activations: bool,
    accumulate: bool,
) -> Iterator[tuple[str, tuple[Fixed, Fixed, Fixed]]]:
    """Yield each mode with its bytes at the points of `Activations`: loss, layers and end.

    `rest_in_activations` means that `Activations` has the gradients of leaves outside the stacks.
    """
    trained, state = of_params.params_bytes, of_params.state_bytes
    by_stack, rest = _by_stack(params, of_params, stacks)
    missing = [path for path, layer in by_stack.items() if not layer.gradients]
    if missing:
        raise ValueError(f"there is no stack '{missing[0]}' in the parameters")
    frozen = sum(map(trees.nbytes, frozen_params.values()))
    weights, all_of_rest = trained + frozen, sum(leaf.gradients for leaf in rest)
    rest_gradients = 0 if rest_in_activations else all_of_rest
    earlier_batches = trained if accumulate else 0  # the sum of their gradients
    gradients = trained - all_of_rest + rest_gradients + earlier_batches
    backward = Fixed(weights, state, gradients)
    yield RESIDENT, (Fixed(weights, state, earlier_batches), backward, backward)
    if not stacks:
        return

    layer = max(by_stack.values(), key=sum)
    if not accumulate:
        # the layer's state, which the update replaces, is a copy
        in_layer = Fixed(weights, state + layer.state, layer.gradients + rest_gradients)
        yield RELEASE, (Fixed(weights, state, 0), in_layer, Fixed(weights, state, rest_gradients))

    # the state of a leaf outside the stacks is copied in after its gradient, and not beside that of
    # layers; gradients of several batches are added in f32: twice the bytes of 16-bit weights
    rest_leaf = max(rest, key=sum, default=Fixed(0, 0, 0))
    leaf_sum = 2 * rest_leaf.gradients if accumulate else 0
    layer_sum = 2 * layer.gradients if accumulate else layer.gradients
    layer_states = _IN_FLIGHT * layer.state
    # a copy of the layer's weights counts as gradients, whose size it has
    in_layer = Fixed(weights, layer_states, layer.weights + layer_sum + rest_gradients)
    end = Fixed(weights, rest_leaf.state, rest_gradients)
    yield OFFLOAD, (Fixed(weights, 0, leaf_sum), in_layer, end)

    # the last layer arrives while the loss is computed
    loss = Fixed(frozen + rest_leaf.weights + layer.weights, 0, leaf_sum)
    layer_weights = _IN_FLIGHT * layer.weights
    in_layer = Fixed(frozen + layer_weights, layer_states, layer_sum + rest_gradients)
    end = Fixed(frozen + rest_leaf.weights, rest_leaf.state, rest_gradients)
    yield STREAM, (loss, in_layer, end)

    frozen_by_stack, frozen_rest = _by_stack(frozen_params, None, stacks)
    frozen_layer = max(one.weights for one in frozen_by_stack.values())
    if frozen_layer:
        resident = trained + max((one.weights for one in frozen_rest), default=0)
        loss = Fixed(resident + frozen_layer, state, leaf_sum)
        in_layer = Fixed(
            trained + _IN_FLIGHT * frozen_layer, state + layer.state, layer_sum + rest_gradients
        )
        # the forward pass begins with the embedding, while two layers arrive
        begin = Fixed(resident + 2 * frozen_layer, state, 0)
        yield STREAM_FROZEN, (loss, in_layer, begin)


def _by_stack(
    leaves: dict[str, Any], of_params: Report | None, stacks: Sequence[str]
) -> tuple[dict[str, Fixed], list[Fixed]]:
    """Return the bytes of one layer of each stack, and of each leaf outside the stacks."""
    by_stack, rest = dict.fromkeys(stacks, Fixed(0, 0, 0)), []
    for path, leaf in leaves.items():
        size = trees.nbytes(leaf)
        state = sum(of_params.by_leaf[path].values()) - size if of_params else 0
        stack = next((s for s in stacks if path.startswith(f"{s}/")), None)
        if stack is None:
            rest.append(Fixed(size, state, size))
        else:
            one = size // leaf.shape[0], state // leaf.shape[0], size // leaf.shape[0]
            by_stack[stack] = Fixed(*map(sum, zip(by_stack[stack], one, strict=True)))
    return by_stack, rest
