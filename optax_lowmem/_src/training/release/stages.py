"""The stages of a model: what they read, their values and their gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.training.release.model import (
    Layered,
    LayerFunction,
    Parts,
    floats,
    reads,
    with_floats,
)
from optax_lowmem._src.training.release.trace import TracedLoss


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which leaves of the rest each stage reads, and after which their gradients are complete.

    All have an entry for the first stage, each stack, and the last stage: positions in the rest.
    `trained` are those of `reading` that have gradients.
    """

    reading: list[list[int]]
    trained: list[list[int]]
    due: list[list[int]]

    @classmethod
    def make(cls, model: Layered | TracedLoss, parts: Parts, batch: object) -> "Schedule":
        """Trace the stages."""
        rest = parts.rest()
        of_first, x = reads(model.first, rest, batch)
        reading = [of_first]
        for path, layer in model.layers.items():
            stacked = parts.stacks[path].tree if path in parts.stacks else None
            weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), stacked)
            of_layer, after = reads(
                lambda rest, weights, x, batch, layer=layer: layer(weights, rest, x, batch),
                rest, weights, x, batch,
            )  # fmt: skip
            reading.append(of_layer)
            x = after if stacked is None else x  # the layers of a stack keep the shape of x
        reading.append(reads(model.last, rest, x, batch)[0])
        # a gradient is complete after the earliest stage that reads the leaf
        trained = list(map(parts.are_trained, reading))
        earliest = {at: stage for stage in reversed(range(len(trained))) for at in trained[stage]}
        due = [[at for at, first in earliest.items() if first == s] for s in range(len(trained))]
        due[0] += [at for at in parts.are_trained(range(len(parts.leaves))) if at not in earliest]
        return cls(reading, trained, due)


def first(
    model: Layered | TracedLoss, parts: Parts, batch: object, positions: list[int]
) -> tuple[Any, Any]:
    """Return x, and the pullback from its gradient to those of the leaves at `positions`."""

    def run(read: list[jax.Array]) -> tuple[Any, Any]:
        x = model.first(parts.rest(dict(zip(positions, read, strict=True))), batch)
        return floats(x), x

    _, pull, x = jax.vjp(run, [parts.leaves[at] for at in positions], has_aux=True)
    return x, pull


def pull_layer(
    layer: LayerFunction,
    parts: Parts,
    weights: Any,
    positions: list[int],
    x: object,
    dx: list[jax.Array],
    batch: object,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Return the gradients of a layer, of the leaves at `positions`, and of its input x."""

    def forward(weights: Any, read: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
        rest = parts.rest(dict(zip(positions, read, strict=True)))
        return floats(layer(weights, rest, with_floats(x, values), batch))

    read = [parts.leaves[at] for at in positions]
    _, pull = jax.vjp(forward, weights, read, floats(x))
    gradients, rest_gradients, dx = pull(dx)
    return jax.tree.leaves(gradients), rest_gradients, dx


def last(
    model: Layered | TracedLoss, parts: Parts, x: object, batch: object, positions: list[int]
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """Return the loss (and aux), and the gradients of leaves and of x."""

    def run(read: list[jax.Array], values: list[jax.Array]) -> tuple[Any, Any]:
        rest = parts.rest(dict(zip(positions, read, strict=True)))
        result = model.last(rest, with_floats(x, values), batch)
        return result if model.has_aux else (result, None)

    read = [parts.leaves[at] for at in positions]
    loss, pull, aux = jax.vjp(run, read, floats(x), has_aux=True)
    if not isinstance(loss, jax.Array) or loss.ndim or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"the loss must be one float; this is {jax.tree.map(jax.typeof, loss)}. "
            "For (loss, aux) pass has_aux=True."
        )
    gradients, dx = pull(jnp.ones_like(loss))
    return (loss, aux) if model.has_aux else loss, gradients, dx
