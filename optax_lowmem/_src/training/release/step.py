"""Training step of a layered model that updates each layer during the backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lowmem._src.arrays import varying
from optax_lowmem._src.arrays.hyperparameters import check_choice, check_count
from optax_lowmem._src.arrays.sharding import named_shardings
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step import IMPLEMENTATIONS
from optax_lowmem._src.optim.wrappers.chain import clipping_factor
from optax_lowmem._src.training.release import stages
from optax_lowmem._src.training.release.model import Layered, LayerFunction, Parts, Stack, map_x
from optax_lowmem._src.training.release.offload_step import Offloaded
from optax_lowmem._src.training.release.optimizer import Optimizer
from optax_lowmem._src.training.release.trace import TracedLoss, trace
from optax_lowmem._src.training.release.update import (
    LeafArrays,
    Plans,
    Update,
    read_layer,
    squares_of,
    write_layer,
)

# ---- what becomes of the gradients ---------------------------------------------------------------

Gradient = Callable[[jax.Array], jax.Array]


class Norm:
    """The squares of all gradients, to each of which a function (`each`) is applied, added up."""

    def __init__(self, parts: Parts, each: Gradient):
        self.parts, self.each, self.squares = parts, each, jnp.float32(0)
        self._totals: dict[int, jax.Array] = {}

    def add(self, positions: Sequence[int], gradients: Sequence[jax.Array]) -> None:
        """Add gradients to the totals of leaves of the rest, given by position in it."""
        for at, g in zip(positions, gradients, strict=True):
            self._totals[at] = self._totals[at] + g if at in self._totals else g

    def pop(self, positions: Sequence[int]) -> list[jax.Array]:
        """Return the totals of leaves of the rest; zeros of leaves that no stage reads."""
        leaves = self.parts.leaves
        totals = [self._totals.pop(at, None) for at in positions]
        rows = zip(positions, totals, strict=True)
        return [self.each(jnp.zeros_like(leaves[at]) if t is None else t) for at, t in rows]

    def finish_rest(self, positions: Sequence[int], then: Any) -> Any:
        """Use the gradients of leaves of the rest; return `then`, delayed until they are freed."""
        self.squares += squares_of(self.pop(positions))
        return varying.after(then, self.squares)

    def begin_stack(self, stack: Stack) -> Any:
        """Return what a loop over the layers of a stack carries."""
        return self.squares

    def weights(self, stack: Stack, layer: jax.Array, carry: Any) -> list[jax.Array]:
        """Return the weights of a layer, with a layer axis of size 1."""
        return [read_layer(w, layer, stack.layers) for w in jax.tree.leaves(stack.tree)]

    def layer(
        self, stack: Stack, layer: jax.Array, weights: Any, gradients: Any, carry: Any
    ) -> Any:
        """Use the gradients of a layer; return the new carry."""
        return carry + squares_of(gradients)

    def end_stack(self, stack: Stack, carry: Any) -> None:
        """Keep the carry of a loop that has ended."""
        self.squares = carry


class Step(Norm):
    """The leaves of the tree, each old until it is updated."""

    def __init__(self, plans: Plans, update: Update, leaves: LeafArrays, each: Gradient):
        super().__init__(plans.parts, each)
        self.update, self.leaves = update, list(zip(*leaves, strict=True))

    def finish_rest(self, positions: Sequence[int], then: Any) -> Any:
        if not positions:
            return then
        indices = [self.parts.indices[at] for at in positions]
        leaves: Any = map(list, zip(*(self.leaves[i] for i in indices), strict=True))
        result = self.update.rest(indices, self.pop(positions), tuple(leaves))
        self._set(indices, zip(*result, strict=True))
        return varying.after(then, result)

    def begin_stack(self, stack: Stack) -> Any:
        return [self.leaves[i] for i in stack.indices]

    def weights(self, stack: Stack, layer: jax.Array, carry: Any) -> list[jax.Array]:
        return [read_layer(weight, layer, stack.layers) for weight, *_ in carry]

    def layer(
        self, stack: Stack, layer: jax.Array, weights: Any, gradients: Any, carry: Any
    ) -> Any:
        # in a separate barrier: slots are not needed while gradients are computed
        slots = [read_layer(slots, layer, stack.layers) for _, *slots in carry]
        states, blockwise = (list(field) for field in zip(*slots, strict=True))
        new = self.update.layer(stack, layer, gradients, (weights, states, blockwise))
        rows = zip(carry, zip(*new, strict=True), strict=True)
        return [write_layer(leaf, part, layer, stack.layers) for leaf, part in rows]

    def end_stack(self, stack: Stack, carry: Any) -> None:
        self._set(stack.indices, carry)

    def _set(self, indices: Sequence[int], leaves: Any) -> None:
        for i, leaf in zip(indices, leaves, strict=True):
            self.leaves[i] = tuple(leaf)


def train_step(
    tx: optax.GradientTransformation,
    model: Layered | Callable[[Any, Any], Any],
    *,
    layers: str | Sequence[str] = (),
    has_aux: bool = False,
    each_gradient: Gradient | None = None,
    clip_layer_norm: float | None = None,
    per_layer: bool = False,
    offload: bool = False,
    micro_batches: int = 1,
    at_once: int | None = None,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    specs: object = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return a training step that never stores the gradients of all layers at once.

    The forward pass saves the input of every layer. The backward pass loops over the layers: it
    recomputes a layer from its input, computes its gradients, updates its slice of every weight and
    slot, and writes the slices back in place. The rest of the parameters are updated as soon as no
    earlier stage reads them.

    The result equals `jax.value_and_grad(model)` with `lowmem.step`, including random bits.

    A loss function is traced and cut into such stages: at every `lax.scan` over parameters (also
    those of `nn.scan` and `nnx.scan`), and between the layers that `layers` names, where the fewest
    bytes pass from one layer to the next. Values that depend on no parameter (masks, rotary tables,
    dropout keys) are computed once. Layers in a list may differ, and share parameters.

    Args:
      tx: one of our optimizers, such as `flash_adamw(schedule, mask=...)`; or
        `lowmem.chain(optax.clip_by_global_norm(c), optimizer)`, whose norm takes a backward pass
        of its own: a step then does 7/4 of the work of one without clipping.
      model: a loss function, (params, batch) -> loss, or a `Layered`.
      layers: for a loss function that calls its layers one by one: the path in the parameters of
        the list of layers ("layers", "decoder/blocks"), or a pattern of the paths of the layers
        ("Block_*"), or several. Scans over parameters at other paths are then not cut.
      has_aux: whether a loss function returns (loss, aux).
      each_gradient: function applied to every gradient; for a stack, to one layer at a time,
        without the layer axis. For elementwise work such as clipping by value, or `lax.pmean`
        inside a `shard_map`.
      clip_layer_norm: the norm to which the gradient of each layer is clipped, and that of each
        parameter outside of stacks; None: no clipping. It reads each gradient once more. Layers
        are scaled by different factors, so it is not clipping by the global norm.
      per_layer: whether an optimizer that reduces over whole tensors (`stable_adamw`'s RMS_t) may
        reduce over each layer, as in the same model unrolled; otherwise it raises an error.
      offload: whether the state is one of `release.offload`, in host memory, and the weights, too,
        if they are those of `release.offload_weights`; see below.
      micro_batches: with `offload`, the number of micro-batches of a batch, as in
        `lowmem.value_and_grad`. All of them pass a layer before the next one, their gradients of
        this layer are added in f32, and the state is copied once per step.
      at_once: the micro-batches that pass through the model together; None: all. Their layer inputs
        are in host memory. If not all, so is a sum of all gradients, 4 bytes per parameter.
      implementation: as in `lowmem.step`.
      mesh: likewise.
      specs: likewise; the layer axis must not be sharded.

    Returns:
      (params, state, batch) -> (loss, params, state), with (loss, aux) for loss if the model has
      aux and the batch is not divided. Jit it with `donate_argnums=(0, 1)`; it donates nothing by
      itself. With `offload` call it without jit: it compiles each stage, and donates params and
      state. `step.compile(params, state, batch)` compiles the stages ahead, from shapes: those of
      the state are `offload(tx, model, params)` of the parameters' shapes. With `offload`,
      `step.loss(params, state, batch)` is the loss of a batch that is not divided, for evaluation.
      All three take frozen parameters as a fourth argument; see below.

    Raises:
      TypeError: if `model` or `each_gradient` is no function; for `layers` and `has_aux` with a
        `Layered`, and for `offload` without one.
      ValueError: for a transformation that may need all gradients at once: anything else around or
        before one of our optimizers (`accumulate_gradients`, `MultiSteps`); for arguments that
        `offload` excludes or needs. When called, for a leaf whose layers depend on one another,
        for a parameter that is both trained and frozen, and for a loss function without layers, or
        whose layers cannot be separated.
      MemoryError: with `offload`, at the first step, if host memory is too small.

    Memory: besides weights, state and the inputs of the layers (which rematerialisation of each
    layer stores anyway), the working set of one layer: its backward pass, its gradients, and a copy
    of its slices. An ordinary step stores the gradients of all layers, 2 or 4 bytes per parameter.
    A value that depends on the parameters and skips layers is stored once.

    Offload: correction and moments of each layer are copied to the device for its update and back,
    beside the computation of other layers. On the device are the weights, three layers of state and
    the working set; on the host the state and, of all layers, the inputs of the micro-batches.
    Weights of `offload_weights` are on the host, too, and three layers of them on the device: one
    is copied ahead of its forward pass, ahead of its backward pass, and back after its update. A
    leaf outside of stacks, such as an embedding, is on the device while a stage needs it.

    Frozen: with `offload`, `step(params, state, batch, frozen)` trains `params` alone, such as
    LoRA's adapters. The stages get both trees joined: dicts by their keys, and in other nodes each
    None is replaced by what the other tree has there, so that `eqx.partition` makes such trees.
    `frozen` has no gradients and no state, and is neither donated nor returned. If it is that of
    `offload_weights`, in 16 bits or as `NF4Array`s, its layers are copied to the device ahead of
    both passes, and none is copied back; `params` and their state may stay on the device
    (`offload(..., memory_kind="device")`).

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
    optimizer = Optimizer.of(tx)
    engine, each = optimizer.engine, each_gradient or (lambda g: g)
    if isinstance(model, Layered) and (layers or has_aux):
        raise TypeError("layers and has_aux are arguments for a loss function; a Layered has both")
    if not callable(model):
        raise TypeError(
            "model must be a loss function (params, batch) -> loss, or a release.Layered, got "
            f"{type(model).__name__}"
        )
    if each_gradient is not None and not callable(each_gradient):
        raise TypeError(f"each_gradient must be a function of an array, got {each_gradient!r}")
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    if clip_layer_norm is not None and optimizer.limit is not None:
        raise ValueError("clip_layer_norm and a chain with clip_by_global_norm: leave out one.")
    for name, count in (("micro_batches", micro_batches), ("at_once", at_once)):
        if count is not None:
            check_count(name, count, 1, "micro-batches")
    if offload and (mesh is not None or specs is not None):
        raise ValueError("offload=True streams the state to one device, without mesh and specs.")
    if offload:
        if not isinstance(model, Layered):
            raise TypeError("offload=True takes a release.Layered, not a loss function.")
        return Offloaded(
            optimizer, model, each, per_layer, implementation, clip_layer_norm, micro_batches,
            min(at_once or micro_batches, micro_batches),
        )  # fmt: skip
    if micro_batches > 1 or at_once is not None:
        raise ValueError("micro_batches and at_once need offload=True.")

    def step(params: optax.Params, state: optax.OptState, batch: object) -> tuple[Any, Any, Any]:
        places = None if specs is None else named_shardings(params, specs, mesh)
        with step_arguments.stepping(implementation=implementation, shardings=places):
            inner = optimizer.inner(state)
            layered: Layered | TracedLoss
            layered, inputs = (
                (model, batch)
                if isinstance(model, Layered)
                else trace(model, params, batch, layers, has_aux)
            )
            plans = Plans.make(engine, layered.take_apart(params), params, inner, per_layer)
            states, blockwise = engine.unpack(inner, plans.whole, params)
            passes, factor = Passes(layered, plans.parts, inputs), None
            if optimizer.limit is not None:
                norm = Norm(plans.parts, each)
                passes.backward(norm)
                factor = clipping_factor(optimizer.limit, jnp.sqrt(norm.squares))
                passes.after(factor)
            update = Update.begin(plans, inner.count, inner.seed, clip_layer_norm, factor)
            run = Step(plans, update, (jax.tree.leaves(params), states, blockwise), each)
            loss = passes.backward(run)
            weights, states, blockwise = map(list, zip(*run.leaves, strict=True))
            new = engine.pack(update.count, plans.whole, states, blockwise, inner)
            treedef: Any = jax.tree.structure(params)
            return loss, treedef.unflatten(weights), optimizer.outer(state, new)

    return step


class Passes:
    """A forward pass, whose layers' inputs are saved, and backward passes."""

    def __init__(self, model: Layered | TracedLoss, parts: Parts, batch: object):
        self.model, self.parts, self.batch = model, parts, batch
        self.schedule = stages.Schedule.make(model, parts, batch)
        x, self.pull_first = stages.first(model, parts, batch, self.schedule.reading[0])
        self.inputs = []
        for path, layer in model.layers.items():
            if path not in parts.stacks:
                self.inputs.append(x)
                x = layer(None, parts.rest(), x, batch)
                continue

            def body(x: object, weights: object, layer: LayerFunction = layer) -> tuple[Any, Any]:
                changing = map_x(lambda array: array, lambda _: None, x)
                return layer(weights, parts.rest(), x, batch), jax.tree.leaves(changing)

            end, saved = lax.scan(body, x, parts.stacks[path].tree)
            each = iter(saved)
            self.inputs.append(map_x(lambda _, each=each: next(each), lambda same: same, x))
            x = end
        self.x = x

    def after(self, earlier: object) -> None:
        """Begin another backward pass, which XLA does not merge with the one before."""
        self.x, self.inputs = varying.after((self.x, self.inputs), earlier)

    def backward(self, use: Norm) -> Any:
        """Return the loss (and aux), and pass all gradients to `use`."""
        model, parts = self.model, self.parts
        reading, due = self.schedule.reading, self.schedule.due
        loss, gradients, dx = stages.last(model, parts, self.x, self.batch, reading[-1])
        use.add(reading[-1], gradients)
        dx = use.finish_rest(due[-1], dx)
        rows = zip(model.layers.items(), self.inputs, reading[1:-1], due[1:-1], strict=True)
        for (path, layer), saved, positions, done in reversed(list(rows)):
            if path in parts.stacks:
                dx = self._stack(use, layer, parts.stacks[path], saved, dx, positions)
            else:
                gradients, dx = self._once(layer, saved, dx, positions)
                use.add(positions, gradients)
            dx = use.finish_rest(done, dx)
        use.add(reading[0], self.pull_first(dx)[0])
        use.finish_rest(due[0], ())
        return loss

    def _once(
        self, stage: LayerFunction, x: Any, dx: list[jax.Array], positions: list[int]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the gradients of leaves and of x, of a stage that is no stack."""
        # delayed: else XLA would keep what the forward pass computed from the same arrays:
        # https://github.com/jax-ml/jax/issues/13999
        x, batch = varying.after(x, dx), varying.after(self.batch, dx)
        read = varying.after([self.parts.leaves[at] for at in positions], dx)
        leaves = self.parts.leaves[:]
        for at, leaf in zip(positions, read, strict=True):
            leaves[at] = leaf
        parts = dataclasses.replace(self.parts, leaves=leaves)
        return stages.pull_layer(stage, parts, None, positions, x, dx, batch)[1:]

    def _stack(
        self, use: Norm, layer: LayerFunction, stack: Stack, saved: Any, dx: Any, positions: Any
    ) -> list[jax.Array]:
        """Return the gradient of a stack's input, and pass those of its layers to `use`."""
        parts, count = self.parts, stack.layers
        treedef: Any = jax.tree.structure(stack.tree)

        def body(k: jax.Array, carry: Any) -> Any:
            dx, totals, of_use = carry
            i = count - 1 - k
            weights = use.weights(stack, i, of_use)
            x = map_x(
                lambda s: lax.dynamic_index_in_dim(s, i, 0, keepdims=False),
                lambda same: same,
                saved,
            )
            of_layer = treedef.unflatten([w[0] for w in weights])
            gradients, rest_gradients, dx = stages.pull_layer(
                layer, parts, of_layer, positions, x, dx, self.batch
            )
            totals = [total + g for total, g in zip(totals, rest_gradients, strict=True)]
            gradients = [use.each(g) for g in gradients]
            return dx, totals, use.layer(stack, i, weights, gradients, of_use)

        totals = [jnp.zeros_like(parts.leaves[at]) for at in positions]
        dx, totals, carry = lax.fori_loop(0, count, body, (dx, totals, use.begin_stack(stack)))
        use.end_stack(stack, carry)
        use.add(positions, totals)
        return dx
