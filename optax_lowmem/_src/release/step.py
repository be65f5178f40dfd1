"""Training step of a layered model that updates each layer during the backward pass."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lowmem._src.core import context, random, trees, varying
from optax_lowmem._src.core.placement import placements
from optax_lowmem._src.release.model import (
    Layered,
    LayerFunction,
    Parts,
    Stack,
    floats,
    map_x,
    reads,
    with_floats,
)
from optax_lowmem._src.release.trace import Program, trace
from optax_lowmem._src.step import IMPLEMENTATIONS, LeafPlan, LeafState
from optax_lowmem._src.step.batch import LeafBatch
from optax_lowmem._src.step.engine import Engine, EngineTransformation, count_and_keys, step_leaves
from optax_lowmem._src.step.rule import MatrixRule, UpdateRule
from optax_lowmem._src.wrappers.pack import PackedEngine

# ---- one layer of stacked leaves: whether it can be stepped alone; reading and writing it --------


def layer_plan(rule: UpdateRule, plan: LeafPlan, layers: int, per_layer: bool) -> LeafPlan:
    """Return the plan of one layer from that of its stacked leaf; axis 0 is kept, with size 1.

    Raises:
      ValueError: for a leaf whose layers cannot be stepped one by one.
    """
    reason = _reason(rule, plan, per_layer) if layers > 1 else None
    if reason is not None:
        raise ValueError(
            f"the layers of leaf '{plan.path}' {list(plan.shape)} cannot be updated one by one: "
            f"{reason}"
        )
    block = None if plan.block is None else plan.block.fit(plan.shape, plan.path)
    return dataclasses.replace(plan, shape=(1, *plan.shape[1:]), block=block)


def _reason(rule: UpdateRule, plan: LeafPlan, per_layer: bool) -> str | None:
    rule = rule.for_leaf(plan.matrices)
    measures = rule.prepares == "leaf" or (isinstance(rule, MatrixRule) and rule.of_whole_leaf)
    if measures and not per_layer:
        return (
            f"{type(rule).__name__} reduces over a whole tensor before it steps. per_layer=True "
            "reduces over each layer separately, as in the same model with unrolled layers."
        )
    if plan.matrices is not None and 0 in (*plan.matrices.rows, *plan.matrices.columns):
        return (
            "axis 0 is a row or column axis of its matrices. Leave it out of its "
            "MuonDimensionNumbers."
        )
    place = context.placement(plan.path)
    if place is not None and place.parts(0) > 1:
        return f"axis 0 is sharded ({place.spec}). Shard another axis."
    if plan.quantized and len(plan.shape) == 1:
        return (
            "its only axis is the layer axis, so groups of codes span layers. Leave it "
            f"uncompressed: Policy(exclude=('{plan.path}',))."
        )
    if plan.block is None:
        return None
    block = plan.block.fit(plan.shape, plan.path)
    if 0 in block.axes or (block.heads is not None and block.heads[0] == 0):
        kept = tuple(range(1, len(plan.shape)))
        instead = f"Structure(rules=[('{plan.path}', {kept})])"
        if len(block.parts) > 1:
            instead = f"min_dim_size_to_factor={plan.shape[0] + 1}"
        return (
            "the layers share a second moment "
            f"({block.description or f'a mean over {block.axes}'}). "
            f"Give each layer a separate one: {instead}."
        )
    values = block.values((1, *plan.shape[1:]))
    for slot in plan.shared:
        if slot.codec is not None and values % plan.group_size:
            return (
                f"its {slot.name} has {values} values per layer in groups of {plan.group_size}, "
                "which span layers. Keep it in f32: "
                f"Policy(exclude=('{slot.name}:{plan.path}',))."
            )
    return None


def groups_of_blocks(plan: LeafPlan, layers: int) -> int:
    """Return the number of groups of codes per layer, for shared slots."""
    if plan.block is None:
        return 0
    return plan.block.values(plan.shape) // layers // plan.group_size


def read_layer(tree: object, layer: jax.Array, layers: int) -> Any:
    """Slice one layer of each array, behind an optimization barrier.

    Without the barrier, XLA's CPU backend copies the whole stack, since it is read and written.
    """

    def part(x: jax.Array) -> jax.Array:
        size = x.shape[0] // layers
        return lax.dynamic_slice_in_dim(x, layer * size, size, 0)

    return lax.optimization_barrier(jax.tree.map(part, tree))


def write_layer(tree: object, parts: object, layer: jax.Array, layers: int) -> Any:
    """Write one layer of each array, in place if the old array is not used any more."""

    def whole(x: jax.Array, part: jax.Array) -> jax.Array:
        size = x.shape[0] // layers
        return lax.dynamic_update_slice_in_dim(x, part, layer * size, 0)

    return jax.tree.map(whole, tree, lax.optimization_barrier(parts))


# ---- the leaves of a tree while a step updates them ----------------------------------------------

Gradient = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(eq=False)
class Run:
    """State of one step: the leaves of the tree, each old until it is updated.

    Attributes:
      engine: the optimizer.
      h: hyperparameters of the step.
      count: the new step count.
      keys: random keys of the leaves, uint32 [leaves].
      before: the old state.
      parts: the parameters, split into stacks and the rest.
      plans: plans of the whole leaves.
      of_layers: plans of one layer of stacked leaves, by index.
      weights: the parameters.
      states: states of the leaves.
      shared: states of their shared slots.
      totals: gradients accumulated so far for leaves of the rest, by index.
      each: function applied to every gradient.
    """

    engine: Engine
    h: Mapping[str, jax.Array]
    count: jax.Array
    keys: jax.Array
    before: Any
    parts: Parts
    plans: list[LeafPlan]
    of_layers: dict[int, LeafPlan]
    weights: list[jax.Array]
    states: list[LeafState]
    shared: list[LeafState]
    totals: dict[int, jax.Array]
    each: Gradient

    @classmethod
    def begin(
        cls,
        engine: Engine,
        model: Layered | Program,
        params: optax.Params,
        state: optax.OptState,
        each: Gradient | None,
        per_layer: bool,
    ) -> "Run":
        """Start a step; raise ValueError if a leaf of a stack cannot be stepped layer by layer."""
        trees.check_state(state, engine.rule.state_type)
        plans = engine.plans(params, state, returns_params=True)
        parts = model.take_apart(params)
        of_layers = {
            i: layer_plan(engine.rule, plans[i], stack.layers, per_layer)
            for stack in parts.stacks.values()
            for i in stack.indices
        }
        h = engine.hyperparameters(state.count)
        states, shared = engine.unpack(state, plans, params)
        paths = [plan.path for plan in plans]
        count, keys = count_and_keys(state.seed, state.count, None, paths)
        return cls(
            engine, h, count, keys, state, parts, plans, of_layers, jax.tree.leaves(params), states,
            shared, {}, each or (lambda g: g),
        )  # fmt: skip

    def result(self, params: optax.Params) -> tuple[Any, Any]:
        """Return the new parameters and state."""
        treedef: Any = jax.tree.structure(params)
        state = self.engine.pack(
            self.count, self.plans, self.states, self.shared, params, self.before
        )
        return treedef.unflatten(self.weights), state

    def add(self, positions: Sequence[int], gradients: Sequence[jax.Array]) -> None:
        """Add gradients to the totals of leaves of the rest, given by position in it."""
        for at, g in zip(positions, gradients, strict=True):
            i = self.parts.indices[at]
            self.totals[i] = self.totals[i] + g if i in self.totals else g

    def update_rest(self, positions: Sequence[int], then: object) -> Any:
        """Step leaves of the rest; return `then`, made to depend on them to free the gradients."""
        indices = [self.parts.indices[at] for at in positions]
        if not indices:
            return then
        unread = [i for i in indices if i not in self.totals]
        totals = {i: jnp.zeros_like(self.weights[i]) for i in unread} | self.totals
        plans = [self.plans[i] for i in indices]
        gradients = [self.each(totals[i]) for i in indices]
        keys = self.keys[jnp.asarray(indices)]
        batch = self.batch(plans, gradients, *self.of(indices), keys)
        result = step_leaves(self.engine.rule, batch)
        for i in indices:
            self.totals.pop(i, None)
        self.set(indices, *result)
        return varying.after(then, result)

    def update_layer(
        self, stack: Stack, layer: jax.Array, gradients: list[jax.Array], leaves: Any
    ) -> Any:
        """Step one layer and return its new (weights, states, shared states).

        Args:
          stack: the stack of the layer.
          layer: index of the layer.
          gradients: gradients of the layer, with `each` applied.
          leaves: old (weights, states, shared states), with a layer axis of size 1.
        """
        plans = [self.of_layers[i] for i in stack.indices]
        weights, states, shared = leaves
        keys = self.keys[jnp.asarray(stack.indices)]
        layer_keys = random.part_keys(keys, layer)
        single = [len(self.plans[i].shape) == 1 for i in stack.indices]
        if any(single):
            of_elements = random.element_keys(keys, layer, plans[0].group_size)
            layer_keys = jnp.where(jnp.asarray(single)[:, None], of_elements, layer_keys)
        groups = [groups_of_blocks(self.plans[i], stack.layers) for i in stack.indices]
        shared_keys = random.part_keys(keys, layer * jnp.asarray(groups, jnp.int32))
        gradients = [g[None] for g in gradients]
        batch = self.batch(plans, gradients, weights, states, shared, layer_keys, shared_keys)
        return step_leaves(self.engine.rule, batch)

    def batch(
        self,
        plans: list[LeafPlan],
        gradients: list[jax.Array],
        weights: list[jax.Array],
        states: list[LeafState],
        shared: list[LeafState],
        keys: jax.Array,
        shared_keys: jax.Array | None = None,
    ) -> LeafBatch:
        """Return a batch of leaves, or of layers of them, with this step's hyperparameters."""
        return LeafBatch(
            tuple(plans), gradients, weights, states, self.h, [{}] * len(plans), keys,
            tuple(range(len(plans))), context.step_arguments().implementation, shared,
            keys if shared_keys is None else shared_keys,
        )  # fmt: skip

    def of(
        self, indices: Sequence[int]
    ) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
        """Return weights, states and states of shared slots of some leaves."""
        weights = [self.weights[i] for i in indices]
        return weights, [self.states[i] for i in indices], [self.shared[i] for i in indices]

    def set(self, indices: Sequence[int], weights: Any, states: Any, shared: Any) -> None:
        """Replace weights, states and states of shared slots of some leaves."""
        for i, *new in zip(indices, weights, states, shared, strict=True):
            self.weights[i], self.states[i], self.shared[i] = new


# ---- the step ------------------------------------------------------------------------------------


def train_step(
    tx: optax.GradientTransformation,
    model: Layered | Callable[[Any, Any], Any],
    *,
    layers: str | Sequence[str] = (),
    has_aux: bool = False,
    each_gradient: Gradient | None = None,
    per_layer: bool = False,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    specs: object = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return a training step that never stores the gradients of all layers at once.

    The forward pass saves the input of every layer. The backward pass loops over the layers: it
    recomputes a layer from its input, computes its gradients, steps its slice of every weight and
    slot, and writes the slices back in place. The rest of the parameters are stepped as soon as no
    earlier stage reads them.

    The result equals `jax.value_and_grad(model)` with `lowmem.step`, including random bits.

    A loss function is traced and cut into such stages: at every `lax.scan` over parameters (also
    those of `nn.scan` and `nnx.scan`), and between the layers that `layers` names, where the fewest
    bytes pass from one layer to the next. Values that depend on no parameter (masks, rotary tables,
    dropout keys) are computed once. Layers in a list may differ, and share parameters.

    Args:
      tx: one of our optimizers, such as `flash_adamw(schedule, mask=...)`.
      model: a loss function, (params, batch) -> loss, or a `Layered`.
      layers: for a loss function that calls its layers one by one: the path in the parameters of
        the list of layers ("layers", "decoder/blocks"), or a pattern of the paths of the layers
        ("Block_*"), or several. With it, only scans over parameters at these paths are cut.
      has_aux: whether a loss function returns (loss, aux).
      each_gradient: function applied to every gradient; for a stack, to one layer at a time,
        without the layer axis. For elementwise work such as clipping by value, or `lax.pmean`
        inside a `shard_map`.
      per_layer: whether an optimizer that reduces over whole tensors (`stable_adamw`'s RMS_t) may
        reduce over each layer, as in the same model unrolled; otherwise it raises an error.
      implementation: as in `lowmem.step`.
      mesh: likewise.
      specs: likewise; the layer axis must not be sharded.

    Returns:
      (params, state, batch) -> (loss, params, state), with (loss, aux) if the model has aux. Jit
      it with `donate_argnums=(0, 1)`; it donates nothing by itself.

    Raises:
      TypeError: if `model` or `each_gradient` is no function; for `layers` and `has_aux` with a
        `Layered`.
      ValueError: for a transformation that may need all gradients at once: anything around or
        before one of our optimizers (clipping by the global norm, `accumulate_gradients`,
        `MultiSteps`). When called, for a leaf whose layers depend on one another, and for a loss
        function without layers, or whose layers cannot be separated.

    Memory: besides weights, state and the inputs of the layers (which rematerialisation of each
    layer stores anyway), the working set of one layer: its backward pass, its gradients, and a copy
    of its slices. An ordinary step stores the gradients of all layers, 2 or 4 bytes per parameter.
    A value that depends on the parameters and skips layers is stored once.

    Numerics: XLA may fuse the multiply-adds of the two programs differently, which changes last
    bits, and codes only next to a rounding boundary. Adam-mini's block means are computed layer by
    layer. The gradients of a parameter that several stages read are added stage by stage.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem import release
      >>> def loss_fn(params, tokens):
      ...     x = params["embed"][tokens]
      ...     layer = lambda x, weights: (x + jnp.tanh(x @ weights["w"]), None)
      ...     x, _ = jax.lax.scan(layer, x, params["layers"])
      ...     return jnp.mean((x @ params["embed"].T - 1) ** 2)
      >>> params = {"embed": jnp.ones((5, 4)), "layers": {"w": jnp.ones((3, 4, 4))}}
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, params)
      >>> step = jax.jit(release.train_step(tx, loss_fn), donate_argnums=(0, 1))
      >>> loss, params, state = step(params, state, jnp.array([0, 1]))
      >>> print(params["layers"]["w"].shape, state.count)
      (3, 4, 4) 1
    """
    engine = _engine_of(tx)
    if isinstance(model, Layered) and (layers or has_aux):
        raise TypeError("layers and has_aux are arguments for a loss function; a Layered has both")
    if not callable(model):
        raise TypeError(
            "model must be a loss function (params, batch) -> loss, or a release.Layered, got "
            f"{type(model).__name__}"
        )
    if each_gradient is not None and not callable(each_gradient):
        raise TypeError(f"each_gradient must be a function of an array, got {each_gradient!r}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}"
        )

    def step(params: optax.Params, state: optax.OptState, batch: object) -> tuple[Any, Any, Any]:
        places = None if specs is None else placements(params, specs, mesh)
        with context.stepping(implementation=implementation, placements=places):
            stages: Layered | Program
            stages, inputs = (
                (model, batch)
                if isinstance(model, Layered)
                else trace(model, params, batch, layers, has_aux)
            )
            run = Run.begin(engine, stages, params, state, each_gradient, per_layer)
            loss = backward(stages, run, inputs)
            return loss, *run.result(params)

    return step


def _engine_of(tx: optax.GradientTransformation) -> Engine:
    if isinstance(tx, EngineTransformation) and isinstance(tx.engine, PackedEngine):
        raise ValueError(
            "pack_small_leaves joins leaves of several layers, but gradient release steps one "
            "layer at a time: pass the optimizer without it."
        )
    if isinstance(tx, EngineTransformation) and tx.engine.weights:
        return tx.engine
    if isinstance(tx, EngineTransformation):
        raise ValueError(
            "a bare direction (scale_by_*) has no learning rate to step with: pass a complete "
            "optimizer, such as flash_adamw."
        )
    update = getattr(tx, "update", None)
    name = getattr(update, "__qualname__", type(tx).__qualname__).split(".<locals>")[0]
    name = f"{getattr(update, '__module__', type(tx).__module__)}.{name}"
    raise ValueError(
        f"gradient release takes one of our optimizers itself, such as flash_adamw(...), not "
        f"{name}. A transformation around or before it may need the gradients of all layers at "
        "once (clipping by the global norm, accumulate_gradients, MultiSteps, apply_if_finite), "
        "which never exist together here. Use jax.value_and_grad(model) and lowmem.step with it; "
        "or pass elementwise work on gradients as each_gradient=, a mask of decay as mask=, a "
        "learning rate from outside as an f32 argument of the jitted step that builds the "
        "optimizer."
    )


# ---- backward, stage by stage --------------------------------------------------------------------


def backward(model: Layered | Program, run: Run, batch: object) -> Any:
    """Return the loss (and aux), and update all leaves of `run`."""
    parts = run.parts
    reading = [_positions(reads(lambda rest: model.first(rest, batch), parts.rest()))]
    x, pull_first = _first(model, parts, batch, reading[0])
    inputs = []
    for path, layer in model.layers.items():
        if path not in parts.stacks:

            def once(rest: optax.Params, x: Any, layer: LayerFunction = layer) -> Any:
                return layer(None, rest, x, batch)

            reading.append(_positions(reads(once, parts.rest(), x)))
            inputs.append(x)
            x = once(parts.rest(), x)
            continue
        stacked = parts.stacks[path].tree
        one_layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), stacked)

        def one(rest: optax.Params, weights: Any, x: Any, layer: LayerFunction = layer) -> Any:
            return layer(weights, rest, x, batch)

        reading.append(_positions(reads(one, parts.rest(), one_layer, x)))
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
        if path in parts.stacks:
            dx = _backward_stack(run, layer, parts.stacks[path], saved, dx, batch, positions)
        else:
            dx = _backward_once(run, layer, saved, dx, batch, positions)
        dx = run.update_rest(done, dx)
    run.add(reading[0], pull_first(dx)[0])
    run.update_rest(due[0], ())
    return loss


def _positions(flags: Sequence[bool]) -> list[int]:
    return [at for at, flag in enumerate(flags) if flag]


def _first(
    model: Layered | Program, parts: Parts, batch: object, positions: list[int]
) -> tuple[Any, Any]:
    """Return x, and the pullback from its gradient to those of the leaves at `positions`."""

    def run(read: list[jax.Array]) -> tuple[Any, Any]:
        x = model.first(parts.rest(dict(zip(positions, read, strict=True))), batch)
        return floats(x), x

    _, pull, x = jax.vjp(run, [parts.leaves[at] for at in positions], has_aux=True)
    return x, pull


def _forward(
    layer: LayerFunction, parts: Parts, stacked: object, x: object, batch: object
) -> tuple[Any, Any]:
    """Return x after all layers, and the stacked inputs of the layers (not of `Unchanged`)."""

    def body(x: object, weights: object) -> tuple[Any, Any]:
        return layer(weights, parts.rest(), x, batch), jax.tree.leaves(_changing(x))

    end, saved = lax.scan(body, x, stacked)
    each = iter(saved)
    return end, map_x(lambda _: next(each), lambda same: same, x)


def _changing(x: object) -> Any:
    return map_x(lambda array: array, lambda _: None, x)


def _last(
    model: Layered | Program, parts: Parts, x: object, batch: object, positions: list[int]
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """Return the loss (and aux), the gradients of leaves at `positions`, and that of x."""

    def run(read: list[jax.Array], values: list[jax.Array]) -> tuple[Any, Any]:
        rest = parts.rest(dict(zip(positions, read, strict=True)))
        result = model.last(rest, with_floats(x, values), batch)
        return result if model.has_aux else (result, None)

    read = [parts.leaves[at] for at in positions]
    loss, pull, aux = jax.vjp(run, read, floats(x), has_aux=True)
    if jnp.shape(loss) or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"`last` must return a loss, one float; this is {loss.dtype}{list(jnp.shape(loss))}. "
            "For (loss, aux) pass has_aux=True."
        )
    gradients, dx = pull(jnp.ones_like(loss))
    return (loss, aux) if model.has_aux else loss, gradients, dx


def _backward_stack(
    run: Run,
    layer: LayerFunction,
    stack: Stack,
    saved: object,
    dx: list[jax.Array],
    batch: object,
    positions: list[int],
) -> list[jax.Array]:
    """Return the gradient of a stack's input, and update the stack's leaves on the way."""
    parts, count = run.parts, stack.layers
    read_by_all = [parts.leaves[at] for at in positions]
    treedef: Any = jax.tree.structure(stack.tree)

    def body(k: jax.Array, carry: Any) -> Any:
        dx, totals, leaves = carry
        i = count - 1 - k
        weights = [read_layer(weight, i, count) for weight, *_ in leaves]
        x = map_x(
            lambda s: lax.dynamic_index_in_dim(s, i, 0, keepdims=False), lambda same: same, saved
        )

        def forward(one: Any, read: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
            rest = parts.rest(dict(zip(positions, read, strict=True)))
            return floats(layer(one, rest, with_floats(x, values), batch))

        of_layer = treedef.unflatten([w[0] for w in weights])
        _, pull = jax.vjp(forward, of_layer, read_by_all, floats(x))
        gradients, of_rest, dx = pull(dx)
        totals = [total + g for total, g in zip(totals, of_rest, strict=True)]
        gradients = [run.each(g) for g in jax.tree.leaves(gradients)]
        # in a separate barrier: slots are not needed while gradients are computed
        slots = [read_layer(slots, i, count) for _, *slots in leaves]
        states, shared = (list(field) for field in zip(*slots, strict=True))
        new = run.update_layer(stack, i, gradients, (weights, states, shared))
        rows = zip(leaves, zip(*new, strict=True), strict=True)
        return dx, totals, [write_layer(leaf, part, i, count) for leaf, part in rows]

    leaves = list(zip(*run.of(stack.indices), strict=True))
    totals = [jnp.zeros_like(x) for x in read_by_all]
    dx, totals, leaves = lax.fori_loop(0, count, body, (dx, totals, leaves))
    run.set(stack.indices, *zip(*leaves, strict=True))
    run.add(positions, totals)
    return dx


def _backward_once(
    run: Run, stage: LayerFunction, x: Any, dx: list[jax.Array], batch: object, positions: list[int]
) -> list[jax.Array]:
    """Return the gradient of the input of a stage that is no stack, recomputed from that input."""
    parts = run.parts
    read = [parts.leaves[at] for at in positions]
    # else XLA would keep what the forward pass computed from the same arrays
    x, read = varying.after(x, dx), varying.after(read, dx)

    def forward(read: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
        rest = parts.rest(dict(zip(positions, read, strict=True)))
        return floats(stage(None, rest, with_floats(x, values), batch))

    _, pull = jax.vjp(forward, read, floats(x))
    gradients, dx = pull(dx)
    run.add(positions, gradients)
    return dx
