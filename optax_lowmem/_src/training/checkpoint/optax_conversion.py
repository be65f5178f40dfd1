"""Convert the state of an optax optimizer to low memory, and back.

A `_Converter` walks a state of this library and the corresponding optax state together, and encodes
or decodes the slots.
"""

import collections
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import numerics, random, trees
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Structure
from optax_lowmem._src.kernels import group_codec
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.optimizers import every_record
from optax_lowmem._src.optim.optimizers.record import Constructor, OptimizerRecord, name_of
from optax_lowmem._src.optim.step.engine import Engine, EngineTransformation
from optax_lowmem._src.optim.step.masters import master_params
from optax_lowmem._src.optim.wrappers.chain import Chain
from optax_lowmem._src.optim.wrappers.compressor import CompressedState
from optax_lowmem._src.optim.wrappers.init import WeightDtype, init
from optax_lowmem._src.optim.wrappers.slots import map_slots, scale_name

# ---- the optax optimizer that corresponds to a low-memory one ------------------------------------

GIVE_PLAIN = (
    "Pass plain=, the optax optimizer to continue with, for example "
    "plain=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))."
)

_UNCOMPRESSED = "the same optimizer, uncompressed,"


def record_of(state: optax.OptState) -> OptimizerRecord | None:
    """Return the record of the optimizer with this state; None for wrappers and other states."""
    if not trees.is_named_tuple(state):
        return None
    kind = type(state).__name__
    return next((r for r in every_record() if r.rule.state_type.__name__ == kind), None)


def counterpart(tx: optax.GradientTransformation, params: PyTree) -> optax.GradientTransformation:
    """Return the optax optimizer whose state is that of `tx` in f32; its rates are arbitrary.

    If `tx` stores nothing in low memory, this is `tx`. Raises if an optimizer of this library is
    hidden in a closure.
    """
    if isinstance(tx, EngineTransformation):
        return _optax_optimizer_of(tx.engine)
    if isinstance(tx, Chain):
        return optax.chain(*(counterpart(link, params) for link in tx.links))
    state, decisions = context.dry_run(tx, params)
    if not decisions:
        return tx
    # `init` of split_master_weights and compress_state is a bound method
    inner = getattr(getattr(tx.init, "__self__", None), "inner", None)
    if inner is not None and type(state).__name__ in ("SplitState", "CompressedState"):
        return counterpart(inner, params)
    raise ValueError(
        f"the optimizer is hidden inside a wrapper (its state is a {type(state).__name__}), so the "
        f"corresponding optax optimizer cannot be found. {GIVE_PLAIN}"
    )


def _optax_optimizer_of(engine: Engine) -> optax.GradientTransformation:
    make = _optax_constructor(engine)
    if make is None:
        what = type(engine.rule).__name__ + ("" if engine.weights else " as a scale_by transform")
        raise ValueError(f"no optax optimizer is known to correspond to {what}. {GIVE_PLAIN}")
    if not engine.weights:
        return make()
    # for a schedule, optax stores another count
    rate, strength = (
        (lambda count: 0.0) if name in engine.schedules else number
        for name, number in (("learning_rate", 0.0), ("weight_decay", 1e-4))
    )
    arguments: dict[str, object] = {}
    if engine.matrices is not None:  # they decide the slots of each leaf
        arguments["muon_weight_dimension_numbers"] = engine.matrices.dimension_numbers
    if not _decays(engine):
        return make(rate, **arguments)
    decay: dict[str, PyTree] = {"weight_decay": strength, "mask": engine.decay_mask}
    accepted = inspect.signature(make).parameters
    accepted_decay = {name: value for name, value in decay.items() if name in accepted}
    if not accepted_decay:
        return optax.chain(optax.add_decayed_weights(**decay), make(rate))
    return make(rate, **accepted_decay, **arguments)


def counterpart_name(tx: optax.GradientTransformation) -> str:
    """Return the name of an optimizer's `counterpart`, for display."""
    if isinstance(tx, Chain):
        ours = [link for link in tx.links if isinstance(link, EngineTransformation)]
        return counterpart_name(ours[0]) if len(ours) == 1 else _UNCOMPRESSED
    make = _optax_constructor(tx.engine) if isinstance(tx, EngineTransformation) else None
    name = name_of(make) if make else ""
    for module in (optax, optax.contrib):
        if name and hasattr(module, name):
            return f"{module.__name__}.{name}"
    return _UNCOMPRESSED


def _optax_constructor(engine: Engine) -> Constructor | None:
    """Return the constructor of the optax optimizer with the state of an engine in f32."""
    alike = (r for r in every_record() if type(r.rule) is type(engine.rule))
    record = next((r for r in alike if r.rule.slots == engine.rule.slots), None)
    if record is None:
        return None
    if not engine.weights:
        return record.plain_scale_by
    return record.in_optax if _decays(engine) else record.undecayed or record.in_optax


def _decays(engine: Engine) -> bool:
    return not {"decay", "l2"}.isdisjoint(engine.hyperparameters(jnp.zeros((), jnp.int32)))


# ---- walking two states together -----------------------------------------------------------------

# fields of inject_hyperparams, dicts by name: one side may have more entries
_BY_NAME = ("hyperparams", "hyperparams_states")


class _Converter:
    """Convert a state between low memory (`ours`) and optax (`theirs`), in one direction."""

    def __init__(self, decisions: list[context.Decision], to_optax: bool):
        self.decisions, self.to_optax = Decisions(decisions), to_optax

    def choose(self, ours: optax.OptState, theirs: optax.OptState) -> tuple[PyTree, PyTree]:
        """Return (the side to convert to, the side to convert from)."""
        return (theirs, ours) if self.to_optax else (ours, theirs)

    def walk(self, ours: optax.OptState, theirs: optax.OptState, where: str = "state") -> PyTree:
        """Return the converted state, from a pair of states; `where` names them in errors."""
        kind = type(ours).__name__
        record = record_of(ours)
        if record is not None:
            convert = self._decode_moments if self.to_optax else self._encode_moments
            return convert(ours, theirs, record, where)
        if isinstance(ours, CompressedState):
            self.decisions.note_outer_codes(ours)
            compressed = self._decompressed if self.to_optax else self._compressed
            return compressed(ours, theirs, where)
        if kind == "SplitState":
            inner = self.walk(ours.inner_state, theirs, where)
            return inner if self.to_optax else ours._replace(inner_state=inner)
        if not trees.holds(ours, _is_ours):
            return self.same(ours, theirs, where)
        if trees.is_named_tuple(ours) and ours._fields == getattr(theirs, "_fields", None):
            return self._convert_fields(ours, theirs, where)
        if type(ours) is tuple and type(theirs) is tuple and len(ours) <= len(theirs):
            return self._convert_links(ours, theirs, where)
        named = type(ours) in trees.DICTS and type(theirs) is type(ours)
        if named and ours.keys() == theirs.keys():
            target, _ = self.choose(ours, theirs)  # the result has its order of keys
            return type(target)(
                (k, self.walk(ours[k], theirs[k], f"{where}[{k!r}]")) for k in target
            )
        raise _mismatch(ours, theirs, where)

    def same(self, ours: optax.OptState, theirs: optax.OptState, where: str) -> PyTree:
        """Cast the arrays of one side to the dtypes of the other; both have the same tree."""
        target, source = self.choose(ours, theirs)
        expected: Structure = jax.tree.structure(target)
        if expected != jax.tree.structure(source):
            raise _mismatch(ours, theirs, where)

        def leaf(like: jax.Array | jax.ShapeDtypeStruct, x: jax.Array) -> PyTree:
            if jnp.shape(like) != jnp.shape(x):
                here, there = (
                    ", ".join(map(kinds, jax.tree.leaves(tree)[:4])) for tree in (ours, theirs)
                )
                raise ValueError(f"{where}: {here} here, but {there} in optax.")
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            return jnp.asarray(x, like.dtype)

        return jax.tree.map(leaf, target, source)

    def _convert_fields(self, ours: optax.OptState, theirs: optax.OptState, where: str) -> PyTree:
        target, source = self.choose(ours, theirs)
        results = {}
        for name in ours._fields:
            if name in _BY_NAME:
                more = getattr(source, name)
                results[name] = {k: more.get(k, x) for k, x in getattr(target, name).items()}
            else:
                pair = getattr(ours, name), getattr(theirs, name)
                results[name] = self.walk(*pair, f"{where}.{name}")
        return target._replace(**results)

    def _convert_links(
        self, ours: tuple[PyTree, ...], theirs: tuple[PyTree, ...], where: str
    ) -> tuple[PyTree, ...]:
        """Convert the links of two chains; one of `ours` may correspond to several of `theirs`."""
        more = len(theirs) - len(ours)
        fused = [i for i, part in enumerate(ours) if record_of(part) is not None]
        if more and len(fused) != 1:
            raise _mismatch(ours, theirs, where)
        results: list[PyTree] = []
        rest = list(theirs)
        for index, part in enumerate(ours):
            selected = more + 1 if more and index == fused[0] else 1
            several, rest = tuple(rest[:selected]), rest[selected:]
            beside = several if selected > 1 else several[0]
            result = self.walk(part, beside, f"{where}[{index}]")
            spliced = selected > 1 and self.choose(part, beside)[0] is beside
            results.extend(result) if spliced else results.append(result)
        return tuple(results)

    def _encode_moments(
        self, ours: optax.OptState, theirs: optax.OptState, record: OptimizerRecord, where: str
    ) -> PyTree:
        """Return `ours` with the moments and the count of optax's state, encoded as it has them."""
        values_of, counts = self._moments(theirs, record, where)
        if len({int(count) for count in counts}) > 1:
            raise ValueError(
                f"{where}: optax's state counts {sorted({int(c) for c in counts})} steps, in its "
                "moments and its schedule, but this optimizer has one count for both. Set both to "
                "the count to continue from, with optax.tree.set."
            )
        count = jnp.asarray(counts[0] if counts else 0, jnp.int32)
        fields: dict[str, PyTree] = {"count": count}
        for slot, values in values_of.items():
            stored, scales = getattr(ours, slot), getattr(ours, f"{slot}_scale")
            pop = functools.partial(self.decisions.pop_inside, slot=slot)
            fields[slot], fields[f"{slot}_scale"] = _encode_slot(
                stored, scales, values, pop, ours.seed, count, f"{where}.{slot}"
            )
        return ours._replace(**fields)

    def _moments(
        self, theirs: optax.OptState, record: OptimizerRecord, where: str
    ) -> tuple[dict[str, dict[str, jax.Array]], list[jax.Array]]:
        """Return the moments of optax's state, by slot and path, and its counts.

        Raises unless the leaves with a slot in optax are those with the slot here.
        """
        moments: dict[str, dict[str, jax.Array]] = {slot: {} for slot in record.optax_fields}
        counts: list[jax.Array] = []
        _map_moments(
            theirs, record, lambda slot, tree: moments[slot].update(trees.named_leaves(tree)),
            counts.append, where,
        )  # fmt: skip
        for slot, values in moments.items():
            if differs := trees.difference(sorted(self.decisions.paths(slot)), sorted(values)):
                raise ValueError(
                    f"{where}.{slot}: {slot} does not have the leaves of the parameters: "
                    f"{differs}. Give both optimizers the same parameters and masks."
                )
        return moments, counts

    def _compressed(self, ours: CompressedState, theirs: optax.OptState, where: str) -> PyTree:
        """Convert a state of optax to a `CompressedState` like `ours`."""
        codes: dict[str, PyTree] = {}

        def f32_like(slot: str, name: str, stored: optax.Params) -> PyTree:
            """Return shapes of the values in place of codes; keep the codes for encoding."""
            codes[name] = stored
            return self.decisions.values_of(slot, stored)

        inner = self.walk(map_coded_slots(ours, ours.inner_state, f32_like), theirs, where)
        counts = optax.tree.get_all_with_path(theirs, "count")
        count = jnp.asarray(counts[0][1] if counts else 0, jnp.int32)
        scales: dict[str, PyTree] = {}

        def encode(slot: str, name: str, values: optax.Params) -> PyTree:
            pop = functools.partial(self.decisions.pop, slot=slot)
            named = dict(trees.named_leaves(values))
            result, scales[name] = _encode_slot(
                codes[name], ours.scales[name], named, pop, ours.seed, count, f"{where}.{slot}"
            )
            return result

        return CompressedState(count, ours.seed, map_coded_slots(ours, inner, encode), scales)

    def _decode_moments(
        self, ours: optax.OptState, theirs: optax.OptState, record: OptimizerRecord, where: str
    ) -> PyTree:
        """Return optax's state `theirs` with the decoded moments and the count of `ours`."""
        self._moments(theirs, record, where)  # checks

        def field_of(slot: str, like: optax.Params) -> PyTree:
            pop = functools.partial(self.decisions.pop_inside, slot=slot)
            return _decode_slot(getattr(ours, slot), getattr(ours, f"{slot}_scale"), like, pop)

        return _map_moments(theirs, record, field_of, lambda _: jnp.asarray(ours.count), where)

    def _decompressed(self, ours: CompressedState, theirs: optax.OptState, where: str) -> PyTree:
        """Convert a `CompressedState` to a state of optax like `theirs`."""

        def decode(slot: str, name: str, codes: optax.Params) -> PyTree:
            pop = functools.partial(self.decisions.pop, slot=slot)
            return _decode_slot(
                codes, ours.scales[name], self.decisions.values_of(slot, codes), pop
            )

        return self.walk(map_coded_slots(ours, ours.inner_state, decode), theirs, where)


def _is_ours(node: object) -> bool:
    """Return whether a node is the state of an optimizer, or of a wrapper with another form."""
    return type(node).__name__ in ("CompressedState", "SplitState") or record_of(node) is not None


def _map_moments(
    theirs: PyTree,
    record: OptimizerRecord,
    of_slot: Callable[..., PyTree],
    of_count: Callable[[jax.Array], object],
    where: str,
) -> PyTree:
    """Map functions over the moments and counts of the state of one optimizer in optax.

    `of_slot` takes a slot and the tree of its field, and `of_count` a count. Raises unless the
    state (`where` names it in errors) has each moment exactly once, and no other arrays.
    """
    slots = {
        field: slot
        for slot, fields in record.optax_fields.items()
        for field in ((fields,) if isinstance(fields, str) else fields)
    }
    seen: list[str] = []
    other: list[str] = []

    def visit(node: optax.OptState, field: str, value: PyTree) -> PyTree:
        name = f"{type(node).__name__}.{field}"
        if name in slots:
            seen.append(name)
            return of_slot(slots[name], value)
        if field == "count":
            return of_count(value)
        if name in record.optax_constants:
            return value
        inside = jax.tree.leaves(value, is_leaf=_is_state)
        if inside and not any(map(_is_state, inside)):
            other.append(name)
        return value

    result = map_slots(visit, theirs)
    if sorted(seen) != sorted(slots) or other:
        keeps = _by_state(slots) or "at most a count"
        has = ", ".join([*seen, *other]) or "nothing"
        raise ValueError(
            f"{where}: this optimizer continues from {keeps}, but optax's state has {has} "
            f"(it is {kinds(theirs)}). It belongs to another optimizer: pass the state of the one "
            "whose low-memory form this is."
        )
    return result


def _by_state(names: Iterable[str]) -> str:
    """Return fields as text, by their state: `mu, nu of one ScaleByAdamState`."""
    results: dict[str, list[str]] = {}
    for name in names:
        state, _, field = name.rpartition(".")
        results.setdefault(state, []).append(field)
    return " and ".join(f"{', '.join(fields)} of one {state}" for state, fields in results.items())


def _is_state(node: PyTree) -> bool:
    return trees.is_state(node) and bool(node._fields)


def kinds(state: optax.OptState) -> str:
    """Return the types of a state as text, such as `(EmptyState, FlashAdamState)`."""
    if type(state) is tuple:
        return f"({', '.join(map(kinds, state))})"
    if hasattr(state, "shape"):
        return f"{state.dtype}{list(state.shape)}"
    return type(state).__name__


def _mismatch(ours: optax.OptState, theirs: optax.OptState, where: str) -> ValueError:
    return ValueError(
        f"{where}: tx has the state {kinds(ours)} where the optax optimizer has {kinds(theirs)}, "
        "so the optimizers do not correspond. Build both from the same links and wrappers, such as "
        "lowmem.chain(clip, flash_adamw(...)) and optax.chain(clip, adamw(...))."
    )


# ---- slots of low-memory states ------------------------------------------------------------------

# one compiled call per leaf: eagerly, each operation of a codec would allocate its result
_encode = jax.jit(group_codec.encode, static_argnames=("codec", "group_size", "slot"))
_decode = jax.jit(group_codec.decode, static_argnames=("codec", "group_size", "length"))
Pop = Callable[[str], context.Decision]


class Decisions:
    """The decisions of an `init`: for each slot of each leaf a queue, in their order."""

    def __init__(self, decisions: list[context.Decision]):
        self._left: dict[tuple[str, str], list[context.Decision]] = collections.defaultdict(list)
        for decision in decisions:
            self._left[decision.path, decision.slot].append(decision)
        # `pop` keeps these; of several decisions about a slot of a leaf, the last
        self._last = {(d.path, d.slot): d for d in decisions}
        self._coded_outside: set[tuple[str, str]] = set()

    def pop(self, path: str, slot: str) -> context.Decision:
        """Return and remove the next decision for a leaf's slot."""
        return self._left[path, slot].pop(0)

    def pop_inside(self, path: str, slot: str) -> context.Decision:
        """Return `pop`; f32 for a slot that an outer `CompressedState` quantizes."""
        if (path, slot) in self._coded_outside:
            decision = self._last[path, slot]
            return dataclasses.replace(decision, form=None, codec=None, reason="coded outside")
        return self.pop(path, slot)

    def paths(self, slot: str) -> list[str]:
        """Return the paths of the leaves that have a slot."""
        return [path for path, name in self._last if name == slot]

    def values_of(self, slot: str, codes: PyTree) -> PyTree:
        """Return the f32 values of a stored slot as shapes, in a tree like that of its codes."""
        leaves = [
            jax.ShapeDtypeStruct(self._last[path, slot].values_shape, jnp.float32)
            for path, _ in trees.named_leaves(codes)
        ]
        return jax.tree.unflatten(jax.tree.structure(codes), leaves)

    def note_outer_codes(self, state: CompressedState) -> None:
        """Record which slots this state quantizes: they are f32 in its inner states."""

        def visit(slot: str, name: str, codes: PyTree) -> PyTree:
            self._coded_outside.update((path, slot) for path, _ in trees.named_leaves(codes))
            return ()

        map_coded_slots(state, state.inner_state, visit)


def encode_leaf(
    decision: context.Decision, x: jax.Array, like: jax.Array, seed: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encode f32 values as the optimizer stores them, and return the slot and its scales.

    `x` has a value per element; if a block shares a value, it is the mean over the block. `like`
    has the dtype and shape of the stored slot.
    """
    if decision.block is not None and x.shape != decision.values_shape:
        x = decision.block.mean(x)
    if decision.codec is None:
        return x.astype(like.dtype), jnp.zeros((), jnp.float32)
    key = random.leaf_key(seed, count, decision.path) if decision.stochastic else None
    flat = x.reshape(-1) if decision.block is not None else x  # values of blocks are stored flat
    codes, scales = _encode(
        decision.codec, numerics.widen(flat), decision.group_size, key, slot=decision.slot
    )
    return codes.reshape(like.shape), scales


def decode_leaf(
    decision: context.Decision, stored: jax.Array, scales: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Decode a stored slot to f32 values, one per element of a leaf of this shape."""
    values_shape = decision.values_shape
    if decision.codec is None:
        x = numerics.widen(stored)
    elif decision.block is None:
        x = _decode(decision.codec, stored, scales, decision.group_size, values_shape[-1])
    else:  # values of blocks are stored flat
        row, length = stored.reshape(-1), math.prod(values_shape)
        x = _decode(decision.codec, row, scales, decision.group_size, length).reshape(values_shape)
    if decision.block is not None and x.shape != shape:
        return decision.block.spread(x, shape)
    return x


def map_coded_slots(
    state: CompressedState, inner: optax.OptState, function: Callable[[str, str, PyTree], PyTree]
) -> PyTree:
    """Replace the quantized slots of `inner` by function(slot, key of its scales, value)."""
    seen: dict[str, None] = {}

    def visit(node: optax.OptState, field: str, value: PyTree) -> PyTree:
        name = scale_name(field, seen)
        if name not in state.scales:
            return value
        seen[name] = None
        return function(field, name, value)

    return map_slots(visit, inner)


def _encode_slot(
    stored: PyTree,
    scales: PyTree,
    values: Arrays,
    pop: Pop,
    seed: jax.Array,
    count: jax.Array,
    where: str,
) -> tuple[PyTree, PyTree]:
    """Return a stored slot and its scales with other f32 values, by path; other leaves are kept.

    `pop` returns how the optimizer stores the leaf of a path, and `where` names the slot in errors.
    """
    pairs = []
    rows = zip(trees.named_leaves(stored), jax.tree.leaves(scales), strict=True)
    for (path, leaf), scale in rows:
        if path not in values:  # this leaf does not have the slot
            pairs.append((leaf, scale))
            continue
        decision, x = pop(path), values[path]
        if x.shape not in (decision.shape, decision.values_shape):
            raise ValueError(
                f"{where}: '{path}' has shape {x.shape} in optax's state and {decision.shape} "
                "here: pass the parameters of the same run."
            )
        pairs.append(encode_leaf(decision, x, leaf, seed, count))
    columns = zip(*pairs, strict=True) if pairs else ((), ())
    codes, new_scales = (
        jax.tree.unflatten(jax.tree.structure(tree), column)
        for tree, column in zip((stored, scales), columns, strict=True)
    )
    return codes, new_scales


def _decode_slot(stored: PyTree, scales: PyTree, like: PyTree, pop: Pop) -> PyTree:
    """Return the f32 values of a stored slot, in a tree like `like`, whose leaves may be fewer."""
    expected = dict(trees.named_leaves(like))
    rows = zip(trees.named_leaves(stored), jax.tree.leaves(scales), strict=True)
    values = {
        path: decode_leaf(pop(path), leaf, scale, expected[path].shape)
        for (path, leaf), scale in rows
        if path in expected
    }
    leaves = [values[path].astype(leaf.dtype) for path, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def from_optax(
    tx: optax.GradientTransformation,
    optax_state: optax.OptState,
    params: optax.Params,
    dtype: WeightDtype = jnp.bfloat16,
    *,
    keep_f32: Sequence[str] = (),
    seed: ArrayLike | None = None,
    allow_rounding: bool = False,
) -> tuple[PyTree, PyTree]:
    """Continue the run of an optax optimizer in low memory.

    `tx` is the low-memory form of the optimizer: `flash_adamw` for `optax.adamw`,
    `lowmem.chain(clip, flash_adamw)` for `optax.chain(clip, adamw)`, `compress_state(adan)` for
    `adan`; inside the same wrappers (masked, partition, MultiSteps, inject_hyperparams).

    Args:
      tx: the optimizer to continue with.
      optax_state: the f32 state of the optax optimizer.
      params: its parameters.
      dtype: of the weights, as in `lowmem.init`.
      keep_f32: as in `lowmem.init`.
      seed: of stochastic rounding, as in `lowmem.init`.
      allow_rounding: as in `lowmem.init`.

    Returns:
      (weights, state), as from `lowmem.init`, with the moments, counts and other state of optax.

    Raises:
      ValueError: for the state of another optimizer or other parameters; it names what has no
        counterpart.

    Numerics: counts, slots that stay in f32 and 32-bit master weights are exact. Other slots are
    encoded as the optimizer encodes them, including stochastic rounding, with an error of at most
    their codec's `error_bound`; 24-bit master weights have a relative error of at most 2^-16.
    Adam-mini stores the mean of v over each block. A momentum without a count (`optax.sgd` with a
    constant rate) starts counting at 0, and so does a schedule of `tx`.

    Memory: params, optax_state, and the new weights and state, plus temporaries of one leaf.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> params, plain = {"w": jnp.ones((64, 64))}, optax.adamw(1e-3)
      >>> updates, old = plain.update(params, plain.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> weights, state = lowmem.checkpoint.from_optax(tx, old, params)
      >>> int(state.count), state.mu["w"].dtype
      (1, dtype('int8'))
    """
    weights, empty = init(
        tx, params, dtype, keep_f32=keep_f32, seed=seed, allow_rounding=allow_rounding
    )
    _, decisions = context.dry_run(tx, weights)
    return weights, _Converter(decisions, to_optax=False).walk(empty, optax_state)


def to_optax(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    plain: optax.GradientTransformation | None = None,
) -> tuple[PyTree, PyTree]:
    """Continue a low-memory run in plain optax and f32.

    Args:
      tx: the low-memory optimizer.
      state: its state.
      params: its weights.
      plain: the optax optimizer to continue with. None chooses one for the optimizers of this
        library, `lowmem.chain`, `compress_state` and `split_master_weights`: `optax.adamw` for
        `flash_adamw` (`optax.adam` if weight_decay is 0), and so on, with a separate count if the
        learning rate depends on the step. Required inside wrappers of optax.

    Returns:
      (f32 parameters, state of `plain`).

    Raises:
      ValueError: if `plain` is required, or has state that `tx` lacks.

    Numerics: exact: the f32 values of codes and corrections. Adam-mini's v is broadcast over its
    blocks; `from_optax` takes their mean again.

    Memory: 12 bytes per parameter for AdamW, in addition to `state` and `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> weights, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> params, old = lowmem.checkpoint.to_optax(tx, state, weights)
      >>> params["w"].dtype, type(old[0]).__name__
      (dtype('float32'), 'ScaleByAdamState')
      >>> updates, old = optax.adamw(1e-3).update(params, old, params)
    """
    masters = master_params(params, state)
    _, decisions = context.dry_run(tx, params)
    chosen = counterpart(tx, params) if plain is None else plain
    abstract = jax.eval_shape(chosen.init, masters)
    result = _Converter(decisions, to_optax=True).walk(state, abstract)
    return masters, _filled(result, chosen, masters)


def _filled(state: PyTree, plain: optax.GradientTransformation, params: optax.Params) -> PyTree:
    """Replace a state's abstract leaves, which `tx` does not have, by those of `plain.init`."""
    leaves, treedef = jax.tree.flatten(state)
    left = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if left:  # under jit, so that the moments, which are not returned, are not computed
        made = jax.jit(lambda p: [jax.tree.leaves(plain.init(p))[i] for i in left])(params)
        for index, leaf in zip(left, made, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(treedef, leaves)
