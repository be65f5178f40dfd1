"""Backward stage by stage, with the update of what no earlier stage reads in between."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.release import stack as stacks
from optax_lowmem._src.release.model import Layered, Parts, Stack, floats, reads, with_floats
from optax_lowmem._src.release.run import Run


def backward(model: Layered, run: Run, batch: Any) -> Any:
    """Loss (and aux); afterwards all leaves of `run` are updated."""
    parts = run.parts
    reading = [_positions(reads(lambda rest: model.first(rest, batch), parts.rest()))]
    x, pull_first = _first(model, parts, batch, reading[0])
    inputs = []
    for path, layer in model.layers.items():
        stacked = parts.stacks[path].tree
        own = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), stacked)

        def one(rest: Any, own: Any, x: Any, layer: Callable = layer) -> Any:
            return layer(own, rest, x, batch)

        reading.append(_positions(reads(one, parts.rest(), own, x)))
        x, saved = _forward(layer, parts, stacked, x, batch)
        inputs.append(saved)
    reading.append(_positions(reads(lambda rest, x: model.last(rest, x, batch), parts.rest(), x)))
    # a gradient is complete after the earliest stage that reads the leaf
    earliest = {at: stage for stage in reversed(range(len(reading))) for at in reading[stage]}
    due = [[at for at, first in earliest.items() if first == s] for s in range(len(reading))]
    due[0] += [at for at in range(len(parts.leaves)) if at not in earliest]

    loss, gradients, dx = _last(model, parts, x, batch, reading[-1])
    run.add(reading[-1], gradients)
    dx = run.update_rest(due[-1], dx)
    stages = list(zip(model.layers.items(), inputs, reading[1:-1], due[1:-1], strict=True))
    for (path, layer), saved, positions, done in reversed(stages):
        dx = _backward_stack(run, layer, parts.stacks[path], saved, dx, batch, positions)
        dx = run.update_rest(done, dx)
    run.add(reading[0], pull_first(dx)[0])
    run.update_rest(due[0], ())
    return loss


def _positions(flags: Sequence[bool]) -> list[int]:
    return [at for at, flag in enumerate(flags) if flag]


def _first(model: Layered, parts: Parts, batch: Any, positions: list[int]) -> tuple[Any, Any]:
    """x, and the function from its gradient to those of what was read."""

    def run(own: list[jax.Array]) -> tuple[Any, Any]:
        x = model.first(parts.rest(dict(zip(positions, own, strict=True))), batch)
        return floats(x), x

    _, pull, x = jax.vjp(run, [parts.leaves[at] for at in positions], has_aux=True)
    return x, pull


def _forward(layer: Callable, parts: Parts, stacked: Any, x: Any, batch: Any) -> tuple[Any, Any]:
    """x after all layers, and the stacked inputs of each."""

    def body(x: Any, own: Any) -> tuple[Any, Any]:
        return layer(own, parts.rest(), x, batch), x

    return lax.scan(body, x, stacked)


def _last(
    model: Layered, parts: Parts, x: Any, batch: Any, positions: list[int]
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """Loss (and aux), gradients of what was read and of x."""

    def run(own: list[jax.Array], values: list[jax.Array]) -> tuple[Any, Any]:
        rest = parts.rest(dict(zip(positions, own, strict=True)))
        found = model.last(rest, with_floats(x, values), batch)
        return found if model.has_aux else (found, None)

    own = [parts.leaves[at] for at in positions]
    loss, pull, aux = jax.vjp(run, own, floats(x), has_aux=True)
    if jnp.shape(loss) or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"`last` gives a loss, one float; this is {loss.dtype}{list(jnp.shape(loss))}. For "
            "(loss, aux) say has_aux=True."
        )
    gradients, dx = pull(jnp.ones_like(loss))
    return (loss, aux) if model.has_aux else loss, gradients, dx


def _backward_stack(
    run: Run,
    layer: Callable,
    stack: Stack,
    saved: Any,
    dx: list[jax.Array],
    batch: Any,
    positions: list[int],
) -> list[jax.Array]:
    """The gradient of what went into a stack; its leaves are updated on the way."""
    parts, count = run.parts, stack.layers
    read_by_all = [parts.leaves[at] for at in positions]
    treedef: Any = jax.tree.structure(stack.tree)

    def body(k: jax.Array, carry: Any) -> Any:
        dx, totals, leaves = carry
        i = count - 1 - k
        weights = [stacks.read(weight, i, count) for weight, *_ in leaves]
        x = jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, i, 0, keepdims=False), saved)

        def forward(own: Any, read: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
            rest = parts.rest(dict(zip(positions, read, strict=True)))
            return floats(layer(own, rest, with_floats(x, values), batch))

        of_layer = treedef.unflatten([w[0] for w in weights])
        _, pull = jax.vjp(forward, of_layer, read_by_all, floats(x))
        gradients, of_rest, dx = pull(dx)
        totals = [total + g for total, g in zip(totals, of_rest, strict=True)]
        gradients = [run.each(g) for g in jax.tree.leaves(gradients)]
        # fenced apart from the weights: slots need not be there while gradients are computed
        slots = [stacks.read(own, i, count) for _, *own in leaves]
        states, shared = (list(field) for field in zip(*slots, strict=True))
        new = run.update_layer(stack, i, gradients, (weights, states, shared))
        rows = zip(leaves, zip(*new, strict=True), strict=True)
        return dx, totals, [stacks.write(leaf, part, i, count) for leaf, part in rows]

    leaves = list(zip(*run.of(stack.indices), strict=True))
    totals = [jnp.zeros_like(x) for x in read_by_all]
    dx, totals, leaves = lax.fori_loop(0, count, body, (dx, totals, leaves))
    run.set(stack.indices, *zip(*leaves, strict=True))
    run.add(positions, totals)
    return dx
