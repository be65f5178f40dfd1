"""The step of gradient release whose state is in host memory, and weights if they are there, too.

One compiled program per stage, called from Python: the copies of one layer run beside the products
of another. A stage is given the weights that it reads, those of its layer and leaves outside of
layers, which are copied while the stage before is computed. A stage is dispatched when the one two
before it has ended, since work that is dispatched further ahead would need memory too early. The
first and the last stage, whose gradients are the largest, run one micro-batch at a time.

XLA's allocator cannot move arrays: a small one between two large ones leaves holes that are too
small for the gradient of an embedding. So dx takes the place of the input of the last stage, and
that of a layer the place of the one before.

Long steps pass micro-batches through the model in several parts, and add their gradients in host
memory. The sums of the rest (the embedding's, the head's) are added before its state is brought,
and layers follow when both have left: together they need more memory than a layer does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.host import PerLayer, Stage
from optax_lowmem._src.optim.step.state import Row, stored_fields
from optax_lowmem._src.training.release import room
from optax_lowmem._src.training.release.programs import Options, Programs, micro_batch
from optax_lowmem._src.training.release.update import read_layer

_read_layer = Stage(read_layer, static_argnums=2)
_micro_batch = Stage(micro_batch, static_argnums=2)
_mean = Stage(lambda losses: sum(x.astype(jnp.float32) for x in losses) / len(losses))
_zeros_like = Stage(jnp.zeros_like)
_incremented = Stage(optax.safe_increment)
_FIRST, _LAST = "first", "last"  # stages without layers


def _columns_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree; of a `PerLayer`, a list of its parts."""
    leaves = jax.tree.leaves(tree, is_leaf=host.is_per_layer)
    return [list(x.parts) if host.is_per_layer(x) else x for x in leaves]


def _part(stored: Any, layer: Any) -> Any:
    return stored[layer] if isinstance(stored, list) else stored


@dataclasses.dataclass
class Offloaded(Options):
    """The training step of `train_step(offload=True)`."""

    def __post_init__(self) -> None:
        self._programs: dict[Any, Programs] = {}

    def __call__(
        self, params: optax.Params, state: Any, batch: object, frozen: optax.Params = None
    ) -> tuple[Any, Any, Any]:
        """Take a step; return (loss, params, state)."""
        run = self._begin(params, state, batch, frozen, self.micro_batches)
        if not run.programs.has_room:
            run.check_room()
            run.programs.has_room = True
        return run.take(params, state, batch)

    def loss(
        self, params: optax.Params, state: Any, batch: object, frozen: optax.Params = None
    ) -> Any:
        """Return the loss (and aux) of a batch that is not divided; nothing is changed."""
        return self._begin(params, state, batch, frozen, 1).loss(batch)

    def compile(
        self, params: optax.Params, state: Any, batch: object, frozen: optax.Params = None
    ) -> None:
        """Compile what later steps run, without allocating arrays.

        Args:
          params: the parameters, or their shapes (`jax.ShapeDtypeStruct`), with the shardings that
            the arrays will have; without shardings, those of the first device.
          state: the state, or its shapes, which `release.offload(tx, model, params)` returns.
          batch: a batch, or its shapes.
          frozen: the frozen parameters, or their shapes.

        Raises:
          MemoryError: if host memory is too small for what later steps need, with the arrays of
            which only shapes are given.
        """
        shapes = jax.tree.map(host.shape_of, (params, state, batch, frozen))
        params, state, batch, frozen = shapes
        number = self.micro_batches
        self._begin(params, state, batch, frozen, number).check_room()
        for _ in range(2):  # parameters without a sharding have one after a step
            run = self._begin(params, state, batch, frozen, number)
            _, params, state = run.take(params, state, batch)

    def _begin(self, params: Any, state: Any, batch: object, frozen: Any, number: int) -> "Run":
        inner = self.optimizer.inner(state)
        one = jax.eval_shape(lambda x: micro_batch(x, 0, number), batch)
        like = jax.eval_shape(lambda *args: args, *host.like((params, frozen, inner)), one)
        like = jax.tree.map(host.without_memory_space, like)  # stages compute on the device
        key = jax.tree.structure(like), *((x.shape, x.dtype) for x in jax.tree.leaves(like))
        if key not in self._programs:
            self._programs[key] = Programs(self, *like)
        return Run(self, self._programs[key], params, frozen, inner)


class Run:
    """A step under way.

    Attributes:
      weights: the leaves of the parameters, each old until it is updated, and of the frozen ones;
        of a stacked leaf in host memory, a list of its layers.
      columns: the arrays of the state by field and leaf; a list of those of a stacked leaf.
      layers: (path, index) of each layer, in the order of the forward pass.
      inputs: inputs of each layer and of the last stage, by micro-batch.
      totals: gradients of leaves of the rest, by position.
      sums: gradients of the passes before, by stage.
    """

    def __init__(self, step: Offloaded, programs: Programs, params: Any, frozen: Any, state: Any):
        self.step, self.programs, self.plans, self.state = step, programs, programs.plans, state
        self.parts = programs.parts
        self.weights = _columns_of((params, frozen))
        self.columns = {
            name: _columns_of(getattr(state, name)) for name in self.plans.engine.fields()
        }
        for i, plan in self.plans.of_layers.items():
            if not all(isinstance(self.columns[name][i], list) for name in stored_fields(plan)):
                raise ValueError(
                    f"the state of '{plan.path}' is one array for all layers: offload=True takes a "
                    "state of release.offload(tx, model, params, state)."
                )
        stacks = self.parts.stacks
        for path, stack in stacks.items():
            if len({isinstance(self.weights[i], list) for i in stack.trained}) > 1:
                raise ValueError(
                    f"some weights of '{path}' are one array for all layers, and others are not: "
                    "pass what release.offload_weights(model, params) returns."
                )
        self.here = SingleDeviceSharding(host.device_of((params, frozen)))
        kinds = [x.sharding for x in jax.tree.leaves((state, self.weights)) if host.is_on_host(x)]
        self.there = kinds[0] if kinds else self.here
        self.layers = [(path, i) for path in step.model.layers for i in range(stacks[path].layers)]
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
        """Raise MemoryError if there is no room for inputs, gradients, and arrays still to come."""
        if self.there is self.here:
            return
        waiting = [x for x in jax.tree.leaves((self.weights, self.state)) if host.is_on_host(x)]
        coming = [x for x in waiting if isinstance(x, jax.ShapeDtypeStruct)]
        needed = self.programs.input_bytes * (len(self.layers) + 1) * self.step.at_once
        if self.step.micro_batches > self.step.at_once:
            trained = self.weights[: self.parts.trained]
            needed += 4 * sum(x.size for x in jax.tree.leaves(trained))
        what = "a step's layer inputs and sums of gradients"
        if coming:
            needed, what = (
                needed + trees.nbytes(coming),
                f"the state, or weights and state, with {what}",
            )
        (device,) = self.here.device_set
        room.check_room(needed, what, device, trees.nbytes(waiting) - trees.nbytes(coming))

    def one_pass(self, batches: list[Any], last: bool) -> list[Any]:
        """Pass micro-batches through the model; return their losses, and update after the last."""
        self.forward(batches)
        if last and self.step.optimizer.limit is not None:
            self.backward(batches, self.square, keeps_inputs=True)
            self.factor = self.programs.factor(self.squares)
        return self.backward(batches, self.update if last else self.store, brings_state=last)

    def result(self, params: optax.Params, state: Any) -> tuple[Any, Any]:
        """Return the new parameters and state."""
        trained = tuple(self.weights[: self.parts.trained])
        weights, columns = jax.tree.map(
            lambda x: PerLayer(x) if isinstance(x, list) else x,
            (trained, {name: tuple(column) for name, column in self.columns.items()}),
            is_leaf=lambda x: isinstance(x, list),
        )
        columns = {name: list(column) for name, column in columns.items()}
        count, like = _incremented(self.state.count), host.like(params)
        new = self.plans.engine.of_columns(count, self.state.seed, columns, like, self.state)
        treedef: Any = jax.tree.structure(like)
        return treedef.unflatten(weights), self.step.optimizer.outer(state, new)

    # ---- forward and backward ----

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch, without keeping inputs of layers."""
        coming = host.ahead([_FIRST, *self.layers, _LAST], self.bring_weights)
        batch = self.bring(batch)
        x = self.programs.first(next(coming)[1], batch)
        for key in self.layers:
            weights, read = self.arrived(key, next(coming))
            x = self.programs.forward(key[0], weights, read, x, batch)
            self.running.dispatched(x)
        return self.programs.value(next(coming)[1], x, batch)

    def forward(self, batches: list[Any]) -> None:
        """Compute the inputs of all layers and of the last stage."""
        coming, xs = host.ahead([_FIRST, *self.layers], self.bring_weights), []
        _, read = next(coming)
        for batch in batches:
            xs.append(self.programs.first(read, batch))
            self.running.dispatched(xs[-1])
        self.inputs = [self.put(xs)]
        for path, i in self.layers:
            weights, read = self.arrived((path, i), next(coming))
            self.inputs = [*self.inputs, []]
            for m, batch in enumerate(batches):
                xs[m] = self.programs.forward(path, weights, read, xs[m], batch)
                self.inputs[-1].append(self.put(xs[m]))
                self.running.dispatched(self.inputs[-1][-1])

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
        programs, backwards = self.programs, self.layers[::-1]
        of_stacks = self.parts.stacks
        order = [(at, m) for at in reversed(range(len(self.inputs))) for m in range(len(batches))]
        inputs = host.ahead(order, lambda at: self.input(*at, keep=keeps_inputs))
        coming = host.ahead(
            [_LAST, *backwards, _FIRST], functools.partial(self.bring_weights, back=True)
        )
        states = host.ahead(
            backwards, lambda key: self.bring(self.rows(key)) if brings_state else None
        )
        self.running.drain()  # or it would wait for an input that the last stage donates
        _, read = next(coming)
        losses, dxs, xs = [], [], [next(inputs) for _ in batches]
        total: Any = None
        for x, batch in zip(xs, batches, strict=True):
            loss, total, dx = programs.last(read, x, batch, total)
            losses.append(jax.block_until_ready(loss))
            dxs.append(dx)
        del x, xs, dx, read  # so that the arrays are freed
        self.finish_rest(-1, total, use)
        if len(batches) < self.step.micro_batches or any(map(self.is_streamed, of_stacks)):
            self.leaving.drain()  # frees what the head has on the device
        rest_gradients = total = None
        for path, i in backwards:
            rows, (weights, read) = next(states), self.arrived((path, i), next(coming))
            for m, batch in enumerate(batches):
                total, dxs[m] = programs.back(
                    path, weights, read, next(inputs), dxs[m], batch, total
                )
                self.running.dispatched(dxs[m])
            rest_gradients = programs.add(rest_gradients, total[1]) if rest_gradients else total[1]
            if trained := of_stacks[path].trained_of(weights):
                use((path, i), total[0], rows, trained)
            del rows, weights, trained, read
            total = None
            if i == 0:
                self.finish_rest(programs.stage_of(path), rest_gradients, use)
                rest_gradients = None
        self.leaving.drain()  # frees the state of the last layers
        _, read = next(coming)
        for dx, batch in zip(dxs, batches, strict=True):
            total = jax.block_until_ready(programs.back_first(read, dx, batch, total))
        del read
        self.finish_rest(0, total, use)
        return losses

    def finish_rest(self, stage: int, gradients: Any, use: Callable[..., None]) -> None:
        """Add gradients of a stage to those of the rest, and use those that are complete."""
        schedule = self.programs.schedule
        for at, g in zip(schedule.trained[stage], gradients, strict=True):
            self.totals[at] = self.programs.add(self.totals[at], g) if at in self.totals else g
        if positions := tuple(schedule.due[stage]):
            unread = [at for at in positions if at not in self.totals]
            zeros = {at: _zeros_like(x) for at, x in zip(unread, self.rest(unread), strict=True)}
            zeros = self.bring(zeros)
            gradients = [zeros.get(at, self.totals.pop(at, None)) for at in positions]
            use(positions, gradients)

    # ---- uses of the gradients of a stage: a layer, or leaves of the rest ----

    def square(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        """Square gradients, for their norm."""
        self.squares.append(self.programs.squares(self.complete(key, gradients, keep=True)))

    def store(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        """Add gradients to their sum over micro-batches, and keep it in the memory of the state."""
        self.sums[key] = self.put(self.complete(key, gradients))
        self.leaving.dispatched(self.sums[key])

    def update(self, key: Any, gradients: Any, arrived: Any = None, weights: Any = None) -> None:
        """Update the weights and the state of a stage, and copy them to where they were."""
        gradients, before = self.complete(key, gradients), (self.stored(key), self.rows(key))
        of_step = self.state.count, self.state.seed, self.factor
        if arrived is None:  # of the rest, once the memory of the sums is free
            jax.block_until_ready(gradients)
            weights, arrived = self.bring(before)
            after = self.programs.update_rest(key, weights, arrived, gradients, *of_step)
        else:
            path, layer = key
            stack, own = (weights, None) if self.is_streamed(path) else (before[0], weights)
            after = self.programs.update_layer(
                path, stack, own, arrived, gradients, np.int32(layer), *of_step
            )
        new = [
            host.put_back(x, was) if host.is_on_host(was) else x
            for x, was in zip(after[0], before[0], strict=True)
        ]
        rows = host.put_back(after[1], before[1])
        self.keep(key, new, rows)
        on_host = [x for x in jax.tree.leaves(before) if host.is_on_host(x)]
        self.leaving.dispatched((rows, list(filter(host.is_on_host, new))), on_host)

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

    def bring_weights(
        self, key: Any, back: bool = False
    ) -> tuple[dict[int, jax.Array], list[jax.Array]]:
        """Copy the weights that a stage reads to the device: of its layer, and of the rest.

        Those of a layer are by index, without those whose stack is on the device.
        """
        programs, weights = self.programs, {}
        if key == _FIRST:
            positions = programs.pulling if back else programs.schedule.reading[0]
        elif key == _LAST:
            positions = programs.schedule.reading[-1]
        else:
            positions = programs.schedule.reading[programs.stage_of(key[0])]
            stored = {i: self.weights[i] for i in self.parts.stacks[key[0]].indices}
            weights = self.bring({i: x[key[1]] for i, x in stored.items() if isinstance(x, list)})
        return weights, self.rest(positions)

    def arrived(self, key: Any, brought: tuple[Any, Any]) -> tuple[list[jax.Array], Any]:
        """Return what `bring_weights` brought, with copies of a layer of stacks that are here."""
        (weights, read), stack = brought, self.parts.stacks[key[0]]
        if here := {i: self.weights[i] for i in stack.indices if i not in weights}:
            weights = weights | _read_layer(here, np.int32(key[1]), stack.layers)
        return [weights[i] for i in stack.indices], read

    def rest(self, positions: Sequence[int]) -> list[jax.Array]:
        """Return leaves of the rest on the device."""
        found: list[jax.Array] = self.bring(
            [self.weights[self.parts.indices[at]] for at in positions]
        )
        return found

    def is_streamed(self, path: str) -> bool:
        """Return whether the trained weights of a stack are stored layer by layer."""
        return any(isinstance(self.weights[i], list) for i in self.parts.stacks[path].trained)

    def stored(self, key: Any) -> list[Any]:
        """Return the trained weights of a stage where they are; of a stack on the device, all."""
        indices, layer = self.leaves_of(key)
        return [_part(self.weights[i], layer) for i in indices]

    def keep(self, key: Any, weights: list[Any], rows: list[Row]) -> None:
        """Store what `stored` and `rows` return from now on."""
        indices, layer = self.leaves_of(key)
        for i, weight, row in zip(indices, weights, rows, strict=True):
            stored = [(self.weights, weight), *((self.columns[n], x) for n, x in row.items())]
            for column, x in stored:
                if isinstance(column[i], list):
                    column[i][layer] = x
                else:
                    column[i] = x

    def rows(self, key: Any) -> list[Row]:
        """Return the arrays of the state of each trained leaf of a stage."""
        indices, layer = self.leaves_of(key)
        plans = self.plans.whole if layer is None else self.plans.of_layers
        return [
            {name: _part(self.columns[name][i], layer) for name in stored_fields(plans[i])}
            for i in indices
        ]

    def leaves_of(self, key: Any) -> tuple[list[int], int | None]:
        """Return the indices of the trained leaves of a stage, and the layer that it is."""
        if isinstance(key[0], str):
            return self.parts.stacks[key[0]].trained, key[1]
        return [self.parts.indices[at] for at in key], None
