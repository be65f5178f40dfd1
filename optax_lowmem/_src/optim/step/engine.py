"""`optimizer`, `direction`: an optax transformation of an `UpdateRule` and a `Storage`.

They make an `Engine`, which plans the leaves, unpacks the state, steps the leaves and packs the new
state.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import host, numerics, random, trees
from optax_lowmem._src.arrays.block import BlockStructure
from optax_lowmem._src.arrays.compiled import FEW, compiled, each, is_eager, unstacked
from optax_lowmem._src.arrays.hyperparameters import (
    LEAST,
    Formula,
    as_f32,
    check_range,
    check_schedule,
    complement,
    is_zero,
)
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Scalar, ScalarOrSchedule
from optax_lowmem._src.kernels import platform, step_arguments
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step import choose, fused_updates, matrices
from optax_lowmem._src.optim.step.matrix_axes import MatrixAxes
from optax_lowmem._src.optim.step.plan import LeafPlanner, warn_of_four_bits
from optax_lowmem._src.optim.step.prepare import prepare_leaves
from optax_lowmem._src.optim.step.rule import MatrixRule, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch, StateFormat, check_order
from optax_lowmem._src.optim.step.storage import Storage, completed, warn_of_patterns

Hyperparameters = Callable[[jax.Array], Arrays]
Schedule = Callable[[jax.Array], ArrayLike]


class EngineTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """An optax transformation of an engine, found again if a tree function rebuilds the tuple."""

    @property
    def engine(self) -> "Engine":
        """Return the engine, whose methods the functions are."""
        engine: Engine = self.init.__self__
        return engine


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Engine(StateFormat, LeafPlanner):
    """An optimizer: the settings of its plans, and its hyperparameters.

    `hyperparameters` returns the f32 scalars of a step, given the count before it; `schedules` are
    those that were given as schedules, by name.
    """

    hyperparameters: Hyperparameters
    schedules: Mapping[str, Schedule] = dataclasses.field(default_factory=dict)

    def transformation(self) -> "EngineTransformation":
        return EngineTransformation(self.init, self.update)

    def init(self, params: optax.Params) -> optax.OptState:
        """Return a zero state with the parameters' sharding; record the decisions."""
        for name, schedule in self.schedules.items():
            check_schedule(name, schedule)
        plans = self.plans(params)
        for plan in plans:
            rule = self.rule.for_leaf(plan.matrices)
            step = functools.partial(choose, rule, plan)
            context.record(context.Decision(plan.path, "step", None, "", choose=step))
        warn_of_patterns(self.storage.policy, params)
        if self.structure is not None:
            self.structure.warn(params)
        warn_of_four_bits(plans)
        return self.zeros(plans, params, context.provided_seed(self.storage.seed))

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        gradient_scale: jax.Array | None = None,
        **_: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Return updates and state; other arguments of optax's wrappers are ignored."""
        return self.run(updates, state, params, gradient_scale=gradient_scale)

    def run(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        *,
        h: Arrays | None = None,
        count: jax.Array | None = None,
        gradient_scale: jax.Array | None = None,
        returns_params: bool = False,
    ) -> tuple[optax.Params, optax.OptState]:
        """Return updates, or new parameters if `returns_params`, and the new state.

        `h` are the step's hyperparameters, by default those at the state's count; `count` is the
        new count, by default the state's plus 1. `gradient_scale` is a factor of the gradients.
        """
        trees.check_state(state, self.rule.state_type)
        streams = any(map(host.is_on_host, jax.tree.leaves(state)))
        if streams:
            if not is_eager(jax.tree.leaves(state)):
                raise ValueError(
                    "this state is in host memory, and a jitted step would copy all of it to the "
                    "device at once: call lowmem.step outside of jit, which streams it parameter "
                    "by parameter, or release.train_step(offload=True) layer by layer."
                )
            state = state._replace(**host.brought({"count": state.count, "seed": state.seed}))
        h = self.hyperparameters(state.count) if h is None else h
        if gradient_scale is not None:
            h = {**h, "gradient_scale": gradient_scale}
        if self.weights and params is None:
            params = self._stand_in(updates, state, h)
        like = updates if params is None else params
        plans = self.plans(like, state, returns_params)
        gradients = trees.match("gradient", updates, like)
        weights = jax.tree.leaves(params) if self.weights else [None] * len(plans)
        if self.weights:
            check_order(gradients, params, state.correction)
        if any(
            plan.writes_weight or any(s.codec for s in (*plan.slots, *plan.blockwise))
            for plan in plans
        ):
            gradients, weights, h = numerics.forbid_differentiation((gradients, weights, dict(h)))
        states, blockwise = self.unpack(state, plans, like)
        paths = [plan.path for plan in plans]
        count, keys = count_and_keys(state.seed, state.count, count, paths)
        leaves = [
            one._replace(g=g, p=p) for one, g, p in zip(states, gradients, weights, strict=True)
        ]
        batch = LeafBatch.of(
            plans, leaves, h, keys, blockwise=blockwise, blockwise_keys=keys,
            implementation=step_arguments.current().implementation,
        )  # fmt: skip
        step = _step_streamed if streams else step_leaves
        leaves, blockwise = step(self.rule, batch)
        results = [leaf.p for leaf in leaves]
        for plan, update in zip(plans, results, strict=True):
            if not returns_params and plan.writes_weight:
                context.emit(plan.path, update)
        if not self.weights and self.storage.update_dtype != "float32":
            results = trees.as_given(results, gradients)
        results = jax.tree.unflatten(jax.tree.structure(like), results)
        return results, self.pack(count, plans, leaves, blockwise, state)

    def _stand_in(self, updates: optax.Updates, state: optax.OptState, h: Arrays) -> optax.Params:
        """Return substitutes for missing parameters: f32 arrays whose values are not used.

        Raises if the step needs the parameters, with the reason.
        """
        reason, named = None, trees.named_leaves(updates)
        narrow = [(name, g) for name, g in named if numerics.is_narrow(jnp.result_type(g))]
        corrected = [name for name, c in trees.named_leaves(state.correction) if jnp.ndim(c)]
        if self.storage.master_weight_bits is not None:
            corrected += [name for name, g in narrow if not jnp.ndim(g)]
        if corrected:
            reason = f"the state corrects the 16-bit weight '{corrected[0]}'"
        elif "decay" in h or "l2" in h:
            reason = "weight decay uses its value"
        elif self.storage.rounds_weights and narrow:
            reason = "stochastic rounding of 16-bit weights uses its value"
        elif self.storage.update_dtype == "param":
            reason = "update_dtype='param' uses its dtype"
        if reason is not None:
            raise ValueError(f"{trees.NO_PARAMS_MSG} It is needed because {reason}.")
        return trees.widened(updates)


@compiled
def count_and_keys(
    seed: jax.Array, before: jax.Array, count: jax.Array | None, paths: list[str]
) -> tuple[jax.Array, jax.Array]:
    """Return the new count (or the given one) and the random keys, uint32 [leaves]."""
    if count is None:
        count = optax.safe_increment(before)
    return count, random.leaf_keys(seed, count, paths)


Stepped = tuple[list[Leaf], list[Leaf]]


def step_leaves(rule: UpdateRule, batch: LeafBatch) -> Stepped:
    """Return the leaves after a step of parameters or their shards, and their block-wise slots."""
    plans = [
        dataclasses.replace(plan, update_dtype=leaf.g.dtype)
        if plan.follows_gradient and leaf.g.dtype == plan.dtype
        else plan
        for plan, leaf in zip(batch.plans, batch.leaves, strict=True)
    ]
    batch = dataclasses.replace(batch, plans=tuple(plans))
    # XLA's time to compile an eager step grows with the number of parameters; then one program per
    # shape is compiled. A GPU steps many parameters in one launch.
    by_xla = batch.implementation in (None, "xla") and platform.no_gpu_reason() is not None
    if len(plans) > FEW and by_xla and is_eager(jax.tree.leaves(batch)):
        return _joined(each(_step_leaves, [(rule, one) for one in _one_by_one(batch)]))
    if step_arguments.current().shardings:  # in the context, which is no argument of a program
        return _step_leaves(rule, batch)
    return compiled(_step_leaves)(rule, batch)


def _joined(stepped: Sequence[Stepped]) -> Stepped:
    """Join the results of batches of one parameter each."""
    leaves, blockwise = ([x for (x,) in column] for column in zip(*stepped, strict=True))
    return leaves, blockwise


def _one_by_one(batch: LeafBatch) -> list[LeafBatch]:
    """Return a batch of each entry, without names, so that equal ones share a compiled step."""
    assert batch.blockwise_keys is not None
    keys: list[PyTree] = unstacked(batch.keys)
    blockwise_keys: list[PyTree] = unstacked(batch.blockwise_keys)
    return [
        dataclasses.replace(
            batch.take([i]).nameless,
            keys=keys[number][None],
            blockwise_keys=blockwise_keys[number][None],
            numbers=(0,),
        )
        for i, number in enumerate(batch.numbers)
    ]


def _step_streamed(rule: UpdateRule, batch: LeafBatch) -> Stepped:
    """Do `step_leaves` one by one, with each state copied from host memory and back."""

    def bring(one: LeafBatch) -> LeafBatch:
        (leaf,) = one.leaves
        state, blockwise = host.brought((leaf.state, one.blockwise))
        return dataclasses.replace(
            one, leaves=[state._replace(g=leaf.g, p=leaf.p)], blockwise=blockwise
        )

    running, stepped, batches = host.RunAhead(), [], _one_by_one(batch)
    for before, one in zip(batches, host.ahead(batches, bring), strict=True):
        (leaf,), blockwise = compiled(_step_leaves)(rule, one)
        states = host.put_back((leaf.state, blockwise), (before.leaves[0].state, before.blockwise))
        running.dispatched((leaf.p, states))
        stepped.append(([states[0]._replace(p=leaf.p)], states[1]))
    return _joined(stepped)


def _step_leaves(rule: UpdateRule, batch: LeafBatch) -> Stepped:
    """Prepare and step leaves; if matrices have another rule, those with one rule together."""
    if isinstance(rule, MatrixRule):
        return matrices.step_leaves(rule, batch)
    if rule.prepares == "matrices":
        return _step_by_rule(rule, batch)
    blockwise = batch.blockwise
    if rule.prepares is not None:
        batch, blockwise = prepare_leaves(rule, batch)
    batch = dataclasses.replace(batch, blockwise=[], blockwise_keys=None)
    return fused_updates(rule, batch), blockwise


def _step_by_rule(rule: UpdateRule, batch: LeafBatch) -> Stepped:
    """Do `_step_leaves` for the leaves of each rule that `rule.for_leaf` returns."""
    parts: dict[UpdateRule, list[int]] = {}
    for i, plan in enumerate(batch.plans):
        parts.setdefault(rule.for_leaf(plan.matrices), []).append(i)
    results: dict[int, tuple[Leaf, Leaf]] = {}
    for leaf_rule, indices in parts.items():
        part = batch.take(indices).with_keys_in_order()
        h = rule.hyperparameters_of(part.plans[0].matrices, part.hyperparameters)
        stepped = _step_leaves(leaf_rule, dataclasses.replace(part, hyperparameters=h))
        results.update(zip(indices, zip(*stepped, strict=True), strict=True))
    rows = [results[i] for i in range(len(batch.plans))]
    return [leaf for leaf, _ in rows], [blockwise for _, blockwise in rows]


# ---- constructors --------------------------------------------------------------------------------

_BY_NAME = (
    "a function such as lambda params: jax.tree.map_with_path("
    "lambda path, _: '{}' in jax.tree_util.keystr(path), params)"
)


def at_count(name: str, value: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """Return a hyperparameter at step `count` (schedules are called with 0, 1, ...)."""
    return as_f32(name, value(count) if callable(value) else value)


def _peak(learning_rate: ScalarOrSchedule, decouple_lr: bool | float) -> jax.Array | None:
    if decouple_lr is False:
        return None
    if decouple_lr is True:
        if callable(learning_rate):
            raise ValueError(
                "decouple_lr=True needs the largest learning rate of the schedule: pass it as a "
                "number, such as decouple_lr=3e-4"
            )
        if isinstance(learning_rate, jax.Array):
            raise ValueError(
                "decouple_lr=True needs the largest learning rate, but an array may be that of one "
                "step (as under inject_hyperparams): pass a number, such as decouple_lr=3e-4"
            )
        return as_f32("learning_rate", learning_rate)
    check_range("decouple_lr", decouple_lr, 0.0)
    return as_f32("decouple_lr", decouple_lr)


def optimizer(
    rule: UpdateRule,
    moments: Formula,
    learning_rate: ScalarOrSchedule,
    storage: Storage,
    momentum: Scalar | None = None,
    *,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: optax.MaskOrFn = None,
    decouple_lr: bool | float = False,
    coupled: bool = False,
    rate_in_rule: bool = False,
    slot_dtypes: Mapping[str, DTypeLike | None] | None = None,
    structure: BlockStructure | None = None,
    matrices: MatrixAxes | None = None,
    rates: Mapping[str, ScalarOrSchedule] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation w <- w - lr (direction + weight_decay w) for a rule.

    `moments` computes the rule's hyperparameters from the count before the step, and may read other
    learning `rates`. Weight decay of the Python number 0.0 is omitted; if `coupled`, it is added to
    the gradient (L2). With `decouple_lr` it is weight_decay lr / peak: True for the (constant)
    learning rate as the peak, a number for the peak of a schedule. If `rate_in_rule`, the rule
    multiplies by h["rate"] before it updates its slots, as `optax.rmsprop` before its momentum. The
    other arguments are as in `LeafPlanner`. `momentum` is the decay of the slot mu, given if the
    rule's direction is proportional to mu, which error feedback needs.
    """
    storage = _checked(storage, structure, slot_dtypes or {})
    if storage.error_feedback and (momentum is None or is_zero(momentum)):
        raise ValueError(
            "error_feedback=True needs a momentum to which the direction is proportional, and this "
            "optimizer has none: use AdamW or one of its variants with b1 > 0, SGD with momentum, "
            "or error_feedback=False."
        )
    decay_of_mu = momentum if storage.error_feedback else None
    check_range("learning_rate", learning_rate, 0.0)
    check_range("weight_decay", weight_decay, 0.0)
    trees.check_mask("the mask of weight decay", mask, _BY_NAME)
    peak = _peak(learning_rate, decouple_lr)
    decay = None if is_zero(weight_decay) else weight_decay
    given = {"learning_rate": learning_rate, "weight_decay": decay}

    def hyperparameters(count: jax.Array) -> Arrays:
        # call schedules here: they are user code that may not be traceable
        lr, decay = (
            at_count(name, value, count) if callable(value) else value
            for name, value in given.items()
        )
        arguments = moments, lr, decay, peak, coupled, rate_in_rule, decay_of_mu
        return Formula(_hyperparameters_at, arguments)(count)

    return Engine(
        rule=rule,
        hyperparameters=hyperparameters,
        schedules={k: v for k, v in {**given, **(rates or {})}.items() if callable(v)},
        storage=storage,
        decay_mask=mask,
        slot_dtypes=slot_dtypes or {},
        structure=structure,
        matrices=matrices,
    ).transformation()


def _hyperparameters_at(
    moments: Formula,
    learning_rate: Scalar,
    weight_decay: Scalar | None,
    peak: jax.Array | None,
    coupled: bool,
    rate_in_rule: bool,
    momentum: Scalar | None,
    count: jax.Array,
) -> Arrays:
    lr = as_f32("learning_rate", learning_rate)
    rates = {"rate": lr, "lr": jnp.float32(1)} if rate_in_rule else {"lr": lr}
    h = {**moments(count), **rates}
    if weight_decay is not None and coupled:
        h["l2"] = as_f32("weight_decay", weight_decay)
    elif weight_decay is not None:
        decay = as_f32("weight_decay", weight_decay)
        h["decay"] = decay * (lr if peak is None else jnp.where(peak > 0, lr / peak, 0))
    if momentum is not None:  # of `reference.feed_back`
        b = as_f32("momentum", momentum)
        share = complement("momentum", momentum) / jnp.maximum(b, LEAST)
        h["feedback"] = jnp.where(b > 0, share, 0)
        h["feedback_rate"] = jnp.maximum(lr, LEAST)
    return h


def _checked(
    storage: Storage, structure: BlockStructure | None, slot_dtypes: Mapping[str, DTypeLike | None]
) -> Storage:
    """Return a storage with no field left to the optimizer; raise if it is wrong.

    Warn of slot dtypes that compressed leaves do not have.
    """
    if not isinstance(storage, Storage):
        raise TypeError(f"storage takes a lowmem.Storage, got {storage!r}")
    storage = completed(storage)
    if storage.rounding == "embeddings" and structure is None:
        raise ValueError(
            "rounding='embeddings' needs an optimizer that knows which leaves are embeddings, such "
            "as q_adam_mini: use 'stochastic' or 'nearest' here."
        )
    if storage.weights != "bfloat16" and storage.mu is None and storage.nu is None:
        raise ValueError(
            f"weights={storage.weights!r} is for parameters whose moments are stored as codes, and "
            "mu and nu are None: give a codec for one of them, such as mu='int8'."
        )
    for slot, dtype in slot_dtypes.items():
        codec = getattr(storage, slot)
        if dtype is not None and codec is not None:
            warnings.warn(
                f"the dtype of {slot}, {jnp.dtype(dtype)}, applies only to leaves that are too "
                f"small or excluded: in all others {slot} is {codec.name}. Omit it, or keep {slot} "
                f"uncompressed everywhere with storage=Storage({slot}=None).",
                stacklevel=4,  # the call of the optimizer
            )
    return storage


def direction(
    rule: UpdateRule,
    moments: Formula,
    storage: Storage,
    slot_dtypes: Mapping[str, DTypeLike | None] | None = None,
    structure: BlockStructure | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that computes a rule's direction only (optax's `scale_by_*`)."""
    storage = _checked(storage, structure, slot_dtypes or {})
    if storage.error_feedback:
        raise ValueError(
            "error_feedback=True is for optimizers that update the weights, such as flash_adamw: a "
            "direction alone knows neither the learning rate nor the rounding of the weights."
        )
    return Engine(
        rule=rule,
        hyperparameters=moments,
        storage=storage,
        weights=False,
        slot_dtypes=slot_dtypes or {},
        structure=structure,
    ).transformation()
