"""`Engine`: makes an optax transformation from an `UpdateRule` and a `Storage`.

A step plans the leaves, unpacks the state, steps the leaves and packs the new state.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import host, numerics, random, trees
from optax_lowmem._src.arrays.compiled import FEW, compiled, each, is_eager, unstacked
from optax_lowmem._src.arrays.hyperparameters import check_schedule
from optax_lowmem._src.arrays.typing import Arrays, PyTree
from optax_lowmem._src.kernels import platform, step_arguments
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step import choose, fused_updates, matrices
from optax_lowmem._src.optim.step.plan import LeafPlanner, warn_of_four_bits
from optax_lowmem._src.optim.step.prepare import prepare_leaves
from optax_lowmem._src.optim.step.rule import MatrixRule, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch, StateFormat, check_order
from optax_lowmem._src.optim.step.storage import warn_of_patterns

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
        running.add((leaf.p, states))
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
