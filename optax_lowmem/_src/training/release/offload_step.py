"""The step of gradient release whose state is in host memory, streamed layer by layer.

One compiled program per stage, called from Python: the copies of one layer's state run beside the
products of another. A stage is dispatched when the one two before it has ended, since work that is
dispatched further ahead would need memory too early. The first and the last stage, whose gradients
are the largest, run one micro-batch at a time.

XLA's allocator cannot move arrays: a small one between two large ones leaves holes that are too
small for the gradient of an embedding. So dx takes the place of the input of the last stage, and
that of a layer the place of the one before.

Long steps pass micro-batches through the model in several parts, and add their gradients in host
memory. The sums of the rest (the embedding's, the head's) are added before its state is brought,
and layers follow when both have left: together they need more memory than a layer does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.host import PerLayer, Stage
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step.state import Row, from_row, stored_fields, to_row
from optax_lowmem._src.optim.wrappers.accumulate import micro_batches_of
from optax_lowmem._src.optim.wrappers.chain import clipping_factor
from optax_lowmem._src.training.release import room, stages
from optax_lowmem._src.training.release.model import Layered, Parts
from optax_lowmem._src.training.release.offload import read_layer_stage
from optax_lowmem._src.training.release.optimizer import Optimizer
from optax_lowmem._src.training.release.update import Plans, Update, squares_of, write_layer


class Programs:
    """The compiled stages of a step, for some shapes.

    Attributes:
      plans: of each parameter, whole and per layer.
      schedule: when the gradients of each parameter of the rest are complete.
      input_bytes: of a layer's input for one micro-batch.
      has_room: whether there is host memory for inputs and gradients.
    """

    def __init__(self, step: "Offloaded", params: optax.Params, state: Any, batch: object):
        self.step, self.model, engine = step, step.model, step.optimizer.engine
        self.parts = self.model.take_apart(params)
        self.plans = Plans.make(engine, self.parts, params, state, step.per_layer)
        engine.unpack(state, self.plans.whole, params)  # checks the state
        self.schedule = stages.Schedule.make(self.model, self.parts, batch)
        x = jax.eval_shape(self.model.first, self.parts.rest(), batch)
        self.input_bytes, self.has_room = trees.nbytes(x), False
        all_floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))
        number, at_once = step.micro_batches, step.at_once
        fewest = min(number, at_once, number % at_once or at_once)  # in a pass
        # with fewer, `RunAhead` waits for a dx whose place the next layer's has taken
        donated = (4, 6) if fewest >= host.AHEAD else 6
        self.first = Stage(self._first)
        self.forward = Stage(self._forward, static_argnums=0)
        self.last = Stage(self._last, donate_argnums=(1, 3) if all_floats else 3)
        self.back = Stage(self._back, static_argnums=0, donate_argnums=donated)
        self.back_first = Stage(self._back_first, donate_argnums=3)
        self.update_layer = Stage(self._update_layer, static_argnums=0, donate_argnums=(1, 3))
        self.update_rest = Stage(self._update_rest, static_argnums=0, donate_argnums=(1, 2))
        self.add = Stage(_added, donate_argnums=0)
        self.squares = Stage(self._squares)
        self.factor = Stage(self._factor)

    # ---- forward and backward; `rest` are the weights outside of layers ----

    def _first(self, rest: list[jax.Array], batch: object) -> Any:
        return self.model.first(self._of(rest).rest(), batch)

    def _forward(
        self, path: str, weights: Any, rest: list[jax.Array], x: Any, batch: object
    ) -> Any:
        layer = self._of_layer(path, weights)
        return self.model.layers[path](layer, self._of(rest).rest(), x, batch)

    def _last(self, rest: list[jax.Array], x: Any, batch: object, total: Any) -> Any:
        reading = self.schedule.reading[-1]
        loss, gradients, dx = stages.last(self.model, self._of(rest), x, batch, reading)
        in_parts = self.step.micro_batches > 1 and self.model.has_aux
        return loss[0] if in_parts else loss, self._mean(total, gradients), dx

    def _back(
        self, path: str, weights: Any, rest: Any, x: Any, dx: Any, batch: object, total: Any
    ) -> Any:
        reading = self.schedule.reading[1 + list(self.model.layers).index(path)]
        *gradients, dx = stages.pull_layer(
            self.model.layers[path], self._of(rest), self._of_layer(path, weights), reading, x, dx,
            batch,
        )  # fmt: skip
        return self._mean(total, gradients), dx

    def _back_first(self, rest: list[jax.Array], dx: Any, batch: object, total: Any) -> Any:
        _, pull = stages.first(self.model, self._of(rest), batch, self.schedule.reading[0])
        return self._mean(total, pull(dx)[0])

    def _of(self, rest: list[jax.Array]) -> Parts:
        return dataclasses.replace(self.parts, leaves=rest)

    def _of_layer(self, path: str, weights: list[jax.Array]) -> Any:
        treedef: Any = jax.tree.structure(self.parts.stacks[path].tree)
        return treedef.unflatten([w[0] for w in weights])

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
        of_path = self.parts.stacks[path]
        plans = [self.plans.of_layers[i] for i in of_path.indices]
        how = functools.partial(self._update(*of_step).layer, of_path, layer)
        weights, rows = self._updated(plans, weights, rows, gradients, how)
        return write_layer(stack, weights, layer, of_path.layers), rows

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


_micro_batch = Stage(micro_batch, static_argnums=2)
_mean = Stage(lambda losses: sum(x.astype(jnp.float32) for x in losses) / len(losses))
_zeros_like = Stage(jnp.zeros_like)
_incremented = Stage(optax.safe_increment)


@dataclasses.dataclass
class Offloaded:
    """The training step of `train_step(offload=True)`."""

    optimizer: Optimizer
    model: Layered
    each: Callable[[jax.Array], jax.Array]
    per_layer: bool
    implementation: str | None
    # clips the gradient of each layer, and of each leaf of the rest, by its norm
    limit: float | None
    micro_batches: int
    at_once: int  # number of micro-batches that pass through the model together

    def __post_init__(self) -> None:
        self._programs: dict[Any, Programs] = {}

    def __call__(self, params: optax.Params, state: Any, batch: object) -> tuple[Any, Any, Any]:
        """Take a step; return (loss, params, state)."""
        run = self._begin(params, state, batch)
        run.check_room()
        return run.take(params, state, batch)

    def compile(self, params: optax.Params, state: Any, batch: object) -> None:
        """Compile what later steps run, without allocating arrays.

        Args:
          params: the parameters, or their shapes (`jax.ShapeDtypeStruct`), with the shardings that
            the arrays will have; without shardings, those of the first device.
          state: the state, or its shapes, which `release.offload(tx, model, params)` returns.
          batch: a batch, or its shapes.
        """
        params, state, batch = jax.tree.map(host.shape_of, (params, state, batch))
        for _ in range(2):  # parameters without a sharding have one after a step
            _, params, state = self._begin(params, state, batch).take(params, state, batch)

    def _begin(self, params: optax.Params, state: Any, batch: object) -> "Run":
        inner = self.optimizer.inner(state)
        whole = jax.tree.map(
            lambda x: x.like if host.is_per_layer(x) else x, inner, is_leaf=host.is_per_layer
        )
        one = jax.eval_shape(lambda x: micro_batch(x, 0, self.micro_batches), batch)
        like = jax.eval_shape(lambda *args: args, params, whole, one)
        key = jax.tree.structure(like), *((x.shape, x.dtype) for x in jax.tree.leaves(like))
        if key not in self._programs:
            self._programs[key] = Programs(self, *like)
        return Run(self, self._programs[key], params, inner)


class Run:
    """A step under way.

    Attributes:
      weights: the leaves of the parameters, each old until it is updated.
      columns: the arrays of the state by field and leaf; a list of those of a stacked leaf.
      layers: (path, index) of each layer, in the order of the forward pass.
      inputs: inputs of each layer and of the last stage, by micro-batch.
      totals: gradients of leaves of the rest, by position.
      sums: gradients of the passes before, by stage.
    """

    def __init__(self, step: Offloaded, programs: Programs, params: optax.Params, state: Any):
        self.step, self.programs, self.plans, self.state = step, programs, programs.plans, state
        self.weights, self.columns = jax.tree.leaves(params), {}
        for name in self.plans.engine.fields():
            leaves = jax.tree.leaves(getattr(state, name), is_leaf=host.is_per_layer)
            self.columns[name] = [list(x.parts) if host.is_per_layer(x) else x for x in leaves]
        for i, plan in self.plans.of_layers.items():
            if not all(isinstance(self.columns[name][i], list) for name in stored_fields(plan)):
                raise ValueError(
                    f"the state of '{plan.path}' is one array for all layers: offload=True takes a "
                    "state of release.offload(tx, model, params, state)."
                )
        self.here = SingleDeviceSharding(host.device_of(params))
        kinds = [x.sharding for x in jax.tree.leaves(state) if host.is_on_host(x)]
        self.there = kinds[0] if kinds else self.here
        stacks = self.plans.parts.stacks
        self.layers = [(path, i) for path in stacks for i in range(stacks[path].layers)]
        self.inputs: list[list[Any]] = []
        self.totals: dict[int, jax.Array] = {}
        self.sums: dict[Any, Any] = {}
        self.squares: list[jax.Array] = []
        self.factor: jax.Array | None = None
        self.running, self.leaving = host.RunAhead(), host.RunAhead()

    def take(self, params: optax.Params, state: Any, batch: object) -> tuple[Any, Any, Any]:
        """Take the step; return (loss, params, state)."""
        losses: list[Any] = []
        number, at_once = self.step.micro_batches, self.step.at_once
        batch = self.bring(batch)  # committed, and copied once
        for begin in range(0, number, at_once):
            numbers = range(number)[begin:][:at_once]
            some = [_micro_batch(batch, np.int32(at), number) for at in numbers]
            losses += self.one_pass(some, numbers[-1] == number - 1)
        loss = losses[0] if len(losses) == 1 else _mean(losses)
        return loss, *self.result(params, state)

    def check_room(self) -> None:
        """Raise MemoryError, at the first step, if there is no room for inputs and gradients."""
        if self.there is self.here or self.programs.has_room:
            return
        needed = self.programs.input_bytes * (len(self.layers) + 1) * self.step.at_once
        if self.step.micro_batches > self.step.at_once:
            needed += 4 * sum(x.size for x in self.weights)
        state = trees.nbytes([x for x in jax.tree.leaves(self.state) if host.is_on_host(x)])
        (device,) = self.here.device_set
        room.check_room(needed, "a step's layer inputs and sums of gradients", device, state)
        self.programs.has_room = True

    def one_pass(self, batches: list[Any], last: bool) -> list[Any]:
        """Pass micro-batches through the model; return their losses, and update after the last."""
        self.forward(batches)
        if last and self.step.optimizer.limit is not None:
            self.backward(batches, self.square, keeps_inputs=True)
            self.factor = self.programs.factor(self.squares)
        return self.backward(batches, self.update if last else self.store, brings_state=last)

    def result(self, params: optax.Params, state: Any) -> tuple[Any, Any]:
        """Return the new parameters and state."""
        columns = {
            name: [PerLayer(x) if isinstance(x, list) else x for x in column]
            for name, column in self.columns.items()
        }
        count = _incremented(self.state.count)
        new = self.plans.engine.of_columns(count, self.state.seed, columns, params, self.state)
        treedef: Any = jax.tree.structure(params)
        return treedef.unflatten(self.weights), self.step.optimizer.outer(state, new)

    # ---- forward and backward ----

    @property
    def rest(self) -> list[jax.Array]:
        return [self.weights[i] for i in self.plans.parts.indices]

    def layer(self, path: str, i: int) -> list[jax.Array]:
        """Return a copy of the weights of a layer."""
        stack = self.plans.parts.stacks[path]
        return read_layer_stage([self.weights[j] for j in stack.indices], np.int32(i), stack.layers)

    def forward(self, batches: list[Any]) -> None:
        """Compute the inputs of all layers and of the last stage."""
        xs = []
        for batch in batches:
            xs.append(self.programs.first(self.rest, batch))
            self.running.add(xs[-1])
        self.inputs = [self.put(xs)]
        for path, i in self.layers:
            weights, self.inputs = self.layer(path, i), [*self.inputs, []]
            for m, batch in enumerate(batches):
                xs[m] = self.programs.forward(path, weights, self.rest, xs[m], batch)
                self.inputs[-1].append(self.put(xs[m]))
                self.running.add(self.inputs[-1][-1])

    def backward(
        self,
        batches: list[Any],
        use: Callable[..., None],
        *,
        keeps_inputs: bool = False,
        brings_state: bool = False,
    ) -> list[Any]:
        """Return the losses, and pass the gradients of each stage to `use`.

        `keeps_inputs` leaves the inputs of stages for another pass; `brings_state` passes `use` the
        state of each layer.
        """
        programs, stacks = self.programs, list(self.plans.parts.stacks)
        order = [(at, m) for at in reversed(range(len(self.inputs))) for m in range(len(batches))]
        inputs = host.ahead(order, lambda at: self.input(*at, keep=keeps_inputs))
        coming = host.ahead(
            reversed(self.layers),
            lambda key: self.bring(self.rows(key)) if brings_state else None,
        )
        self.running.drain()  # or it would wait for an input that the last stage donates
        losses, dxs, xs = [], [], [next(inputs) for _ in batches]
        total: Any = None
        for x, batch in zip(xs, batches, strict=True):
            loss, total, dx = programs.last(self.rest, x, batch, total)
            losses.append(jax.block_until_ready(loss))
            dxs.append(dx)
        self.finish_rest(-1, total, use)
        if len(batches) < self.step.micro_batches:
            self.leaving.drain()  # frees the gradients and the state of the head
        del x, xs, dx  # so that the arrays are freed
        rest_gradients = total = None
        for path, i in reversed(self.layers):
            arrived, weights = next(coming), self.layer(path, i)
            for m, batch in enumerate(batches):
                total, dxs[m] = programs.back(
                    path, weights, self.rest, next(inputs), dxs[m], batch, total
                )
                self.running.add(dxs[m])
            rest_gradients = programs.add(rest_gradients, total[1]) if rest_gradients else total[1]
            use((path, i), total[0], arrived, weights)
            del arrived, weights
            total = None
            if i == 0:
                self.finish_rest(1 + stacks.index(path), rest_gradients, use)
                rest_gradients = None
        self.leaving.drain()  # frees the state of the last layers
        for dx, batch in zip(dxs, batches, strict=True):
            total = jax.block_until_ready(programs.back_first(self.rest, dx, batch, total))
        self.finish_rest(0, total, use)
        return losses

    def finish_rest(self, stage: int, gradients: Any, use: Callable[..., None]) -> None:
        """Add gradients of a stage to those of the rest, and use those that are complete."""
        schedule = self.programs.schedule
        for at, g in zip(schedule.reading[stage], gradients, strict=True):
            self.totals[at] = self.programs.add(self.totals[at], g) if at in self.totals else g
        if positions := tuple(schedule.due[stage]):
            rest = self.rest
            unread = {at: _zeros_like(rest[at]) for at in positions if at not in self.totals}
            unread = self.bring(unread)
            gradients = [unread.get(at, self.totals.pop(at, None)) for at in positions]
            use(positions, gradients)

    # ---- uses of the gradients of a stage: a layer, or leaves of the rest ----

    def square(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        """Square gradients, for their norm."""
        self.squares.append(self.programs.squares(self.complete(key, gradients, keep=True)))

    def store(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        """Add gradients to their sum over micro-batches, and keep it in the memory of the state."""
        self.sums[key] = self.put(self.complete(key, gradients))
        self.leaving.add(self.sums[key])

    def update(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        gradients = self.complete(key, gradients)
        if arrived is None:  # the state of the rest, once the memory of the sums is free
            jax.block_until_ready(gradients)
            arrived = self.bring(self.rows(key))
        of_step = self.state.count, self.state.seed, self.factor
        indices, layer = self.leaves_of(key)
        leaves = [self.weights[i] for i in indices]
        if layer is None:
            leaves, rows = self.programs.update_rest(key, leaves, arrived, gradients, *of_step)
        else:
            leaves, rows = self.programs.update_layer(
                key[0], leaves, weights, arrived, gradients, np.int32(layer), *of_step
            )
        for i, leaf in zip(indices, leaves, strict=True):
            self.weights[i] = leaf
        before = self.rows(key)
        rows = host.put_back(rows, before)
        for i, row in zip(indices, rows, strict=True):
            for name, x in row.items():
                if layer is None:
                    self.columns[name][i] = x
                else:
                    self.columns[name][i][layer] = x
        self.leaving.add(rows, [x for x in jax.tree.leaves(before) if host.is_on_host(x)])

    def complete(self, key: Any, gradients: Any, keep: bool = False) -> Any:
        """Add those of the passes before; `keep` leaves these for the second backward pass."""
        sums = self.sums.get(key) if keep else self.sums.pop(key, None)
        return gradients if sums is None else self.programs.add(gradients, self.bring(sums))

    # ---- copies ----

    def put(self, tree: Any) -> Any:
        """Copy arrays to the memory of the state: host memory, if any of it is there."""
        return host.put(tree, self.there)

    def input(self, stage: int, number: int, keep: bool) -> Any:
        """Copy an input to the device, and forget it unless it is needed again."""
        # the last stage donates its input: one that is kept is copied
        copied = keep and stage == len(self.inputs) - 1
        x = self.bring(self.inputs[stage][number], may_alias=not copied)
        if not keep:
            self.inputs[stage][number] = None
        return x

    def bring(self, tree: Any, **how: Any) -> Any:
        """Copy arrays to the device."""
        return host.put(tree, self.here, **how)

    def rows(self, key: Any) -> list[Row]:
        """Return the arrays of the state of each leaf of a stage."""
        indices, layer = self.leaves_of(key)
        plans = self.plans.whole if layer is None else self.plans.of_layers
        return [
            {
                name: self.columns[name][i] if layer is None else self.columns[name][i][layer]
                for name in stored_fields(plans[i])
            }
            for i in indices
        ]

    def leaves_of(self, key: Any) -> tuple[list[int], int | None]:
        """Return the indices of the leaves of a stage, and the layer that it is."""
        if isinstance(key[0], str):
            return self.plans.parts.stacks[key[0]].indices, key[1]
        return [self.plans.parts.indices[at] for at in key], None
