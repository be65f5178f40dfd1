"""8-bit state for any optax optimizer."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from optax_lowmem._src.codecs import GroupCodec, StoredSlot, group_codec, softsign, sqrt
from optax_lowmem._src.core import array_metadata, context, derivative, explicit, random, trees
from optax_lowmem._src.core.compiled import each
from optax_lowmem._src.core.hyperparameters import check_range
from optax_lowmem._src.core.policy import Policy, warn_of_patterns
from optax_lowmem._src.step.masters import splits_masters
from optax_lowmem._src.step.plan import decide_slot
from optax_lowmem._src.step.storage import check_codec, check_group_size
from optax_lowmem._src.wrappers.constant_slots import Start
from optax_lowmem._src.wrappers.slots import REFUSED, SlotFacts, facts, map_slots, scale_name

Select = Callable[[str, SlotFacts], GroupCodec | None]

_OF_BLOCKS = ("FlashAdamState", "nu")  # may be block-wise, with a shape unlike the parameter's
_DRAWN_AS = {"trace": "mu"}  # flash_sgd calls optax's trace mu; both draw the same random bits


class CompressedState(NamedTuple):
    """The inner optimizer's state with codes in its slots, and their scales."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    inner_state: Any  # of the inner optimizer's type
    scales: dict[str, Any]  # "<slot>_scale" -> a tree like the slot; "<slot>_scale_1" for a second


def _in_one_row(
    state: optax.OptState, slot: str, shape: tuple[int, ...], weight: tuple[int, ...]
) -> bool:
    """Return whether a slot's array is block-wise, and therefore grouped as one flat vector."""
    return (type(state).__name__, slot) == _OF_BLOCKS and shape != weight


def _unpackable(
    codec: GroupCodec | None, shape: tuple[int, ...], weight: tuple[int, ...]
) -> str | None:
    """Return why a slot cannot be stored with several codes per byte, or None."""
    if codec is None or codec.codes_per_byte == 1 or shape == weight:
        return None
    return (
        f"its values have shape {shape} and its parameter {weight}: their number cannot be "
        f"inferred from bytes with {codec.codes_per_byte} codes"
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: jnp.shape(leaf) for path, leaf in trees.named_leaves(tree)}


def _may_be_slot(value: object) -> bool:
    leaves = jax.tree.leaves(value)
    return not leaves or any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _leaf_forms(scales: Mapping[str, Any]) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return {(name of the scales, path): (shape, dtype)}."""
    return {
        (name, path): (jnp.shape(leaf), jnp.dtype(leaf.dtype))
        for name, tree in scales.items()
        for path, leaf in trees.named_leaves(tree)
    }


def _check_same_storage(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if the scales before and after a step differ in shape or dtype."""
    old, new = _leaf_forms(before), _leaf_forms(after)
    for name, path in old.keys() | new.keys():
        if old.get((name, path)) != new.get((name, path)):
            raise ValueError(
                f"{name} of '{path}' is {old.get((name, path))} in the state and would become "
                f"{new.get((name, path))}: it was made or restored with other settings (policy, "
                "slots). Use those, or call init again."
            )


def _with_codes(scales: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return (name of the scales, path) of the leaves that have scales, and therefore codes."""
    return {key for key, (shape, _) in _leaf_forms(scales).items() if shape}


def _is_code(leaf: jax.Array) -> bool:
    return leaf.dtype in (jnp.int8, jnp.uint8)


class _Slot(NamedTuple):
    """A leaf of a slot to be encoded."""

    codec: GroupCodec
    slot: str
    name: Any  # `random.name_of` the leaf's path
    leaf: jax.Array
    stochastic: bool
    in_one_row: bool


def _shaped(x: jax.Array, shape: tuple[int, ...], lies: NamedSharding | None) -> jax.Array:
    """Reshape `x`; on Explicit axes the result has the sharding `lies` (None for replicated)."""

    def reshape(x: jax.Array) -> jax.Array:
        return x.reshape(shape)

    return explicit.left_to_xla(reshape, lies, x)


def _encoded(
    codec: GroupCodec,
    slot: str,
    name: Any,
    leaf: jax.Array,
    stochastic: bool,
    in_one_row: bool,
    group_size: int,
    seed: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    key = random.named_key(seed, count, name) if stochastic else None
    values = _shaped(leaf, (leaf.size,), None) if in_one_row else leaf
    codes, scales = group_codec.encode(codec, values, group_size, key, _DRAWN_AS.get(slot, slot))
    shardings = explicit.sharding_of(leaf)
    return (_shaped(codes, leaf.shape, shardings) if in_one_row else codes), scales


def _decoded(
    codec: GroupCodec,
    codes: jax.Array,
    scales: jax.Array,
    in_one_row: bool,
    length: int,
    group_size: int,
) -> jax.Array:
    # XLA instead of a kernel: it is fused into the inner update, and f32 values are never stored
    rows = _shaped(codes, (codes.size,), None) if in_one_row else codes
    values = group_codec.decode(codec, rows, scales, group_size, length, implementation="xla")
    shardings = explicit.sharding_of(codes)
    return _shaped(values, codes.shape, shardings) if in_one_row else values


@dataclasses.dataclass(frozen=True, eq=False)
class _Compressor:
    inner: optax.GradientTransformationExtraArgs
    select: Select
    wanted: tuple[str, ...]
    group_size: int
    rounding: str
    seed: int
    policy: Policy
    update_dtype: str

    # ---- which slots -------------------------------------------------------------------------

    def _codec_of(self, state: optax.OptState, field: str) -> GroupCodec | None:
        known = facts(state, field, own=True)
        codec = self.select(field, known)
        kind = type(state).__name__
        if codec is not None and kind in REFUSED:
            raise ValueError(f"{kind}.{field} cannot be kept in 8 bits: {REFUSED[kind]}.")
        if codec is not None:
            check_codec(f"{kind}.{field}", codec, known.signed)
            codec.check_group_size(self.group_size)
        return codec

    def _check_inner(self, params: optax.Params) -> None:
        if splits_masters(self.inner, params):
            raise ValueError(
                "compress_state around an optimizer that splits master weights makes their "
                "corrections stale: put it inside, split_master_weights(compress_state(...))."
            )

    def _check_state(self, state: optax.OptState, params: optax.Params) -> None:
        shapes = _shapes(params)
        slots: dict[str, bool] = {}  # field -> whether it is compressed in any state

        def visit(node: optax.OptState, field: str, value: Any) -> Any:
            chosen = self._codec_of(node, field) is not None
            if chosen:
                _check_uncoded(field, value)
            if _may_be_slot(value):
                if chosen and (type(node).__name__, field) != _OF_BLOCKS:
                    if facts(node, field, own=True).moment:
                        _check_shapes(field, value, shapes)
                slots[field] = slots.get(field, False) or chosen
            return value

        map_slots(visit, state)
        missing = [name for name in self.wanted if name not in slots]
        if missing or not any(slots.values()):
            raise ValueError(
                f"the optimizer's state has no slot {' or '.join(missing) or 'to compress'}; "
                f"its slots are {', '.join(slots) or 'none'}"
            )

    # ---- encoding ----------------------------------------------------------------------------

    def _decide(
        self,
        path: str,
        leaf: Any,
        slot: str,
        masked: set[str],
        codec: GroupCodec,
        known: SlotFacts,
        stored: bool = False,
        weight: tuple[int, ...] = (),
        of_blocks: bool = False,
        block: Any = None,
    ) -> bool:
        """Record how a leaf of a slot is stored; return whether it is compressed.

        `weight` is the parameter's shape. `block` is the `Block` of a block-wise slot, if `init`
        recorded one.
        """
        shape = tuple(leaf.shape)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        unpackable = _unpackable(codec, shape, weight)
        decision = decide_slot(
            path, weight if of_blocks else shape, slot, codec, self.group_size,
            self._stochastic(known), self.policy, path in masked, stored,
            refused=unpackable if is_float else f"{leaf.dtype} is not a float",
        )  # fmt: skip
        compressed = decision.codec is not None
        if block is not None:  # described as by optimizers that store block-wise slots themselves
            form = f"{decision.form or 'f32'}, {block.words or 'a value a block'}"
            reason = "; ".join(filter(None, [block.reason, unpackable]))
            decision = dataclasses.replace(decision, form=form, reason=reason, block=block)
        context.record(decision)
        return compressed

    def _masked(self, params: optax.Params) -> set[str]:
        return self.policy.masked_out(params) if jax.tree.leaves(params) else set()

    def _stochastic(self, known: SlotFacts) -> bool:
        return self.rounding == "stochastic" and not known.running_maximum

    def _encode(
        self,
        state: optax.OptState,
        params: optax.Params,
        seed: jax.Array,
        count: jax.Array,
        before: Mapping[str, Any] = types.MappingProxyType({}),
        blocks: Mapping[tuple[str, str], Any] = types.MappingProxyType({}),
    ) -> tuple[Any, dict[str, Any]]:
        """Return the inner state with codes, and the dictionary of scales.

        Args:
          state: the inner state, with f32 slots.
          params: the parameters, or the gradients.
          seed: seed of the hash.
          count: number of the step.
          before: the scales before the step.
          blocks: the `Block`s of block-wise slots by (path, slot), for the decisions of `init`.
        """
        scales: dict[str, Any] = {}
        masked, stored, shapes = self._masked(params), _with_codes(before), _shapes(params)
        slots = self._to_encode(state, masked, stored, shapes, blocks)
        rows = [slot for slot in slots if slot is not None]
        encoded = iter(each(_encoded, rows, self.group_size, seed, count))
        decided = iter(slots)

        def encode(node: optax.OptState, slot: str, value: Any) -> Any:
            codec = self._codec_of(node, slot)
            if codec is None:
                return value
            pairs, name = [], scale_name(slot, scales)
            for leaf in jax.tree.leaves(value):
                if next(decided) is None:
                    pairs.append((leaf, jnp.asarray(np.zeros((), np.float32))))
                else:
                    pairs.append(next(encoded))
            treedef = jax.tree.structure(value)
            scales[name] = array_metadata.like(value, [s for _, s in pairs], before.get(name))
            return jax.tree.unflatten(treedef, [c for c, _ in pairs])

        return map_slots(encode, state), scales

    def _to_encode(
        self,
        state: optax.OptState,
        masked: set[str],
        stored: set[tuple[str, str]],
        shapes: Mapping[str, tuple[int, ...]],
        blocks: Mapping[tuple[str, str], Any],
    ) -> list["_Slot | None"]:
        """Return the slots' leaves in order (None if not compressed), and record decisions."""
        results: list[_Slot | None] = []
        seen: dict[str, Any] = {}

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            codec = self._codec_of(node, slot)
            if codec is None:
                return value
            known, scales = facts(node, slot, own=True), scale_name(slot, seen)
            seen[scales] = None
            for path, leaf in trees.named_leaves(value):
                kept, shape = (scales, path) in stored, shapes.get(path, leaf.shape)
                row = _in_one_row(node, slot, leaf.shape, shape)
                of_block = (shape, row, blocks.get((path, slot)))
                own = _Slot(codec, slot, random.name_of(path), leaf, self._stochastic(known), row)
                compressed = self._decide(path, leaf, slot, masked, codec, known, kept, *of_block)
                results.append(own if compressed else None)
            return ()

        map_slots(visit, state)
        return results

    def _decode(self, state: CompressedState, updates: optax.Updates) -> Any:
        """Return the inner state with f32 slots."""
        decoded = iter(each(_decoded, self._to_decode(state, _shapes(updates)), self.group_size))

        def decode(node: optax.OptState, slot: str, value: Any) -> Any:
            if self._codec_of(node, slot) is None:
                return value
            leaves = [next(decoded) if _is_code(leaf) else leaf for leaf in jax.tree.leaves(value)]
            return jax.tree.unflatten(jax.tree.structure(value), leaves)

        return map_slots(decode, state.inner_state)

    def _to_decode(
        self, state: CompressedState, shapes: dict[str, tuple[int, ...]]
    ) -> list[tuple[GroupCodec, jax.Array, jax.Array, bool, int]]:
        """Check the compressed leaves; return each (codec, codes, scales, in_one_row, length)."""
        results: list[Any] = []
        seen: dict[str, Any] = {}

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            codec = self._codec_of(node, slot)
            if codec is None:
                return value
            name = scale_name(slot, seen)
            if name not in state.scales:
                raise ValueError(
                    f"the state has no {name}, only {', '.join(state.scales)}: it was made or "
                    "restored with other settings. Use those, or call init again."
                )
            seen[name] = stored = state.scales[name]
            rows = zip(trees.named_leaves(value), jax.tree.leaves(stored), strict=True)
            for (path, codes), scales in rows:
                shape = shapes.get(path, ())
                # only slots with their weight's shape are stored with several codes per byte
                packed = shape and codec.codes_per_byte > 1 and _is_code(codes)
                own = shape if packed else codes.shape
                row = _in_one_row(node, slot, own, shape)
                if not row and facts(node, slot, own=True).moment and codes.ndim and shape != own:
                    raise ValueError(
                        f"state of '{path}', slot {slot}, has shape {codes.shape}, the gradient "
                        f"{shapes.get(path, 'is missing')}: the state was made for another tree. "
                        "Call init on these parameters."
                    )
                if _is_code(codes):
                    of_groups = (codes.size,) if row else own
                    self._check_codes(codec, slot, path, codes, scales, of_groups, row)
                    results.append((codec, codes, scales, row, of_groups[-1]))
            return ()

        map_slots(visit, state.inner_state)
        if extra := [name for name in state.scales if name not in seen]:
            raise ValueError(
                f"the state has {', '.join(extra)} of a slot without a codec here: it was made "
                "or restored with other settings. Use those, or call init again."
            )
        return results

    def _check_codes(
        self,
        codec: GroupCodec,
        slot: str,
        path: str,
        codes: jax.Array,
        scales: jax.Array,
        of_groups: tuple[int, ...],
        in_one_row: bool,
    ) -> None:
        row = jax.ShapeDtypeStruct(of_groups, codes.dtype)
        given = StoredSlot(row if in_one_row else codes, scales)
        wanted = codec.storage(of_groups, self.group_size)
        if not given.is_like(wanted):
            raise ValueError(
                f"state of '{path}', slot {slot}: {given.words}, but {codec.name} in groups of "
                f"{self.group_size} keeps {wanted.words}. The state was made or restored with "
                "other settings: use those, or call init again."
            )

    # ---- the transformation ------------------------------------------------------------------

    def init(self, params: optax.Params) -> CompressedState:
        """Return the encoded inner state; if every slot starts constant, allocate no f32 array."""
        for path, leaf in trees.named_leaves(params):
            trees.check_param(path, leaf)
        # the inner update gets f32 gradients, so its state is f32 for weights of any dtype
        abstract = jax.eval_shape(lambda p: self._start(trees.widened(p), True)[0], params)
        warn_of_patterns(self.policy, params)
        self._check_inner(params)
        self._check_state(abstract, params)
        count = jnp.zeros((), jnp.int32)
        seed = context.provided_seed(self.seed)
        small = jax.tree.map(lambda p: jnp.zeros((1,) * p.ndim, jnp.float32), params)
        start = Start(self._codec_of, self._decide, self.group_size)
        # one-element parameters may give another structure: a mask may depend on sizes
        if not (start.is_constant(abstract) and self._is_like(abstract, small)):
            started, blocks = self._start(trees.widened(trees.with_values(params)))
            inner, scales = self._encode(started, params, seed, count, blocks=blocks)
            return CompressedState(count, seed, inner, scales)
        masked = self._masked(params)
        inner, scales = start.spread(abstract, self._start(small)[0], params, masked)
        floats = (leaf.dtype for leaf in jax.tree.leaves(start.others(abstract)))
        if any(jnp.issubdtype(dtype, jnp.inexact) for dtype in floats):  # may depend on the weights
            values = trees.with_values(params)
            own = jax.jit(lambda p: start.others(self._start(trees.widened(p))[0]))(values)
            inner = start.put(own, inner)
        return CompressedState(count, seed, inner, scales)

    def _start(
        self, params: optax.Params, first: bool = False
    ) -> tuple[Any, dict[tuple[str, str], Any]]:
        """Return the inner state, and the `Block`s of its block-wise slots by (path, slot).

        With `first`, record the decisions of the inner `init`, except those about slots that are
        compressed here. `init` calls this several times, but records decisions only once.
        """
        with context.absorbing() as decisions:
            state = self.inner.init(params)
        selected: set[tuple[str, str]] = set()

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            if self._codec_of(node, slot) is None:
                return value
            selected.update((path, slot) for path, _ in trees.named_leaves(value))
            return ()

        map_slots(visit, state)
        for decision in decisions:
            if first and (decision.path, decision.slot) not in selected:
                context.record(decision)
        return state, {(d.path, d.slot): d.block for d in decisions if d.block is not None}

    def _is_like(self, abstract: optax.OptState, small: optax.OptState) -> bool:
        """Return whether the inner state of the parameters `small` has the same structure."""
        like: Any = jax.tree.structure(jax.eval_shape(lambda p: self._start(p)[0], small))
        return bool(like == jax.tree.structure(abstract))

    def update(
        self,
        updates: optax.Updates,
        state: CompressedState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[Any, CompressedState]:
        """Decode the slots, run the inner update on f32 gradients, encode the slots again."""
        trees.check_state(state, CompressedState)
        if params is not None:
            trees.match("gradient", updates, params)
        updates, params = derivative.without((updates, params))
        new, inner = self.inner.update(
            trees.widened(updates), self._decode(state, updates), params, **extra
        )
        count = optax.safe_increment(state.count)
        reference = updates if params is None else params
        inner, scales = self._encode(inner, reference, state.seed, count, state.scales)
        _check_same_storage(state.scales, scales)
        if self.update_dtype == "gradient":
            new = trees.as_given(new, updates)
        return new, CompressedState(count, state.seed, inner, scales)


def _check_uncoded(slot: str, value: object) -> None:
    """Raise if a slot already holds codes."""
    for path, leaf in trees.named_leaves(value):
        if _is_code(leaf):
            raise ValueError(
                f"slot {slot} of '{path}' is already stored as {leaf.dtype} codes by the inner "
                f"optimizer: give it storage=Storage({slot}=None), or remove this second codec."
            )


def _check_shapes(slot: str, value: object, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise for a moment without its parameter's shape, which `update` checks against."""
    for path, leaf in trees.named_leaves(value):
        if leaf.ndim and shapes.get(path, leaf.shape) != leaf.shape:
            raise ValueError(
                f"slot {slot} of '{path}' has shape {leaf.shape}, its parameter {shapes[path]}: "
                "moments of another shape, such as the projected ones of optax.contrib.galore, "
                "cannot be compressed. Leave them uncompressed."
            )


def compressed(
    inner: optax.GradientTransformation,
    select: Select,
    wanted: tuple[str, ...],
    group_size: int,
    rounding: str,
    seed: int,
    policy: Policy,
    update_dtype: str,
) -> optax.GradientTransformationExtraArgs:
    """Compress the slots for which `select` returns a codec; all of `wanted` must exist."""
    check_group_size(group_size)
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(f"rounding must be 'stochastic' or 'nearest', got {rounding!r}")
    if update_dtype not in ("gradient", "float32"):
        raise ValueError(f"update_dtype must be 'gradient' or 'float32', got {update_dtype!r}")
    inner = trees.wrapped(inner)
    work = _Compressor(inner, select, wanted, group_size, rounding, seed, policy, update_dtype)
    return optax.GradientTransformationExtraArgs(work.init, work.update)


def compress_state(
    inner: optax.GradientTransformation,
    *,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
    **slot_codecs: GroupCodec | None,
) -> optax.GradientTransformationExtraArgs:
    """Store named slots of any optax optimizer's state with 8-bit codecs.

    Args:
      inner: any optax transformation, including chains.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` (unbiased, so slow averages never stall) or `nearest`; a running
        maximum such as amsgrad's `nu_max` is always rounded to nearest.
      seed: seed of the hash for stochastic rounding.
      policy: leaves and slots to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype as in optax, or `float32`.
        (Inside `split_master_weights` gradients, and therefore updates, are f32.)
      **slot_codecs: a codec for each slot by the name of its field, such as `mu=softsign()`.

    Returns:
      An optax transformation. Its state keeps the inner state's types, with codes in their slots.

    Raises:
      ValueError: in `init`, for a slot that the state does not have (the error lists its slots) or
        that cannot be rounded (centered `rmsprop`), for moments whose shape is not their
        parameter's (`optax.contrib.galore`), for a signed slot with an unsigned codec, or around an
        optimizer that splits master weights.

    Memory: 1.06 bytes (e8m8 scales) or 1.13 bytes (f32 scales) per value instead of 4.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.compress_state(optax.adan(1e-3), m=lowmem.codecs.softsign())
      >>> state = tx.init({"w": jnp.ones((64, 128))})
      >>> optax.tree.get(state, "m")["w"].dtype
      dtype('int8')
    """
    if not slot_codecs:
        raise ValueError(
            "compress_state needs a codec for at least one slot, such as mu=softsign()"
        )
    for name, codec in slot_codecs.items():
        check_codec(name, codec, signed=False)

    def select(field: str, known: SlotFacts) -> GroupCodec | None:
        del known
        return slot_codecs.get(field)

    wanted = tuple(slot_codecs)
    return compressed(inner, select, wanted, group_size, rounding, seed, policy, update_dtype)


# ---- FlashOptim's two moment codecs, as wrappers of a transformation or as links of a chain ------


def _of_moment(moment: int, codec: GroupCodec) -> Select:
    return lambda field, known: codec if known.moment == moment else None


def _is_decay(inner: object) -> TypeGuard[float]:
    if not isinstance(inner, int | float | np.number | jax.Array):
        return False
    check_range("the decay", inner, 0.0, 1.0)
    return True


def compand_momentum(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Store the first moment of a transformation as companded int8 (FlashOptim, equation 3).

    Args:
      inner: a transformation of optax with a first moment in f32 (`mu`, `trace`, `m`, `ema`), or
        `scale_by_adam_mini`; or a decay b for a plain link of a chain, m = b m + (1-b) g without
        debiasing.
      codec: the codec; softsign int8 by default.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: seed of the hash for stochastic rounding.
      policy: leaves to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype, or `float32`.

    Returns:
      An optax transformation; 1.06 bytes per value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.compand_momentum(optax.trace(0.9)), optax.scale(-0.1))
    """
    if _is_decay(inner):
        inner = optax.ema(inner, debias=False)
    select = _of_moment(1, codec or softsign())
    return compressed(inner, select, (), group_size, rounding, seed, policy, update_dtype)


def sqrt_variance_quant(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Store the root of a transformation's second moment as uint8 (FlashOptim, equation 4).

    Args:
      inner: a transformation of optax with a non-negative second moment in f32 (`nu`, `n`,
        `sum_of_squares`), or `scale_by_adam_mini`, whose block-wise values are grouped as one flat
        vector; or a decay b for a plain link of a chain, g / sqrt(v) with v = b v + (1-b) g^2.
      codec: the codec; sqrt uint8 by default.
      group_size: number of neighbors on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: seed of the hash for stochastic rounding.
      policy: leaves to store uncompressed.
      update_dtype: `gradient`, updates in the gradients' dtype, or `float32`.

    Returns:
      An optax transformation; 1.13 bytes per value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.compand_momentum(lowmem.sqrt_variance_quant(optax.scale_by_adam()))
    """
    if _is_decay(inner):
        inner = optax.scale_by_rms(inner)
    select = _of_moment(2, codec or sqrt())
    return compressed(inner, select, (), group_size, rounding, seed, policy, update_dtype)
