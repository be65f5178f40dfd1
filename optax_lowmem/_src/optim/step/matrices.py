"""The step of a `MatrixRule`, whose direction depends on whole matrices.

Stacks of matrices of equal shape are stepped one after the other, so that temporary memory is that
of one stack. Momentum and weights use the elementwise step: first one without weights, whose
direction is the input of the matrix function; then one without slots, whose gradient is the result
of the matrix function.

On a mesh each device takes some of the matrices of a stack, whole: they are moved once before the
products and once after them, and never between.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from optax_lowmem._src.arrays import varying
from optax_lowmem._src.arrays.sharding import left_to_xla, sharding_of
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.kernels import platform, step_arguments
from optax_lowmem._src.optim.step import xla
from optax_lowmem._src.optim.step.backend import fused_updates
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import OF_BLOCK, MatrixRule, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch

# Elements of a stack and its two products X X^T per device, unless one matrix alone has more:
# 17 MB in bf16, enough to keep a GPU busy.
_ELEMENTS = 1 << 23


@dataclasses.dataclass(frozen=True)
class _Direction(UpdateRule):
    """A rule whose gradient is the final direction; the learning rate differs per leaf."""

    slots = ()
    state_type = None
    prepares = "leaf"

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        """Return the gradient, times the factor of its block if there is one."""
        return (g * h[OF_BLOCK] if OF_BLOCK in h else g), {}


MatrixResults = tuple[list[Leaf], list[Leaf]]


def step_leaves(rule: MatrixRule, batch: LeafBatch) -> MatrixResults:
    """Step matrices, one stack after the other; also returns the new block-wise slots."""
    for plan, leaf in zip(batch.plans, batch.leaves, strict=True):
        varying.check_whole(plan.path, (leaf.g, leaf.state), "a direction of whole matrices")
    results: dict[int, tuple[Leaf, Leaf]] = {}
    done: list[Leaf] = []
    mesh = _mesh(batch.leaves[0].g) if batch.leaves else None
    for indices in stacks(batch.plans, 1 if mesh is None else mesh.size):
        stack = batch.take(indices).with_keys_in_order()
        if done:
            leaves, blockwise = varying.after((stack.leaves, stack.blockwise), done)
            h = _after(stack.hyperparameters, done[-1].p)
            stack = dataclasses.replace(
                stack, leaves=leaves, blockwise=blockwise, hyperparameters=h
            )
        done, blockwise = _step_in_turn(rule, stack)
        results.update(zip(indices, zip(done, blockwise, strict=True), strict=True))
    pairs = [results[i] for i in range(len(batch.plans))]
    return [result for result, _ in pairs], [blockwise for _, blockwise in pairs]


def _on_cpu() -> bool:
    """Return whether XLA's CPU backend compiles the step."""
    return jax.default_backend() == "cpu" and platform.no_gpu_reason() is not None


def _after(h: Arrays, done: jax.Array) -> Arrays:
    """Return `h` with an artificial data dependency on an array, which does not change its values.

    XLA's CPU backend drops barriers before it schedules. On a mesh, where the dependency would
    cause communication, the barrier has to suffice.
    """
    if not _on_cpu() or done.size == 0 or _mesh(done) is not None:
        return h
    first = lax.slice(done, [0] * done.ndim, [1] * done.ndim).reshape(())
    bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    never = lax.population_count(bits) > 32
    return {name: jnp.where(never, jnp.zeros_like(x), x) for name, x in h.items()}


def stacks(plans: Sequence[LeafPlan], devices: int = 1) -> Iterator[list[int]]:
    """Yield the indices of the leaves in each stack, which so many devices share.

    The matrices of a stack have equal shapes.
    """
    kinds: dict[tuple[int, ...], list[int]] = {}
    for i, plan in enumerate(plans):
        assert plan.matrices is not None
        kinds.setdefault(plan.matrices.fans(plan.shape), []).append(i)
    for fans, alike in kinds.items():
        stack: list[int] = []
        elements = 0
        for i in alike:
            matrices = plans[i].matrices
            assert matrices is not None
            size = matrices.count(plans[i].shape) * _temporary_elements(*fans)
            if stack and elements + size > _ELEMENTS * devices:
                yield stack
                stack, elements = [], 0
            stack.append(i)
            elements += size
        yield stack


def _temporary_elements(rows: int, columns: int) -> int:
    """Return the number of elements of a matrix and of two products X X^T."""
    return rows * columns + 2 * min(rows, columns) ** 2


def _step_stack(rule: MatrixRule, stack: LeafBatch) -> MatrixResults:
    blockwise = stack.blockwise
    stack = dataclasses.replace(stack, blockwise=[], blockwise_keys=None)
    h, dtype = stack.hyperparameters, jnp.dtype(rule.dtype)
    bare = dataclasses.replace(
        stack,
        plans=tuple(
            dataclasses.replace(
                plan,
                split=None,
                weight_format=None,
                update_dtype=dtype,
                returns_params=False,
                block=None,
                blockwise=(),
            )  # fmt: skip
            for plan in stack.plans
        ),
        leaves=[leaf._replace(p=None, correction=None) for leaf in stack.leaves],
    )
    moved = fused_updates(rule, bare)
    before = [leaf.p for leaf in moved]
    directions, scales, factors, slots = _directions(rule, stack.plans, before, blockwise, h)
    # without gradient_scale, which the first step applied; no MatrixRule has coupled decay (l2)
    rates = {name: h[name] for name in ("lr", "decay") if name in h}
    landing = dataclasses.replace(
        stack,
        plans=tuple(dataclasses.replace(plan, slots=(), blockwise=()) for plan in stack.plans),
        leaves=[
            Leaf(g=direction, p=leaf.p, correction=leaf.correction, of_block=factor.get(OF_BLOCK))
            for leaf, direction, factor in zip(stack.leaves, directions, factors, strict=True)
        ],
        hyperparameters=rates,
        own=[{"lr": h["lr"] * scale} for scale in scales],
    )
    results = [
        new._replace(p=landed.p, correction=landed.correction)
        for landed, new in zip(fused_updates(_Direction(), landing), moved, strict=True)
    ]
    return results, [old._replace(slots=new) for old, new in zip(blockwise, slots, strict=True)]


_step_stack_uninlined = xla.opaque(jax.jit(_step_stack, static_argnames=("rule",)))


def _step_in_turn(rule: MatrixRule, stack: LeafBatch) -> MatrixResults:
    """Call `_step_stack`, on a CPU without inlining, since XLA would compute all stacks at once."""
    if not _on_cpu() or step_arguments.current().shardings:  # shardings are looked up by path
        return _step_stack(rule, stack)
    results: MatrixResults = _step_stack_uninlined(rule, stack.nameless)
    return results


# of each leaf: the direction, the factors of its rate and of its blocks, block-wise slots
Directions = tuple[
    list[jax.Array], list[jax.Array], list[dict[str, jax.Array]], list[tuple[jax.Array, ...]]
]


def _directions(
    rule: MatrixRule,
    plans: Sequence[LeafPlan],
    before: list[jax.Array],
    blockwise: list[Leaf],
    h: Arrays,
) -> Directions:
    """Return of each leaf the direction, the factors of its rate and blocks, and block-wise slots.

    The factors of its blocks are an operand of the step, if the rule has block-wise slots.
    """

    def work(before: list[jax.Array], values: list[tuple[jax.Array, ...]], h: Arrays) -> Directions:
        pairs = [(plan.matrices, plan.shape) for plan in plans if plan.matrices is not None]
        parts = [m.to_stack(x) for (m, _), x in zip(pairs, before, strict=True)]
        stack = _on_devices(rule, jnp.concatenate(parts) if len(parts) > 1 else parts[0], h)
        directions, start = [], 0
        for (matrices, shape), part in zip(pairs, parts, strict=True):
            stop = start + len(part)
            directions.append(matrices.from_stack(lax.slice_in_dim(stack, start, stop), shape))
            start = stop
        rows = zip(pairs, before, directions, strict=True)
        scales = [rule.scale(m, x, direction, h) for (m, _), x, direction in rows]
        factors: list[dict[str, jax.Array]] = []
        slots: list[tuple[jax.Array, ...]] = []
        for plan, direction, own in zip(plans, directions, values, strict=True):
            if not plan.blockwise or plan.matrices is None:
                factors, slots = [*factors, {}], [*slots, ()]
                continue
            named: Arrays = {slot.name: x for slot, x in zip(plan.blockwise, own, strict=True)}
            factor, named = rule.scale_blocks(plan.matrices, direction, named, h)
            factors.append({OF_BLOCK: factor})
            slots.append(tuple(named[slot.name] for slot in plan.blockwise))
        return directions, scales, factors, slots

    values = [state.slots for state in blockwise]
    of_values = [tuple(sharding_of(x) for x in own) for own in values]
    of_factors = [{OF_BLOCK: own[0]} if own else {} for own in of_values]
    shardings = [sharding_of(x) for x in before], [None] * len(before), of_factors, of_values
    results: Directions = left_to_xla(work, shardings, before, values, dict(h))
    return results


# ---- on a mesh: whole matrices, some on each device ----------------------------------------------


def _mesh(x: jax.Array) -> Mesh | AbstractMesh | None:
    """Return the mesh in an array's type if it has several devices; None in a shard_map."""
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def _on_devices(rule: MatrixRule, stack: jax.Array, h: Arrays) -> jax.Array:
    """Apply `of_matrices` to a stack, distributing whole matrices over the devices."""
    mesh, count = _mesh(stack), stack.shape[0]
    if mesh is None:
        return _in_parts(rule, stack, h)
    axes = PartitionSpec(mesh.axis_names)
    missing = -count % mesh.size
    if count == 1:  # replicate the computation to avoid communication of the result
        axes, missing = PartitionSpec(), 0
    full = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    mapped: Any = jax.shard_map(
        lambda part, h: _in_parts(rule, part, h),
        mesh=mesh,
        in_specs=(axes, PartitionSpec()),
        out_specs=axes,
    )
    result: jax.Array = mapped(full, h)
    return result[:count]


def _in_parts(rule: MatrixRule, stack: jax.Array, h: Arrays) -> jax.Array:
    """Apply `of_matrices` to slices of a stack with at most `_ELEMENTS` elements."""
    count, *shape = stack.shape
    together = max(1, _ELEMENTS // max(1, _temporary_elements(*shape)))
    if count <= together:
        return rule.of_matrices(stack, h)
    result: jax.Array = lax.map(
        lambda matrix: rule.of_matrices(matrix[None], h)[0], stack, batch_size=together
    )
    return result
