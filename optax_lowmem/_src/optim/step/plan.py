"""`LeafPlan`: all static decisions about the storage and the step of a leaf."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.block import Block, BlockStructure
from optax_lowmem._src.arrays.codecs import GroupCodec, MasterSplit, master_split
from optax_lowmem._src.arrays.codecs.weights import (
    WEIGHT_FORMATS,
    Bfloat16,
    WeightFormat,
)
from optax_lowmem._src.arrays.roles.roles import Role, roles
from optax_lowmem._src.arrays.shards import cut_reason, divides
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.matrix_axes import Matrices, MatrixAxes
from optax_lowmem._src.optim.step.rule import MatrixRule, Slot, UpdateRule
from optax_lowmem._src.optim.step.storage import Storage


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """Storage of one slot of a leaf: `dtype` is of its codes, or of its values without a codec."""

    name: str
    codec: GroupCodec | None
    dtype: jnp.dtype
    stochastic: bool

    @property
    def codes_per_byte(self) -> int:
        """Number of codes in a byte, 1 without a codec."""
        return 1 if self.codec is None else self.codec.codes_per_byte


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Storage and update of a leaf."""

    path: str  # used in errors and in the random hash
    shape: tuple[int, ...]  # of the parameter
    dtype: jnp.dtype  # of the parameter
    group_size: int  # number of neighbours that share a scale
    slots: tuple[SlotPlan, ...]  # one plan per elementwise slot
    # split of the master weight; None for f32 parameters and without master weights
    split: MasterSplit | None
    update_dtype: jnp.dtype  # of the emitted update
    decays: bool = True  # whether weight decay applies
    returns_params: bool = False  # whether the step returns new parameters instead of updates
    # which elements share a value of block-wise slots; None if the rule has none
    block: Block | None = None
    # one plan per block-wise slot, whose groups are those of its flattened values
    blockwise: tuple[SlotPlan, ...] = ()
    matrices: Matrices | None = None  # axes of the matrices of a leaf that a `MatrixRule` steps
    # to whose values a 16-bit weight without a split is rounded stochastically; None does not
    weight_format: WeightFormat | Bfloat16 | None = None
    feeds_back: bool = False  # whether the error of that rounding is added to the slot mu
    # whether a gradient in the parameter's dtype gets an update in that dtype
    follows_gradient: bool = False

    @property
    def nameless(self) -> "LeafPlan":
        """The plan without the path, so that equal leaves share a compiled step."""
        return dataclasses.replace(self, path="")

    @property
    def shapeless(self) -> "LeafPlan":
        """The plan without path and shape: leaves with equal ones can share a launch."""
        block = self.block and self.block.shapeless
        return dataclasses.replace(self, path="", shape=(), block=block)

    @property
    def blockwise_plan(self) -> "LeafPlan":
        """The plan of the block-wise slots: that of a vector with one element per block."""
        assert self.block is not None
        shape, f32 = (self.block.values(self.shape),), jnp.dtype(jnp.float32)
        return LeafPlan(
            self.path, shape, f32, self.group_size, self.blockwise, split=None, update_dtype=f32,
            decays=False,
        )  # fmt: skip

    @property
    def quantized(self) -> bool:
        """Return whether any slot is stored as codes."""
        return any(slot.codec is not None for slot in self.slots)

    @property
    def stochastic(self) -> bool:
        """Return whether any slot needs random bits."""
        return any(slot.stochastic for slot in self.slots)

    @property
    def stochastic_master(self) -> bool:
        """Return whether rounding the master weight needs random bits."""
        return self.weight_format is not None or (self.split is not None and self.split.stochastic)

    @property
    def writes_weight(self) -> bool:
        """Return whether a step computes the rounded new weight, and then the update towards it."""
        return self.weight_format is not None or self.split is not None

    @property
    def noisy(self) -> bool:
        """Return whether any slot or the master weight needs random bits."""
        return self.stochastic or self.stochastic_master

    @property
    def in_groups(self) -> bool:
        """Return whether shards must consist of whole groups: of codes, or of random bits."""
        return self.quantized or self.noisy

    def cut_reason(self, d: int, parts: int) -> str | None:
        """Return why so many parts of a dimension cannot be stepped separately, or None."""
        if not divides(parts, self.shape[d]):
            return f"{parts} parts do not divide dimension {d} ({self.shape[d]})"
        heads = self.block.fit(self.shape).heads if self.block is not None else None
        if heads and heads[0] == d and parts > 1:
            return "its heads are on several devices"
        if d < len(self.shape) - 1 or not self.in_groups:
            return None
        return cut_reason(self.shape[d], parts, self.group_size)

    @property
    def forms(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays that the parameter has in a state, by field.

        Slots without a codec have a 0-d placeholder of scales. Codes of block-wise slots have the
        shape of the means; with several codes per byte, the last axis counts bytes, or the codes
        are flattened if its length is not a multiple of the codes per byte.
        """
        forms, split = {}, self.split
        forms["correction"] = jax.ShapeDtypeStruct((), jnp.int8)
        if split is not None:
            forms["correction"] = jax.ShapeDtypeStruct(self.shape, split.dtype)
        for slot in self.slots:
            scales = jax.ShapeDtypeStruct((), jnp.float32)
            codes = jax.ShapeDtypeStruct(self.shape, slot.dtype)
            if slot.codec is not None:
                codes, scales = slot.codec.storage(self.shape, self.group_size)
            forms |= {slot.name: codes, f"{slot.name}_scale": scales}
        if self.block is not None and self.blockwise:
            shape, flat = self.block.mean_shape(self.shape), self.blockwise_plan.forms
            for slot in self.blockwise:
                name, several = slot.name, slot.codes_per_byte
                if several == 1 or shape[-1] % several == 0:
                    in_bytes = shape if several == 1 else (*shape[:-1], shape[-1] // several)
                    flat[name] = jax.ShapeDtypeStruct(in_bytes, flat[name].dtype)
                forms |= {field: flat[field] for field in (name, f"{name}_scale")}
        return forms


def slot_decision(
    path: str,
    shape: tuple[int, ...],
    slot: SlotPlan,
    group_size: int,
    reason: str | None,
    patterns: tuple[str, ...],
) -> context.Decision:
    """Return the decision about a slot; `reason` is why it is not compressed, if it is not."""
    codec = slot.codec
    if codec is None:
        return context.Decision(path, slot.name, None, reason or "", shape=shape, patterns=patterns)
    rounding = "stochastic" if slot.stochastic else "nearest"
    packed = f"{codec.codes_per_byte} codes per byte, " if codec.bits < 8 else ""
    return context.Decision(
        path, slot.name, codec.name, f"groups of {group_size}, {packed}{rounding} rounding",
        group_size, codec, slot.stochastic, shape=shape, patterns=patterns,
    )  # fmt: skip


def choose_split(storage: Storage, path: str, dtype: jnp.dtype) -> MasterSplit | None:
    """Return the split for weights of a dtype; None for f32 or without master weights."""
    if dtype == jnp.float32:
        return None
    if storage.rounds_weights and dtype != jnp.bfloat16:
        raise ValueError(
            f"weight '{path}' is {dtype}: only bfloat16 weights can be rounded stochastically "
            "without a correction. Use master_weight_bits=24, or master_rounding='nearest'."
        )
    if storage.master_weight_bits is None:
        return None
    rounding = storage.master_rounding or "stochastic"
    return master_split(dtype, storage.master_weight_bits, storage.split, rounding)


def split_decision(
    storage: Storage,
    path: str,
    dtype: jnp.dtype,
    split: MasterSplit | None,
    weights: str = "bfloat16",
) -> context.Decision:
    """Return the decision about a master weight, given the result of `choose_split`."""
    rounds = storage.rounds_weights and dtype != jnp.float32
    if split is not None:
        reason = f"{split.bits}-bit master weights"
        if split.bits == 24:
            reason += f", {'stochastic' if split.stochastic else 'nearest'} rounding"
    elif dtype == jnp.float32:
        reason = "an f32 parameter is its own master weight"
    elif rounds:
        reason = "master_weight_bits is None: the weight itself is rounded, stochastically"
        if weights != "bfloat16":
            reason += f", to values of {weights} in groups of {storage.group_size}"
        if storage.error_feedback:
            reason += "; its error goes into mu"
    else:
        reason = "master_weight_bits is None: steps under half an ulp of the weight are lost"
    form, stochastic = (split.name, split.stochastic) if split else (None, rounds)
    return context.Decision(path, "correction", form, reason, stochastic=stochastic)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LeafPlanner:
    """Plans the leaves of an optimizer."""

    rule: UpdateRule
    storage: Storage
    # whether to update weights (learning rate, decay, split) or to return directions
    weights: bool = True
    decay_mask: optax.MaskOrFn = None  # optax-style mask of weight decay
    # dtypes of uncompressed slots, by default f32
    slot_dtypes: Mapping[str, DTypeLike | None] = dataclasses.field(default_factory=dict)
    structure: BlockStructure | None = None  # which elements share a value of block-wise slots
    # which leaves are matrices, for rules that treat these differently; the mask does not apply to
    # the other leaves
    matrices: MatrixAxes | None = None

    def plans(
        self,
        params: optax.Params,
        state: optax.OptState | None = None,
        returns_params: bool = False,
    ) -> list[LeafPlan]:
        """Return the plan of each leaf.

        In a `shard_map` the parameters are this device's shards. The state is None in `init`, for
        which the decisions are recorded.
        """
        storage, leaves = self.storage, trees.named_leaves(params)
        if not leaves:  # also for the placeholder of optax.tree.map_params, which fits no mask
            return []
        assert storage.group_size is not None  # it is `completed`
        masked_out = storage.policy.masked_out(params)
        decays = [True] * len(leaves)
        if self.decay_mask is not None:
            decays = trees.mask_values("the mask of weight decay", self.decay_mask, params)
        of_role = roles(params)
        blocks = self.structure.infer(params) if self.structure else {}
        axes = self.matrices.of(params) if self.matrices else {}
        tables: set[str] = set()
        if self.structure and storage.rounding == "embeddings":
            tables = self.structure.embeddings(params)
        coded = {  # the slots that the state stores as codes, with scales
            (path, slot.name)
            for slot in (self.rule.slots if state is not None else ())
            for (path, _), scale in zip(
                leaves, jax.tree.leaves(getattr(state, f"{slot.name}_scale")), strict=False
            )
            if jnp.ndim(scale)
        }
        plans = []
        for (path, leaf), decay in zip(leaves, decays, strict=True):
            trees.check_param(path, leaf)
            shape, dtype, block = tuple(leaf.shape), jnp.dtype(leaf.dtype), blocks.get(path)
            matrices = axes.get(path)
            rule = self.rule if self.matrices is None else self.rule.for_leaf(matrices)
            if isinstance(rule, MatrixRule) and matrices is not None:
                block = rule.block(matrices)
            slots: dict[Slot, SlotPlan] = {}
            for slot in rule.slots:
                role, masked = of_role[path], path in masked_out
                stored = None if state is None else (path, slot.name) in coded
                plan, reason = self._plan_slot(slot, role, masked, path in tables, stored)
                slots[slot] = plan
                if state is None:
                    self._record(slot, plan, reason, role, masked, block)
            rounds = self.weights and dtype != jnp.float32 and storage.rounds_weights
            compressed = any(slot.codec for slot in slots.values())
            weights = storage.weights if compressed else "bfloat16"
            split = choose_split(storage, path, dtype) if self.weights else None
            if self.weights and state is None:
                context.record(split_decision(storage, path, dtype, split, weights))
            in_dtype = self.weights and storage.update_dtype == "param"
            plans.append(
                LeafPlan(
                    path=path,
                    shape=shape,
                    dtype=dtype,
                    group_size=storage.group_size,
                    slots=tuple(plan for slot, plan in slots.items() if not slot.blockwise),
                    split=split,
                    update_dtype=dtype if in_dtype else jnp.dtype(jnp.float32),
                    decays=decay or (self.matrices is not None and path not in axes),
                    returns_params=returns_params,
                    block=block,
                    blockwise=tuple(plan for slot, plan in slots.items() if slot.blockwise),
                    matrices=matrices,
                    weight_format=WEIGHT_FORMATS[weights] if rounds else None,
                    feeds_back=rounds and storage.error_feedback,
                    follows_gradient=self.weights and storage.update_dtype == "gradient",
                )
            )
        return plans

    def _plan_slot(
        self, slot: Slot, role: Role, masked_out: bool, in_table: bool, stored: bool | None
    ) -> tuple[SlotPlan, str | None]:
        """Return how a slot is stored, and why it is not compressed, or None."""
        storage, name, leaf = self.storage, slot.name, role.leaf
        codec = getattr(storage, name) if slot.compressed else None
        reason: str | None
        if codec is None:
            reason = f"storage.{name} is None" if slot.compressed else "its rule keeps it in f32"
        else:
            layer = leaf.inner_shape
            reason = storage.policy.reason(leaf.path, leaf.shape, name, stored, layer, masked_out)
        if codec is None or reason is not None:
            dtype = jnp.dtype(self.slot_dtypes.get(name) or jnp.float32)
            return SlotPlan(name, None, dtype, stochastic=False), reason
        stochastic = {  # by `storage.rounding`
            "stochastic": True, "nearest": False, "nu": name == "nu", "embeddings": in_table
        }  # fmt: skip
        return SlotPlan(name, codec, codec.dtype, stochastic[storage.rounding]), None

    def _record(
        self,
        slot: Slot,
        plan: SlotPlan,
        reason: str | None,
        role: Role,
        masked_out: bool,
        block: Block | None,
    ) -> None:
        """Record the decision of `_plan_slot`."""
        storage, leaf = self.storage, role.leaf
        assert storage.group_size is not None
        configured = slot.compressed and getattr(storage, slot.name) is not None
        patterns = storage.policy.exclude if configured and not masked_out else ()
        group_size = storage.group_size
        decision = slot_decision(leaf.path, leaf.shape, plan, group_size, reason, patterns)
        if slot.blockwise and block is not None:
            decision = describe_block(decision, block, configured)
        context.record(decision)


def describe_block(
    decision: context.Decision, block: Block, configured: bool = True
) -> context.Decision:
    """Return the decision about a block-wise slot, with the form of its block and its reasons.

    Only a `configured` slot, one with a codec, has a reason if it is not compressed.
    """
    form = f"{decision.form or 'f32'}, {block.description or 'a value a block'}"
    why = decision.reason if configured and decision.codec is None else ""
    reason = "; ".join(filter(None, [block.reason, why]))
    return dataclasses.replace(decision, form=form, reason=reason, block=block)


def warn_of_four_bits(plans: Sequence[LeafPlan]) -> None:
    """Warn of second moments in 4-bit codes, in `init`, which sees all leaves."""
    if context.is_recording():
        return
    paths: dict[str, list[str]] = {_BLOCKWISE_FOUR_BITS: [], ELEMENTWISE_FOUR_BITS: []}
    for plan in plans:
        shares = plan.block is not None and not plan.block.elementwise
        for slot in (*plan.slots, *plan.blockwise):
            if slot.name == "nu" and slot.codes_per_byte > 1:
                of_block = shares and slot in plan.blockwise
                message = _BLOCKWISE_FOUR_BITS if of_block else ELEMENTWISE_FOUR_BITS
                paths[message].append(plan.path)
    for message, (first, *more) in ((m, p) for m, p in paths.items() if p):
        others = f" and {len(more)} more" if more else ""
        warnings.warn(message.format(f"leaf '{first}'{others}"), stacklevel=3)


_BLOCKWISE_FOUR_BITS = (
    "second moments that many elements share ({}) are stored in 4 bits: that saves almost no "
    "memory, and each error affects all of these elements. Keep them in f32 with nu=None, for "
    "example Storage.four_bit(nu=None)."
)
ELEMENTWISE_FOUR_BITS = (
    "second moments of single elements ({}) are stored in 4 bits: small ones in a group with "
    "larger ones may be stored too large, and their weights then move too slowly. "
    "flash_factored_adamw with storage=Storage.four_bit(nu=None, group_size=32) has no such codes "
    "and takes less memory, 3.56 bytes per parameter."
)
