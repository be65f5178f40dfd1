"""The step of several leaves in one GPU kernel: hand-written Triton, called through jax_triton.

For AdamW, Lion and SGD with the default codecs, and for a JAX whose Pallas has no Triton lowering.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.codecs import BitSplit, softsign, sqrt
from optax_lowmem._src.core import groups, random, varying
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.core.tiles import MAX_ELEMENTS, Tile, Tiling
from optax_lowmem._src.optimizers.adam import AdamRule
from optax_lowmem._src.optimizers.lion import LionRule
from optax_lowmem._src.optimizers.sgd import MomentumRule
from optax_lowmem._src.update import jax_triton_kernel as kernel
from optax_lowmem._src.update import jax_triton_numerics as numerics
from optax_lowmem._src.update.operands import Leaf, Result, aliases, output
from optax_lowmem._src.update.plan import LeafPlan

_CODECS = {"mu": softsign(), "nu": sqrt()}
_MAX_GROUP_SIZE = 256
_MAX_LEAVES = 32  # with 13 pointers each: CUDA takes 4 KiB of arguments
_VECTOR = 8  # neighbours that a thread takes at once

_TABLES = ("scalars", "keys", "lane_bits")

# Rule -> name of its formula in the kernel, or None for what the kernel has no formula for. Looked
# up by the exact type: a subclass may have other arithmetic.
_FORMULAS: dict[type[UpdateRule], Callable[[Any], str | None]] = {
    AdamRule: lambda rule: "adam" if rule.eps_root_is_zero and not rule.nesterov else None,
    LionRule: lambda rule: "lion" if rule.mode == "hard" else None,
    MomentumRule: lambda rule: "nesterov" if rule.nesterov else "momentum",
}


def formula(rule: UpdateRule) -> str | None:
    """Return the name of a rule's formula in the kernel, or None where it has none."""
    named = _FORMULAS.get(type(rule))
    return None if named is None else named(rule)


def supported(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why the kernel cannot take a leaf, or None where it can."""
    if formula(rule) is None:
        return f"the hand-written kernel does not know {rule}"
    if not 0 < math.prod(plan.shape) <= MAX_ELEMENTS:
        return f"{math.prod(plan.shape)} elements, and the kernel takes 1 to {MAX_ELEMENTS}"
    for slot in plan.slots:
        if slot.codec != _CODECS[slot.name]:
            stored = slot.codec.name if slot.codec else f"plain {slot.dtype}"
            return (
                f"{slot.name} is {stored}, and the kernel knows the default only, "
                f"{_CODECS[slot.name].name} with its guards"
            )
    if len({slot.stochastic for slot in plan.slots}) > 1:
        return "its slots are not all rounded the same way"
    size = plan.group_size
    if size > _MAX_GROUP_SIZE or size & (size - 1):
        return f"the group size {size} is not a power of two up to {_MAX_GROUP_SIZE}"
    if plan.split is not None and not isinstance(plan.split, BitSplit):
        return f"the kernel has no {plan.split.name} split of master weights"
    return None


@functools.partial(jax.jit, static_argnames=("rule", "plans", "names", "tile"), inline=False)
def launch(
    rule: UpdateRule,
    plans: tuple[LeafPlan, ...],
    leaves: tuple[Leaf, ...],
    names: tuple[str, ...],
    scalars: jax.Array,
    keys: jax.Array,
    leaf_numbers: jax.Array,
    tile: Tile,
) -> list[Result]:
    """The step of leaves whose plans differ in shape alone.

    Args:
      rule: the optimizer's arithmetic.
      plans: one a leaf, all `supported`.
      leaves: their arrays.
      names: of the hyperparameters.
      scalars: the hyperparameters, f32 [1, len(names)].
      keys: of the leaves of the whole tree, uint32 [leaves], or of parts of them, [leaves, 2].
      leaf_numbers: which of them are these leaves', int32 [len(plans)].
      tile: how the work is cut.
    """
    kinds = [_Kind.of(plan, tile) for plan in plans]
    results: dict[int, Result] = {}
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        for first in range(0, len(alike), _MAX_LEAVES):
            batch = alike[first : first + _MAX_LEAVES]
            found = _launch(
                rule,
                kind,
                [plans[i] for i in batch],
                [leaves[i] for i in batch],
                names,
                scalars,
                keys[leaf_numbers[jnp.asarray(batch)]],
                tile,
            )
            results.update(zip(batch, found, strict=True))
    return [results[i] for i in range(len(plans))]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties that all leaves of one Triton launch share, besides their plans.

    Attributes:
      lanes: lanes per group.
      flat: whether all groups are full.
      alignment: a divisor of the offsets and sizes of all groups.
      elements: elements per tile.
    """

    lanes: int
    flat: bool
    alignment: int
    elements: int

    @classmethod
    def of(cls, plan: LeafPlan, tile: Tile) -> "_Kind":
        tiling = Tiling(plan.shape, plan.group_size, tile.elements)
        alignment = math.gcd(_VECTOR, plan.shape[-1], plan.group_size)
        # elements that cannot be read 8 at a time go to as many threads, a group each: a thread
        # then has numbers of many groups to keep
        vectors = tiling.flat or alignment == _VECTOR
        elements = tile.elements if vectors else tile.elements // 2
        return cls(tiling.lanes, tiling.flat, alignment, max(elements, tiling.lanes))

    def tiling(self, plan: LeafPlan) -> Tiling:
        return Tiling(plan.shape, plan.group_size, self.elements)


def _launch(
    rule: UpdateRule,
    kind: _Kind,
    plans: Sequence[LeafPlan],
    leaves: Sequence[Leaf],
    names: tuple[str, ...],
    scalars: jax.Array,
    keys: jax.Array,
    tile: Tile,
) -> list[Result]:
    """One Triton launch; `keys` are those of the leaves."""
    tilings = [kind.tiling(plan) for plan in plans]
    starts = itertools.accumulate((tiling.tiles for tiling in tilings), initial=0)
    layout = tuple(
        (start, plan.shape[-1], tiling.groups, _places(plan))
        for start, plan, tiling in zip(starts, plans, tilings, strict=False)
    )
    results = [output(plan, leaf) for plan, leaf in zip(plans, leaves, strict=True)]
    statics = {
        **_statics(rule, plans[0], leaves[0]),
        "NAMES": " ".join(names),
        "LEAVES": layout,
        "ROWS": tilings[0].rows,
        "LANES": kind.lanes,
        "FLAT": kind.flat,
        "ALIGNMENT": kind.alignment,
        "MASKED": not kind.flat or any(tiling.groups % tiling.rows for tiling in tilings),
    }
    row_keys, lane_keys = random.row_and_lane_keys(keys, rank=1)
    tables = [scalars[0], row_keys, _lane_bits(lane_keys, kind.lanes)]
    operands = [*tables, *jax.tree.leaves(leaves)]
    outputs = _call(
        operands,
        [_named(leaf, i) for i, leaf in enumerate(leaves)],
        jax.tree.leaves(results),
        aliases(plans[0], leaves, results, first=len(_TABLES)),
        grid=(sum(tiling.tiles for tiling in tilings),),
        num_warps=tile.warps,
        num_stages=1,
        name="fused_update",
        **statics,
    )
    leaves, structure = jax.tree.flatten(results)
    axes = (leaf.manual_axis_type.varying for leaf in leaves)  # which jax_triton forgets
    return jax.tree.unflatten(structure, list(map(varying.over, outputs, axes)))


def _statics(rule: UpdateRule, plan: LeafPlan, leaf: Leaf) -> dict[str, Any]:
    """Return the constants that the kernel's code depends on, apart from those of its tiling."""
    has_weight = leaf.p is not None
    return {
        "FORMULA": formula(rule),
        "GROUP_SIZE": plan.group_size,
        "STOCHASTIC": plan.stochastic,
        "WEIGHT": has_weight,
        "SPLIT_BITS": plan.split.bits if has_weight and plan.split is not None else 0,
        "SPLIT_STOCHASTIC": has_weight and plan.stochastic_master,
        "DIRECT": has_weight and plan.direct,
        "DECAYS": plan.decays,
        "UPDATE": jnp.dtype(plan.update_dtype).name,
    }


def _places(plan: LeafPlan) -> tuple[tuple[int, int], ...]:
    """`random.row_bits` from the number of a group in its leaf, as the kernel's LEAVES have it.

    The index along an axis of size s is the number divided by the groups below, less s times the
    same quotient of the axis before.
    """
    shape = groups.scale_shape(plan.shape, plan.group_size)
    odd = [zlib.crc32(b"axis %d" % axis) | 1 for axis in range(len(shape))]
    carried = [o * size for o, size in zip(odd[1:], shape[1:], strict=True)] + [0]
    return tuple(
        (math.prod(shape[axis + 1 :]), (odd[axis] - carried[axis]) % 2**32)
        for axis in range(len(shape))
    )


def _lane_bits(keys: jax.Array, lanes: int) -> jax.Array:
    """C of the lanes times the salt of each slot, uint32 [leaves, slots, lanes].

    The same for every tile of a leaf, so it is mixed once, here.
    """
    mixed = random.lane_bits(keys[:, None, None], lax.iota(jnp.uint32, lanes)[None, None])
    return mixed * jnp.asarray(numerics.SALTS, jnp.uint32)[None, :, None]


def _named(leaf: Leaf, number: int) -> dict[str, str]:
    """Role -> name of each array of a leaf, in the order of its tree."""
    slots = list(_CODECS)[: len(leaf.slots)]
    roles = [
        "g",
        *(["p"] if leaf.p is not None else []),
        *(["correction"] if leaf.correction is not None else []),
        *slots,
        *(f"{slot}_scale" for slot in slots),
    ]
    return {role: f"{role}{number}" for role in roles}


# ---- jax_triton's conventions --------------------------------------------------------------------


def _triton_call() -> Callable[..., Any]:
    """Imported where it is called: without a GPU's JAX it cannot be."""
    import jax_triton

    return jax_triton.triton_call


_one_by_one = jax.custom_batching.sequential_vmap  # jax_triton cannot be vmapped


def _call(
    operands: Sequence[jax.Array],
    named: Sequence[dict[str, str]],
    outputs: Sequence[jax.ShapeDtypeStruct],
    in_place: dict[int, int],
    **options: Any,
) -> list[jax.Array]:
    """The results of the kernel.

    jax_triton 0.3 passes every operand and then every result; those of an alias are one pointer,
    which the kernel takes as the operand's. 0.4 takes references to what is written in place, and
    passes their pointers once.

    Args:
      operands: tables, then the arrays of the leaves.
      named: role -> name of the latter, a leaf each.
      outputs: what the results are like.
      in_place: operand -> result that takes its place.
      options: of `triton_call`, and the kernel's static arguments.
    """
    parameters = [*_TABLES, *(name for leaf in named for name in leaf.values())]
    owner = {result: parameters[operand] for operand, result in in_place.items()}
    results = [owner.get(j, f"result{j}") for j in range(len(outputs))]
    roles, triton_call = _roles(named, results), _triton_call()

    def call_03(*operands: jax.Array) -> list[jax.Array]:
        every = [f"result{j}" for j in range(len(outputs))]
        return triton_call(
            *operands,
            kernel=kernel.entry((*parameters, *every), roles),
            out_shape=list(outputs),
            input_output_aliases=in_place,
            enable_fp_fusion=True,
            **options,
        )

    def call_04(*operands: jax.Array) -> list[jax.Array]:
        fresh = [j for j in range(len(outputs)) if j not in owner]
        refs = {i: jax.new_ref(operands[i]) for i in in_place}
        found = triton_call(
            *(refs.get(i, x) for i, x in enumerate(operands)),
            kernel=kernel.entry((*parameters, *(results[j] for j in fresh)), roles),
            out_type=[outputs[j] for j in fresh],
            backend_options={"enable_fp_fusion": True},  # Triton is about to change its default
            **options,
        )
        written = {in_place[i]: jax.freeze(ref) for i, ref in refs.items()}
        written.update(zip(fresh, found, strict=True))
        return [written[j] for j in range(len(outputs))]

    newer = "out_type" in inspect.signature(triton_call).parameters
    return _one_by_one(call_04 if newer else call_03)(*operands)


def _roles(named: Sequence[dict[str, str]], results: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Of each leaf the names of its pointers by role; the gradient's for roles it has not."""
    updates = results[:: len(results) // len(named)]  # the first result of every leaf
    return tuple(
        tuple({**leaf, "update": update}.get(role, leaf["g"]) for role in kernel.ROLES)
        for leaf, update in zip(named, updates, strict=True)
    )
