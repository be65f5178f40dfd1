"""The compiled stages of the step of gradient release that streams from host memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.host import Stage
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step.state import Row, from_row, to_row
from optax_lowmem._src.optim.wrappers.accumulate import micro_batches_of
from optax_lowmem._src.optim.wrappers.chain import clipping_factor
from optax_lowmem._src.training.release import stages
from optax_lowmem._src.training.release.model import Layered, Parts, floats, reads
from optax_lowmem._src.training.release.optimizer import Optimizer
from optax_lowmem._src.training.release.update import Plans, Update, squares_of, write_layer


@dataclasses.dataclass
class Options:
    """The arguments of `train_step` that the stages of a step use."""

    optimizer: Optimizer
    model: Layered
    each: Callable[[jax.Array], jax.Array]
    per_layer: bool
    implementation: str | None
    # clips the gradient of each layer, and of each leaf of the rest, by its norm
    limit: float | None
    micro_batches: int
    at_once: int  # number of micro-batches that pass through the model together


class Programs:
    """The compiled stages of a step, for some shapes.

    Attributes:
      plans: of each parameter, whole and per layer.
      parts: of the parameters, trained and frozen.
      schedule: what each stage reads of the rest, and when gradients are complete.
      pulling: what the backward pass of the first stage reads of the rest.
      input_bytes: of a layer's input for one micro-batch.
      has_room: whether there is host memory for inputs and gradients.
    """

    def __init__(
        self, step: Options, params: optax.Params, frozen: optax.Params, state: Any, batch: object
    ):
        self.step, self.model, engine = step, step.model, step.optimizer.engine
        self.parts = self.model.take_apart(params, frozen)
        self.plans = Plans.make(engine, self.parts, params, state, step.per_layer)
        engine.unpack(state, self.plans.whole, params)  # checks the state
        self.schedule = stages.Schedule.make(self.model, self.parts, batch)
        x = jax.eval_shape(self.model.first, self.parts.rest(), batch)
        of_first = self.schedule.trained[0]
        self.pulling, _ = reads(
            lambda rest, dx, batch: stages.first(
                self.model, self._with(range(len(self.parts.leaves)), jax.tree.leaves(rest)),
                batch, of_first,
            )[1](dx),
            self.parts.rest(), floats(x), batch,
        )  # fmt: skip
        self.input_bytes, self.has_room = trees.nbytes(x), False
        all_floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))
        number, at_once = step.micro_batches, step.at_once
        fewest = min(number, at_once, number % at_once or at_once)  # in a pass
        # with fewer, `RunAhead` waits for a dx whose place the next layer's has taken
        donated = (4, 6) if fewest >= host.AHEAD else 6
        self.first = Stage(self._first)
        self.forward = Stage(self._forward, static_argnums=0)
        self.value = Stage(self._value)
        self.last = Stage(self._last, donate_argnums=(1, 3) if all_floats else 3)
        self.back = Stage(self._back, static_argnums=0, donate_argnums=donated)
        self.back_first = Stage(self._back_first, donate_argnums=3)
        self.update_layer = Stage(self._update_layer, static_argnums=0, donate_argnums=(1, 3))
        self.update_rest = Stage(self._update_rest, static_argnums=0, donate_argnums=(1, 2))
        self.add = Stage(_added, donate_argnums=0)
        self.squares = Stage(self._squares)
        self.factor = Stage(self._factor)

    # ---- forward and backward; `read` are the weights outside of layers that a stage reads ----

    def _first(self, read: list[jax.Array], batch: object) -> Any:
        return self.model.first(self._of(0, read).rest(), batch)

    def _forward(
        self, path: str, weights: Any, read: list[jax.Array], x: Any, batch: object
    ) -> Any:
        rest = self._of(self.stage_of(path), read).rest()
        return self.model.layers[path](self._of_layer(path, weights), rest, x, batch)

    def _value(self, read: list[jax.Array], x: Any, batch: object) -> Any:
        return self.model.last(self._of(-1, read).rest(), x, batch)

    def _last(self, read: list[jax.Array], x: Any, batch: object, total: Any) -> Any:
        trained = self.schedule.trained[-1]
        loss, gradients, dx = stages.last(self.model, self._of(-1, read), x, batch, trained)
        in_parts = self.step.micro_batches > 1 and self.model.has_aux
        return loss[0] if in_parts else loss, self._mean(total, gradients), dx

    def _back(
        self, path: str, weights: Any, read: Any, x: Any, dx: Any, batch: object, total: Any
    ) -> Any:
        stage = self.stage_of(path)

        def layer(trained: Any, *args: Any) -> Any:
            return self.model.layers[path](self._of_layer(path, weights, trained), *args)

        trained = [w[0] for w in self.parts.stacks[path].trained_of(weights)]
        *gradients, dx = stages.pull_layer(
            layer, self._of(stage, read), trained, self.schedule.trained[stage], x, dx, batch
        )
        return self._mean(total, gradients), dx

    def _back_first(self, read: list[jax.Array], dx: Any, batch: object, total: Any) -> Any:
        parts = self._with(self.pulling, read)
        _, pull = stages.first(self.model, parts, batch, self.schedule.trained[0])
        return self._mean(total, pull(dx)[0])

    def stage_of(self, path: str) -> int:
        """Return the number of the stage of a stack's layers; 0 is the first stage."""
        return 1 + list(self.model.layers).index(path)

    def _of(self, stage: int, read: Sequence[jax.Array]) -> Parts:
        return self._with(self.schedule.reading[stage], read)

    def _with(self, positions: Sequence[int], read: Sequence[jax.Array]) -> Parts:
        """Return the parts with leaves of the rest at some positions; others are not read."""
        given = dict(zip(positions, read, strict=True))
        leaves = [
            given[at] if at in given else jnp.zeros(x.shape, x.dtype)
            for at, x in enumerate(self.parts.leaves)
        ]
        return dataclasses.replace(self.parts, leaves=leaves)

    def _of_layer(
        self, path: str, weights: list[jax.Array], trained: Sequence[jax.Array] = ()
    ) -> Any:
        """Return the tree of a layer's weights, with those that are trained replaced."""
        stack = self.parts.stacks[path]
        new = dict(zip(stack.trained, trained, strict=False))
        treedef: Any = jax.tree.structure(stack.tree)
        return treedef.unflatten(
            [new.get(i, w[0]) for i, w in zip(stack.indices, weights, strict=True)]
        )

    def _mean(self, total: Any, more: Any) -> Any:
        """Add the share of one micro-batch to the mean of the gradients."""
        if self.step.micro_batches == 1:
            return more
        share = jax.tree.map(lambda g: g / self.step.micro_batches, trees.widened(more))
        return share if total is None else _added(total, share)

    # ---- updates; `of_step` are the count, the seed and the factor of clipping ----

    def _update_layer(
        self, path: str, stack: Any, weights: Any, rows: list[Row], gradients: Any,
        layer: jax.Array, *of_step: Any,
    ) -> Any:  # fmt: skip
        """Return new weights of the stack, or if `weights` is None, of the layer, and rows."""
        of_path = self.parts.stacks[path]
        plans = [self.plans.of_layers[i] for i in of_path.trained]
        how = functools.partial(self._update(*of_step).layer, of_path, layer)
        old = stack if weights is None else weights
        new, rows = self._updated(plans, old, rows, gradients, how)
        if weights is None:
            return new, rows
        return write_layer(stack, new, layer, of_path.layers), rows

    def _update_rest(
        self, positions: tuple[int, ...], weights: Any, rows: list[Row], gradients: Any,
        *of_step: Any,
    ) -> Any:  # fmt: skip
        indices = [self.parts.indices[at] for at in positions]
        plans = [self.plans.whole[i] for i in indices]
        how = functools.partial(self._update(*of_step).rest, indices)
        return self._updated(plans, weights, rows, gradients, how)

    def _update(self, count: jax.Array, seed: jax.Array, factor: jax.Array | None) -> Update:
        return Update.begin(self.plans, count, seed, self.step.limit, factor)

    def _updated(self, plans: Any, weights: Any, rows: Any, gradients: Any, how: Any) -> Any:
        """Return new weights and rows by `how`, a method of `Update`."""
        states, blockwise = map(list, zip(*map(from_row, plans, rows), strict=True))
        gradients = [self.step.each(g) for g in gradients]
        with step_arguments.stepping(implementation=self.step.implementation):
            weights, states, blockwise = how(gradients, (weights, states, blockwise))
        return weights, list(map(to_row, plans, states, blockwise))

    def _squares(self, gradients: list[jax.Array]) -> jax.Array:
        return squares_of([self.step.each(g) for g in gradients])

    def _factor(self, squares: list[jax.Array]) -> jax.Array:
        norm = jnp.sqrt(sum(squares))
        return clipping_factor(self.step.optimizer.limit, norm)


def _added(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, more)


def micro_batch(batch: Any, at: Any, number: int) -> Any:
    """Return one of a number of micro-batches of a batch."""
    if number == 1:
        return batch
    return jax.tree.map(lambda x: x[at], micro_batches_of(batch, number))
