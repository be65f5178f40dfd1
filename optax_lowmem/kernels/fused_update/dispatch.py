"""Which implementation takes a leaf: decided when tracing, by `supported`, never by catching."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._core.rules import UpdateRule
from optax_lowmem.kernels import platform
from optax_lowmem.kernels.fused_update import operands, packed, reference, tuning, twopass
from optax_lowmem.kernels.fused_update.plan import LeafPlan, LeafState
from optax_lowmem.kernels.tiles import MAX_ELEMENTS, Tiling

IMPLEMENTATIONS = ("xla", "pallas", "triton")
_KERNELS = ("pallas", "triton")
_ELEMENTWISE = "no slot is compressed: plain elementwise work, which XLA fuses well"
_SMALL = 1 << 16  # elements; XLA launches a kernel for each leaf without codes, small or not


def _unsupported(kernel: str, rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Why a kernel cannot take a leaf on any machine."""
    size = math.prod(plan.shape)
    if not plan.shape or size == 0:
        return "a 0-d or empty leaf has no tiles"
    if size > MAX_ELEMENTS:
        return f"{size} elements, more than a kernel's 32-bit offsets reach"
    if kernel == "pallas":
        return None if platform.has_pallas_triton() else "this JAX has no Pallas-Triton lowering"
    if not platform.has_jax_triton():
        return "jax-triton is not installed (pip install optax-lowmem[gpu])"
    from optax_lowmem.kernels.fused_update import jax_triton

    return jax_triton.supported(rule, plan)


def choose(
    rule: UpdateRule, plan: LeafPlan, implementation: str | None = None, g: Any = None
) -> tuple[str, str]:
    """(implementation of a leaf, why).

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's.
      implementation: the caller's choice, or None.
      g: the leaf's gradient, for where it lies.

    Raises:
      ValueError: where the caller's choice cannot take the leaf.
    """
    if implementation == "xla":
        return "xla", "asked for"
    if implementation is not None:
        return _asked_for(rule, plan, implementation)
    if not plan.grouped and math.prod(plan.shape) > _SMALL:
        return "xla", _ELEMENTWISE
    nowhere = platform.no_kernel_reason(g)
    if nowhere is not None:
        return "xla", nowhere
    reasons = {kernel: _unsupported(kernel, rule, plan) for kernel in _KERNELS}
    for kernel, reason in reasons.items():
        if reason is None:
            return kernel, "fused kernel"
    return "xla", "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())


def _asked_for(rule: UpdateRule, plan: LeafPlan, kernel: str) -> tuple[str, str]:
    reason = platform.no_device_reason() or _unsupported(kernel, rule, plan)
    if reason is None and (plan.grouped or math.prod(plan.shape) <= _SMALL):
        return kernel, "asked for"
    if not plan.grouped and platform.no_device_reason() is None:
        return "xla", reason or _ELEMENTWISE
    raise ValueError(
        f"implementation={kernel!r} cannot take leaf '{plan.path}': {reason}. Pass "
        "implementation=None to use what can."
    )


def fused_updates(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    states: Sequence[LeafState],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    alive: jax.Array,
    implementation: str | None = None,
    tuned: tuning.Tuning | None = None,
) -> list[tuple[jax.Array, LeafState]]:
    """`reference.fused_update` of every leaf, by the fastest implementation for each.

    Args:
      rule: the optimizer's arithmetic.
      plans: the leaves' static choices.
      gradients: one a leaf.
      weights: parameters, or None each.
      states: stored states.
      h: f32 hyperparameters.
      keys: uint32 [leaves], for the rounding of each leaf in this step.
      alive: a traced True (see `packed`).
      implementation: `xla`, `pallas`, `triton`, or None for the fastest.
      tuned: how a kernel's work is cut; None for what is known of the device.
    """
    chosen = [
        choose(rule, plan, implementation, g)[0] for plan, g in zip(plans, gradients, strict=True)
    ]
    results: dict[int, tuple[jax.Array, LeafState]] = {}
    rows: list[Any] = list(zip(plans, gradients, weights, states, strict=True))
    for kernel in _KERNELS:
        mine = [i for i, name in enumerate(chosen) if name == kernel]
        if not mine:
            continue
        cut = tuning.resolve(tuned, kernel, len(rule.slots))
        for batch in _batches(rows, mine, cut):
            taken = [rows[i] for i in batch]
            found = _by_kernel(
                rule, kernel, taken, h, keys, batch, alive, cut.tile, implementation is None
            )
            results.update(zip(batch, found, strict=True))
    for i, name in enumerate(chosen):
        if name == "xla":
            plan, g, p, state = rows[i]
            results[i] = fused_update(rule, plan.nameless, g, p, state, h, keys[i], alive)
    return [results[i] for i in range(len(rows))]


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
    alive: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """`reference.fused_update` in the form that XLA compiles best for the backend.

    Compiled once for leaves of one shape and plan, also outside of a jit. The arguments are those
    of `reference.fused_update`, and `alive`, a traced True (see `packed`).
    """
    for path in (packed, twopass):
        if path.supported(plan, jax.default_backend()) is None:
            return path.fused_update(rule, plan, g, p, state, h, key, alive)
    return reference.fused_update(rule, plan, g, p, state, h, key)


def _batches(
    rows: Sequence[tuple], indices: Sequence[int], tuned: tuning.Tuning
) -> list[list[int]]:
    """Leaves that share a launch: neighbours in the tree that differ in shape alone."""
    done: list[list[int]] = []
    opened: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for i in indices:
        plan, g = rows[i][:2]
        lanes = Tiling(plan.shape, plan.group_size, tuned.tile.elements).lanes
        kind = (dataclasses.replace(plan.nameless, shape=()), lanes, jnp.dtype(g.dtype))
        size = math.prod(plan.shape)
        full = len(opened.get(kind, ())) == tuned.leaves
        if kind in opened and (full or sizes[kind] + size > tuned.elements):
            done.append(opened.pop(kind))
        opened.setdefault(kind, []).append(i)
        sizes[kind] = size + (sizes[kind] if len(opened[kind]) > 1 else 0)
    return done + list(opened.values())


def _by_kernel(
    rule: UpdateRule,
    kernel: str,
    rows: Sequence[tuple],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    numbers: Sequence[int],
    alive: jax.Array,
    tile: Any,
    automatic: bool,
) -> list[tuple[jax.Array, LeafState]]:
    """The leaves of one launch."""
    plans = tuple(plan.nameless for plan, *_ in rows)
    arrays = [row[1:] for row in rows]
    names = tuple(sorted(h))
    scalars = jnp.stack([h[name] for name in names])
    leaf_numbers = jnp.asarray(numbers, jnp.int32)

    def launched(arrays: Any, scalars: Any, keys: Any, h: Any, alive: Any) -> Any:
        del h, alive
        leaves = tuple(operands.leaf_of(p, *row) for p, row in zip(plans, arrays, strict=True))
        launch = _launcher(kernel)
        found = launch(rule, plans, leaves, names, scalars, keys, leaf_numbers, tile)
        return [
            (_update(plan, row[1], result), operands.state_of(plan, row[2], result))
            for plan, row, result in zip(plans, arrays, found, strict=True)
        ]

    def plain(arrays: Any, scalars: Any, keys: Any, h: Any, alive: Any) -> Any:
        del scalars
        return [
            reference.fused_update(rule, plan, row[0], row[1], row[2], h, keys[number])
            for plan, row, number in zip(plans, arrays, numbers, strict=True)
        ]

    if not automatic:
        return launched(arrays, scalars, keys, h, alive)
    # a computation for the host's CPU may be traced on a machine with a GPU
    return jax.lax.platform_dependent(
        arrays, scalars, keys, dict(h), alive, cuda=launched, default=plain
    )


def _launcher(kernel: str) -> Any:
    if kernel == "pallas":
        from optax_lowmem.kernels.fused_update import pallas_triton

        return pallas_triton.launch
    from optax_lowmem.kernels.fused_update import jax_triton

    return jax_triton.launch


def _update(plan: LeafPlan, p: jax.Array | None, result: operands.Result) -> jax.Array:
    """A kernel gives the weight to aim at: the update is taken where XLA fuses it with its use."""
    if p is None or plan.direct or plan.split is None:
        return result.update
    return reference.update_towards(result.update, p, plan.update_dtype)
