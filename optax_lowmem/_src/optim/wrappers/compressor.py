"""Store slots of any optax optimizer's state as codes: the transformation of `compress_state`."""

import dataclasses
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from optax_lowmem._src.arrays import array_metadata, numerics, random, trees
from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.codecs import GroupCodec, StoredSlot, encode_array
from optax_lowmem._src.arrays.compiled import compiled, each, is_free
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.roles.roles import Role, roles
from optax_lowmem._src.arrays.sharding import (
    filled_like,
    left_to_xla,
    reshard,
    sharding_of,
    state_sharding,
)
from optax_lowmem._src.arrays.typing import PyTree, Structure
from optax_lowmem._src.kernels import group_codec
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.masters import splits_masters
from optax_lowmem._src.optim.step.plan import (
    ELEMENTWISE_FOUR_BITS,
    SlotPlan,
    describe_block,
    slot_decision,
)
from optax_lowmem._src.optim.step.storage import (
    NEAREST_OR_NOT,
    Policy,
    check_group_size,
    codec_of,
    warn_of_patterns,
)
from optax_lowmem._src.optim.wrappers.slots import (
    REFUSED,
    SlotFacts,
    facts,
    is_known,
    map_slots,
    scale_name,
)

Select = Callable[[str, SlotFacts], GroupCodec | str | None]

_BLOCKWISE = ("FlashAdamState", "nu")  # its shape may differ from the parameter's
_DRAWN_AS = {"trace": "mu"}  # flash_sgd calls optax's trace mu; both draw the same random bits
_EMPTY: Mapping[Any, Any] = types.MappingProxyType({})


class CompressedState(NamedTuple):
    """The inner optimizer's state with codes in its slots, and their scales."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    inner_state: PyTree  # of the inner optimizer's type
    scales: dict[
        str, PyTree
    ]  # "<slot>_scale" -> a tree like the slot; "<slot>_scale_1" for a second


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A compressed slot: its field, the key of its scales, its codec, facts and arrays."""

    name: str
    scales: str
    codec: GroupCodec
    facts: SlotFacts
    blockwise: bool  # whether its arrays may have one value per block
    tree: PyTree

    def flattened(self, shape: tuple[int, ...], weight: tuple[int, ...]) -> bool:
        """Return whether an array is block-wise, and therefore grouped as one flat vector."""
        return self.blockwise and shape != weight


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {path: jnp.shape(leaf) for path, leaf in trees.named_leaves(tree)}


def _is_code(leaf: jax.Array) -> bool:
    return leaf.dtype in (jnp.int8, jnp.uint8)


def _shapes_and_dtypes(
    scales: Mapping[str, PyTree],
) -> dict[tuple[str, str], tuple[tuple[int, ...], jnp.dtype]]:
    """Return {(key of the scales, path): (shape, dtype)}."""
    return {
        (name, path): (jnp.shape(leaf), jnp.dtype(leaf.dtype))
        for name, tree in scales.items()
        for path, leaf in trees.named_leaves(tree)
    }


def _shaped(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding | None) -> jax.Array:
    """Reshape `x`; on Explicit axes the result has this sharding (None for replicated)."""
    return left_to_xla(lambda x: x.reshape(shape), sharding, x)


def _encoded(
    codec: GroupCodec,
    slot: str,
    path_hash: np.ndarray | np.uint32,
    leaf: jax.Array,
    stochastic: bool,
    flattened: bool,
    group_size: int,
    seed: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Encode a leaf of a slot, `flattened` if its codec groups it as one vector."""
    key = random.key_of_hash(seed, count, path_hash) if stochastic else None
    values = _shaped(leaf, (leaf.size,), None) if flattened else leaf
    codes, scales = group_codec.encode(codec, values, group_size, key, _DRAWN_AS.get(slot, slot))
    return _shaped(codes, leaf.shape, sharding_of(leaf)) if flattened else codes, scales


def _decoded(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    flattened: bool,
    length: int,
    group_size: int,
) -> jax.Array:
    """Invert `_encoded`."""
    rows = _shaped(codes, (codes.size,), None) if flattened else codes
    values = group_codec.decode(codec, rows, scales, group_size, length)
    return _shaped(values, codes.shape, sharding_of(codes)) if flattened else values


def _encoded_constants(
    rows: list[tuple[GroupCodec | None, jax.Array, jnp.dtype, jax.Array]], group_size: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Return codes and scales, sharded as the weight, of each (codec, constant, dtype, weight)."""
    pairs = []
    for codec, one, dtype, weight in rows:
        if codec is None:
            same = one.shape == weight.shape
            whole = one if same else jnp.full_like(weight, one.reshape(()), dtype=dtype)
            pairs.append((whole, jnp.zeros((), jnp.float32)))
            continue
        # codes_per_byte values, to encode one whole byte
        row = jnp.broadcast_to(one.astype(jnp.float32).reshape(1), (codec.codes_per_byte,))
        code, scale = encode_array(codec, row, group_size)
        codes, scales = codec.storage(weight.shape, group_size)
        code = filled_like("a leaf", weight, codes, group_size, code.reshape(()))
        sharding = state_sharding(
            "a leaf", weight.shape, sharding_of(weight), scales.shape, (group_size,)
        )
        pairs.append((code, reshard(jnp.full(scales.shape, scale.reshape(())), sharding)))
    return pairs


@dataclasses.dataclass(frozen=True, eq=False)
class Compressor:
    """The `init` and the `update` of `compress_state`, which describes the arguments.

    `select` returns the codec of a slot, or None; the slots that are `required` must exist.
    """

    inner: optax.GradientTransformationExtraArgs
    select: Select
    required: tuple[str, ...]
    group_size: int
    rounding: str
    seed: int
    policy: Policy
    update_dtype: str

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_choice("rounding", self.rounding, NEAREST_OR_NOT)
        check_choice("update_dtype", self.update_dtype, ("gradient", "float32"))

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def _codec_of(self, state: optax.OptState, field: str) -> GroupCodec | None:
        known = facts(state, field, ours=True)
        codec = self.select(field, known)
        kind = type(state).__name__
        if codec is not None and kind in REFUSED:
            raise ValueError(f"{kind}.{field} cannot be kept in 8 bits: {REFUSED[kind]}.")
        codec = codec_of(f"{kind}.{field}", codec, known.signed)
        if codec is not None:
            codec.check_group_size(self.group_size)
        return codec

    def _slots(self, state: optax.OptState) -> list[_Slot]:
        """Return the compressed slots of an inner state, in order."""
        slots: dict[str, _Slot] = {}

        def visit(node: optax.OptState, field: str, value: PyTree) -> PyTree:
            codec = self._codec_of(node, field)
            if codec is None:
                return value
            name, blockwise = scale_name(field, slots), (type(node).__name__, field) == _BLOCKWISE
            known = facts(node, field, ours=True)
            slots[name] = _Slot(field, name, codec, known, blockwise, value)
            return ()

        map_slots(visit, state)
        return list(slots.values())

    def _with_slots(self, state: optax.OptState, values: Iterable[PyTree]) -> PyTree:
        """Replace the compressed slots of an inner state."""
        new = iter(values)
        return map_slots(
            lambda node, field, old: old if self._codec_of(node, field) is None else next(new),
            state,
        )

    def _without_slots(self, state: optax.OptState) -> PyTree:
        return self._with_slots(state, itertools.repeat(()))

    def _check_state(self, state: optax.OptState, params: optax.Params) -> None:
        """Raise unless the inner state of some parameters can be compressed."""
        slots, shapes = self._slots(state), _shapes(params)
        for slot in slots:
            for path, leaf in trees.named_leaves(slot.tree):
                if _is_code(leaf):
                    raise ValueError(
                        f"slot {slot.name} of '{path}' is already stored as {leaf.dtype} codes by "
                        f"the inner optimizer: give it storage=Storage({slot.name}=None), or "
                        "remove this second codec."
                    )
                of_weight = slot.facts.moment and leaf.ndim and not slot.blockwise
                if of_weight and shapes.get(path, leaf.shape) != leaf.shape:
                    raise ValueError(
                        f"slot {slot.name} of '{path}' has shape {leaf.shape}, its parameter "
                        f"{shapes[path]}: moments of another shape, such as the projected ones of "
                        "optax.contrib.galore, cannot be compressed. Leave them uncompressed."
                    )
        fields: dict[str, None] = {}  # those that may be slots

        def visit(node: optax.OptState, field: str, value: PyTree) -> PyTree:
            leaves = jax.tree.leaves(value)
            floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
            if floats or not leaves:
                fields[field] = None
            by_name = isinstance(self.select(field, facts(node, field, ours=True)), str)
            if by_name and not is_known(node, field) and any(leaf.ndim for leaf in floats):
                kind = type(node).__name__
                raise ValueError(
                    f"{kind}.{field} is not registered: is it ever negative? A mean of squares in "
                    "codes with a sign makes training diverge. Call lowmem.register_slot("
                    f"'{kind}', '{field}', signed=False) if it never is, otherwise with "
                    "signed=True; or pass a codec instead of a name."
                )
            return value

        map_slots(visit, state)
        missing = [name for name in self.required if name not in fields]
        if missing or not slots:
            raise ValueError(
                f"the optimizer's state has no slot {' or '.join(missing) or 'to compress'}; "
                f"its slots are {', '.join(fields) or 'none'}"
            )

    def _stochastic(self, slot: _Slot) -> bool:
        return self.rounding == "stochastic" and not slot.facts.running_maximum

    def _decide(
        self,
        slot: _Slot,
        path: str,
        leaf: PyTree,
        role: Role | None,
        masked_out: bool,
        stored: bool | None = None,
        block: Block | None = None,
    ) -> bool:
        """Return whether a leaf of a slot is compressed; in `init`, record how it is stored.

        `role` is the parameter's; `stored` is whether the current state has codes for the leaf,
        None in `init`.
        """
        shape, several = tuple(leaf.shape), slot.codec.codes_per_byte
        weight = role.leaf.shape if role else shape
        refused = None
        if several > 1 and shape != weight:
            refused = (
                f"its values have shape {shape} and its parameter {weight}: their number cannot be "
                f"inferred from bytes with {several} codes"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            refused = f"{leaf.dtype} is not a float"
        shape = weight if slot.flattened(shape, weight) else shape
        layer = role.shape if role and shape == weight else shape
        reason = refused or self.policy.reason(path, shape, slot.name, stored, layer, masked_out)
        if stored is None:
            codec = slot.codec if reason is None else None
            plan = SlotPlan(slot.name, codec, leaf.dtype, self._stochastic(slot))
            patterns = () if refused or masked_out else self.policy.exclude
            decision = slot_decision(path, shape, plan, self.group_size, reason, patterns)
            context.record(describe_block(decision, block) if block else decision)
        return reason is None

    def _masked(self, params: optax.Params) -> set[str]:
        return self.policy.masked_out(params) if jax.tree.leaves(params) else set()

    def _encode(
        self,
        state: optax.OptState,
        params: optax.Params,
        seed: jax.Array,
        count: jax.Array,
        before: Mapping[str, PyTree] = _EMPTY,
        blocks: Mapping[tuple[str, str], Block] = _EMPTY,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Return the inner state with codes, and the scales, from f32 slots.

        `params` may be the gradients. `before` has the scales before the step, and `blocks` the
        `Block`s of block-wise slots by (path, slot), for the decisions of `init`.
        """
        masked, of_role, slots = self._masked(params), roles(params), self._slots(state)
        stored = {key for key, (shape, _) in _shapes_and_dtypes(before).items() if shape}
        leaves, rows = [], []
        for slot in slots:
            for path, leaf in trees.named_leaves(slot.tree):
                role, block = of_role.get(path), blocks.get((path, slot.name))
                coded = None if before is _EMPTY else (slot.scales, path) in stored
                compressed = self._decide(slot, path, leaf, role, path in masked, coded, block)
                leaves.append(None if compressed else leaf)
                if compressed:
                    weight = role.leaf.shape if role else leaf.shape
                    how = self._stochastic(slot), slot.flattened(leaf.shape, weight)
                    rows.append((slot.codec, slot.name, random.path_hash(path), leaf, *how))
        encoded = iter(each(_encoded, rows, self.group_size, seed, count))
        pairs = [
            next(encoded) if leaf is None else (leaf, jnp.asarray(np.zeros((), np.float32)))
            for leaf in leaves
        ]
        return self._stored(state, slots, pairs, before)

    def _stored(
        self,
        state: optax.OptState,
        slots: Sequence[_Slot],
        pairs: Sequence[tuple[jax.Array, jax.Array]],
        before: Mapping[str, PyTree] = _EMPTY,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Return the inner state with codes, and the scales, from those of each leaf in order."""
        rest, codes, scales = iter(pairs), [], {}
        for slot in slots:
            leaves, treedef = jax.tree.flatten(slot.tree)
            stored = list(itertools.islice(rest, len(leaves)))
            codes.append(jax.tree.unflatten(treedef, [code for code, _ in stored]))
            of_slot = [scale for _, scale in stored]
            scales[slot.scales] = array_metadata.with_metadata_of(
                slot.tree, of_slot, before.get(slot.scales)
            )
        return self._with_slots(state, codes), scales

    def _decode(self, state: CompressedState, updates: optax.Updates) -> PyTree:
        """Return the inner state with f32 slots, after checking its codes and scales."""
        slots, shapes = self._slots(state.inner_state), _shapes(updates)
        known, stored = [slot.scales for slot in slots], ", ".join(state.scales)
        problems = [f"no {x}, only {stored}" for x in known if x not in state.scales]
        problems += [f"{x} of a slot without a codec here" for x in state.scales if x not in known]
        if problems:
            raise ValueError(
                f"the state has {problems[0]}: it was made or restored with other settings. Use "
                "those, or call init again."
            )
        rows = []
        for slot in slots:
            of_slot = jax.tree.leaves(state.scales[slot.scales])
            for (path, codes), scales in zip(trees.named_leaves(slot.tree), of_slot, strict=True):
                weight, shape = shapes.get(path, ()), codes.shape
                # only slots with their weight's shape are stored with several codes per byte
                if weight and slot.codec.codes_per_byte > 1 and _is_code(codes):
                    shape = weight
                flattened = slot.flattened(shape, weight)
                if not flattened and slot.facts.moment and codes.ndim and shape != weight:
                    raise ValueError(
                        f"state of '{path}', slot {slot.name}, has shape {codes.shape}, the "
                        f"gradient {shapes.get(path, 'is missing')}: the state was made for "
                        "another tree. Call init on these parameters."
                    )
                if _is_code(codes):
                    shape = (codes.size,) if flattened else shape
                    form = jax.ShapeDtypeStruct(shape, codes.dtype) if flattened else codes
                    given = StoredSlot(form, scales)
                    expected = slot.codec.storage(shape, self.group_size)
                    if not given.is_like(expected):
                        raise ValueError(
                            f"state of '{path}', slot {slot.name}: {given.text}, but "
                            f"{slot.codec.name} in groups of {self.group_size} keeps "
                            f"{expected.text}. The state was made or restored with other settings: "
                            "use those, or call init again."
                        )
                    rows.append((slot.codec, codes, scales, flattened, shape[-1]))
        decoded = iter(each(_decoded, rows, self.group_size))
        values = [
            jax.tree.map(lambda leaf: next(decoded) if _is_code(leaf) else leaf, slot.tree)
            for slot in slots
        ]
        return self._with_slots(state.inner_state, values)

    def init(self, params: optax.Params) -> CompressedState:
        """Return the encoded inner state.

        If every slot starts as a constant (`_starts_constant`), no f32 array of one is allocated.
        """
        trees.check_params(params)
        # the inner update gets f32 gradients, so its state is f32 for weights of any dtype; this
        # trace also records the decisions of the inner `init`
        abstract = jax.eval_shape(lambda p: self._start(trees.widened(p), records=True)[0], params)
        warn_of_patterns(self.policy, params)
        if splits_masters(self.inner, params):
            raise ValueError(
                "compress_state around an optimizer that splits master weights makes their "
                "corrections stale: put it inside, split_master_weights(compress_state(...))."
            )
        self._check_state(abstract, params)
        count = jnp.zeros((), jnp.int32)
        seed = context.provided_seed(self.seed)
        one_element_params = jax.tree.map(lambda p: jnp.zeros((1,) * p.ndim, jnp.float32), params)
        if self._starts_constant(abstract, one_element_params):
            inner, scales = self._constant_state(
                abstract, self._start(one_element_params)[0], params
            )
        else:
            started, blocks = self._start(trees.widened(trees.with_values(params)))
            inner, scales = self._encode(started, params, seed, count, blocks=blocks)
        self._warn_of_four_bits(inner, scales)
        return CompressedState(count, seed, inner, scales)

    def _warn_of_four_bits(self, inner: optax.OptState, scales: Mapping[str, PyTree]) -> None:
        """Warn, in `init`, of second moments in 4-bit codes."""
        paths = [
            path
            for slot in self._slots(inner)
            if slot.facts.moment == 2 and slot.codec.codes_per_byte > 1
            for path, scale in trees.named_leaves(scales[slot.scales])
            if scale.ndim
        ]
        if paths and not context.is_recording():
            others = f" and {len(paths) - 1} more" if paths[1:] else ""
            message = ELEMENTWISE_FOUR_BITS.format(f"leaf '{paths[0]}'{others}")
            warnings.warn(message, stacklevel=3)

    def _start(
        self, params: optax.Params, records: bool = False
    ) -> tuple[PyTree, dict[tuple[str, str], Block]]:
        """Return the initial inner state, and the `Block`s of its block-wise slots by (path, slot).

        With `records`, record the decisions of the inner `init`, except those about slots that are
        compressed here. `init` calls this several times, but records decisions only once.
        """
        with context.absorbing() as decisions:
            state = self.inner.init(params)
        compressed = {
            (path, slot.name)
            for slot in self._slots(state)
            for path, _ in trees.named_leaves(slot.tree)
        }
        for decision in decisions:
            if records and (decision.path, decision.slot) not in compressed:
                context.record(decision)
        return state, {(d.path, d.slot): d.block for d in decisions if d.block is not None}

    def _starts_constant(self, abstract: optax.OptState, one_element_params: optax.Params) -> bool:
        """Return whether all arrays with several elements are slots that start as a constant.

        The state must have the same structure for one-element parameters: a mask may depend on
        sizes.
        """
        others = jax.tree.leaves(self._without_slots(abstract))
        if any(leaf.size > 1 for leaf in others):
            return False
        if not all(slot.facts.constant_init for slot in self._slots(abstract)):
            return False
        like: Structure = jax.tree.structure(
            jax.eval_shape(lambda p: self._start(p)[0], one_element_params)
        )
        return bool(like == jax.tree.structure(abstract))

    def _constant_state(
        self, abstract: optax.OptState, small: optax.OptState, params: optax.Params
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Return the encoded state and its scales, without f32 arrays of slots.

        `abstract` has the shapes of the state. `small` is the state of one-element parameters, in
        the same order: its slots are the constants. Its other leaves have one element at most; they
        are those of the state, unless they are floats, which may depend on the weights.
        """
        weights, masked, rows = dict(trees.named_leaves(params)), self._masked(params), []
        of_role = roles(params)
        slots = self._slots(abstract)
        constants = jax.tree.leaves([slot.tree for slot in self._slots(small)])
        leaves = [(slot, *row) for slot in slots for row in trees.named_leaves(slot.tree)]
        for (slot, path, leaf), one in zip(leaves, constants, strict=True):
            weight = weights[path]
            compressed = self._decide(slot, path, leaf, of_role[path], path in masked)
            rows.append((slot.codec if compressed else None, one, leaf.dtype, weight))
        # a compiled program may place its results elsewhere than committed weights
        free = is_free([weight for _, _, _, weight in rows])
        encoded = compiled(_encoded_constants) if free else _encoded_constants
        inner, scales = self._stored(small, slots, encoded(rows, self.group_size))
        others = jax.tree.leaves(self._without_slots(abstract))
        if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in others):
            start = jax.jit(lambda p: self._without_slots(self._start(trees.widened(p))[0]))
            codes = [slot.tree for slot in self._slots(inner)]
            inner = self._with_slots(start(trees.with_values(params)), codes)
        return inner, scales

    def update(
        self, updates: PyTree, state: CompressedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, CompressedState]:
        """Decode the slots, run the inner update on f32 gradients, encode the slots again."""
        trees.check_state(state, CompressedState)
        if params is not None:
            trees.match("gradient", updates, params)
        updates, params = numerics.forbid_differentiation((updates, params))
        new, inner = self.inner.update(
            trees.widened(updates), self._decode(state, updates), params, **extra
        )
        count = optax.safe_increment(state.count)
        reference = updates if params is None else params
        inner, scales = self._encode(inner, reference, state.seed, count, state.scales)
        old, after = _shapes_and_dtypes(state.scales), _shapes_and_dtypes(scales)
        for name, path in old.keys() | after.keys():
            if old.get((name, path)) != after.get((name, path)):
                raise ValueError(
                    f"{name} of '{path}' is {old.get((name, path))} in the state and would become "
                    f"{after.get((name, path))}: it was made or restored with other settings "
                    "(policy, slots). Use those, or call init again."
                )
        if self.update_dtype == "gradient":
            new = trees.as_given(new, updates)
        return new, CompressedState(count, state.seed, inner, scales)
