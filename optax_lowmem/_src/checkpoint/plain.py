"""From a running optax optimizer to low memory, and back.

A state of ours and one of optax are walked beside each other, and the slots of ours on the way.
"""

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.codecs import group_codec
from optax_lowmem._src.core import array_metadata, context, numerics, packs, random, trees
from optax_lowmem._src.optimizers import every_record
from optax_lowmem._src.optimizers.record import Constructor, OptimizerRecord, name_of
from optax_lowmem._src.step.engine import Engine, EngineTransformation
from optax_lowmem._src.step.masters import master_params
from optax_lowmem._src.wrappers.chain import Chain
from optax_lowmem._src.wrappers.compress import CompressedState
from optax_lowmem._src.wrappers.init import init
from optax_lowmem._src.wrappers.slots import map_slots
from optax_lowmem._src.wrappers.start import WeightDtype

# ---- the optax optimizer that corresponds to one of ours -----------------------------------------

GIVE_PLAIN = (
    "Pass plain=, the optax optimizer that is to go on, for example "
    "plain=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))."
)

_UNCOMPRESSED = "the same optimizer, uncompressed,"


def record_of(state: optax.OptState) -> OptimizerRecord | None:
    """Return the record whose state this is, or None where it is not one of our optimizers'."""
    if not trees.is_named_tuple(state):
        return None
    kind = type(state).__name__
    return next((r for r in every_record() if r.rule.state_type.__name__ == kind), None)


def counterpart(
    tx: optax.GradientTransformation, params: optax.Params
) -> optax.GradientTransformation:
    """An optax optimizer with the state that `tx` would have in f32; its rates mean nothing.

    Raises:
      ValueError: where it cannot be told from `tx`, which may be a closure of optax's.
    """
    if isinstance(tx, EngineTransformation):
        return _of_engine(tx.engine)
    if isinstance(tx, Chain):
        return optax.chain(*(counterpart(link, params) for link in tx.links))
    state, decisions = context.dry_run(tx, params)
    if not decisions:
        return tx
    inner = getattr(getattr(tx.init, "__self__", None), "inner", None)
    if inner is not None and type(state).__name__ in ("SplitState", "CompressedState"):
        return counterpart(inner, params)
    raise ValueError(
        f"which optax optimizer this one corresponds to is hidden inside a wrapper (its state is a "
        f"{type(state).__name__}). {GIVE_PLAIN}"
    )


def _of_engine(engine: Engine) -> optax.GradientTransformation:
    record = _record_of_rule(engine)
    make = _constructor(record, engine) if record else None
    if record is None or make is None:
        what = type(engine.rule).__name__ + ("" if engine.weights else "'s direction alone")
        raise ValueError(f"no optax optimizer is known to correspond to {what}. {GIVE_PLAIN}")
    if not engine.weights:
        return make()
    # where it is scheduled optax keeps a count of its own
    rate, strength = (
        (lambda count: 0.0) if counterpart_name in engine.schedules else default
        for counterpart_name, default in (("learning_rate", 0.0), ("weight_decay", 1e-4))
    )
    own: dict[str, Any] = {}
    if engine.matrices is not None and engine.matrices.dimensions is not None:
        # they say which leaves have which slots; optax calls a tree whose class is callable
        chosen = functools.partial(trees.chosen, engine.matrices.dimensions)
        own["muon_weight_dimension_numbers"] = chosen
    if not _decays(engine):
        return make(rate, **own)
    decay: dict[str, Any] = {"weight_decay": strength, "mask": engine.decay_mask}
    taken = record.chosen(decay, make)
    if not taken:
        return optax.chain(optax.add_decayed_weights(**decay), make(rate))
    return make(rate, **taken, **own)


def counterpart_name(tx: optax.GradientTransformation) -> str:
    """Return what `counterpart` of an optimizer is called, for display."""
    if isinstance(tx, Chain):
        ours = [link for link in tx.links if isinstance(link, EngineTransformation)]
        return counterpart_name(ours[0]) if len(ours) == 1 else _UNCOMPRESSED
    record = _record_of_rule(tx.engine) if isinstance(tx, EngineTransformation) else None
    made = (
        _constructor(record, tx.engine) if record and isinstance(tx, EngineTransformation) else None
    )
    known = name_of(made) if made else ""
    for module in (optax, optax.contrib):
        if known and hasattr(module, known):
            return f"{module.__name__}.{known}"
    return _UNCOMPRESSED


def _constructor(record: OptimizerRecord, engine: Engine) -> Constructor | None:
    """Return what makes the optax optimizer with the state that an engine would have in f32."""
    if not engine.weights:
        return record.plain_scale_by
    return record.in_optax if _decays(engine) else record.undecayed or record.in_optax


def _decays(engine: Engine) -> bool:
    return not {"decay", "l2"}.isdisjoint(engine.hyperparameters(jnp.zeros((), jnp.int32)))


def _record_of_rule(engine: Engine) -> OptimizerRecord | None:
    return next((r for r in every_record() if type(r.rule) is type(engine.rule)), None)


# ---- states walked beside each other -------------------------------------------------------------

# numbers that inject_hyperparams keeps by name: those of one side may be more
_BY_NAME = ("hyperparams", "hyperparams_states")


class Converter(abc.ABC):
    """Makes one side's state of the other's.

    Args:
      decisions: those of the `init` of our side.
    """

    def __init__(self, decisions: list[context.Decision]):
        self.decisions = Decisions(decisions)

    @abc.abstractmethod
    def choose(self, ours: optax.OptState, plain: optax.OptState) -> tuple[Any, Any]:
        """(the side that is made, the side that it is made of)."""

    @abc.abstractmethod
    def moments(
        self, ours: optax.OptState, plain: optax.OptState, record: OptimizerRecord, where: str
    ) -> Any:
        """Convert between a state of one of our optimizers and optax's state for it."""

    @abc.abstractmethod
    def compressed(self, ours: CompressedState, plain: optax.OptState, where: str) -> Any:
        """Convert between a state with codes in its slots and the same state without codes."""

    @abc.abstractmethod
    def split(self, ours: optax.OptState, inner: optax.OptState) -> Any:
        """Convert a state of `split_master_weights`, given its converted inner state."""

    def walk(self, ours: optax.OptState, plain: optax.OptState, where: str = "state") -> Any:
        """Return the converted state, from a pair of states; `where` names them in errors."""
        kind = type(ours).__name__
        record = record_of(ours)
        if record is not None:
            return self.moments(ours, plain, record, where)
        if isinstance(ours, CompressedState):
            return self.compressed(ours, plain, where)
        if kind == "SplitState":
            return self.split(ours, self.walk(ours.inner_state, plain, where))
        if not any(holds_ours(ours)):
            return self.same(ours, plain, where)
        if trees.is_named_tuple(ours) and ours._fields == getattr(plain, "_fields", None):
            return self._fields(ours, plain, where)
        if type(ours) is tuple and type(plain) is tuple and len(ours) <= len(plain):
            return self._parts(ours, plain, where)
        named = type(ours) in trees.DICTS and type(plain) is type(ours)
        if named and ours.keys() == plain.keys():
            made, _ = self.choose(ours, plain)  # its order
            return type(made)((k, self.walk(ours[k], plain[k], f"{where}[{k!r}]")) for k in made)
        raise _unlike(ours, plain, where)

    def same(self, ours: optax.OptState, plain: optax.OptState, where: str) -> Any:
        """The arrays of one side in the dtypes of the other; both have the same trees."""
        made, of = self.choose(ours, plain)
        wanted: Any = jax.tree.structure(made)
        if wanted != jax.tree.structure(of):
            raise _unlike(ours, plain, where)

        def leaf(like: jax.Array | jax.ShapeDtypeStruct, x: jax.Array) -> Any:
            if jnp.shape(like) != jnp.shape(x):
                raise ValueError(f"{where}: {_forms(ours)} here and {_forms(plain)} in optax's.")
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            return jnp.asarray(x, like.dtype)

        return jax.tree.map(leaf, made, of)

    def _fields(self, ours: optax.OptState, plain: optax.OptState, where: str) -> Any:
        made, of = self.choose(ours, plain)
        found = {}
        for name in ours._fields:
            if name in _BY_NAME:
                more = getattr(of, name)
                found[name] = {k: more.get(k, value) for k, value in getattr(made, name).items()}
            else:
                pair = getattr(ours, name), getattr(plain, name)
                found[name] = self.walk(*pair, f"{where}.{name}")
        return made._replace(**found)

    def _parts(self, ours: tuple[Any, ...], plain: tuple[Any, ...], where: str) -> tuple[Any, ...]:
        """The links of two chains; one of ours may stand for several of optax's."""
        more = len(plain) - len(ours)
        fused = [i for i, part in enumerate(ours) if record_of(part) is not None]
        if more and len(fused) != 1:
            raise _unlike(ours, plain, where)
        made: list[Any] = []
        rest = list(plain)
        for index, part in enumerate(ours):
            taken = more + 1 if more and index == fused[0] else 1
            several, rest = tuple(rest[:taken]), rest[taken:]
            beside = several if taken > 1 else several[0]
            found = self.walk(part, beside, f"{where}[{index}]")
            spliced = taken > 1 and self.choose(part, beside)[0] is beside
            made.extend(found) if spliced else made.append(found)
        return tuple(made)


def holds_ours(state: optax.OptState) -> Iterator[bool]:
    """True for each state inside a state that is one of ours or has one of ours inside."""
    if trees.is_named_tuple(state):
        wrapper = type(state).__name__ in ("CompressedState", "SplitState")
        yield wrapper or record_of(state) is not None
        for value in state:
            yield from holds_ours(value)
    elif isinstance(state, tuple | list):
        for part in state:
            yield from holds_ours(part)
    elif isinstance(state, dict):
        for part in state.values():
            yield from holds_ours(part)


Visit = Callable[[str, Any], Any]


def map_optax(
    plain: optax.OptState,
    fields: Mapping[str, str | tuple[str, ...]],
    of_field: Visit,
    of_count: Visit,
    where: str,
    constants: Sequence[str] = (),
) -> Any:
    """optax's state for one of ours, with moments and counts replaced by what two functions say.

    Args:
      plain: the state, of one optimizer or the links of a chain.
      fields: slot -> where it has it, as `OptimizerRecord.optax_fields`.
      of_field: (slot, tree) -> tree, for each of `fields`.
      of_count: (field, count) -> count.
      where: names the state in errors.
      constants: fields that stay, as `OptimizerRecord.optax_constants`.

    Raises:
      ValueError: for a state that has not each moment once, or has anything else.
    """
    slots = {
        field: slot
        for slot, given in fields.items()
        for field in ((given,) if isinstance(given, str) else given)
    }
    seen: list[str] = []
    other: list[str] = []

    def visit(node: optax.OptState, field: str, value: Any) -> Any:
        name = f"{type(node).__name__}.{field}"
        if name in slots:
            seen.append(name)
            return of_field(slots[name], value)
        if field == "count":
            return of_count(field, value)
        if name in constants:
            return value
        inside = jax.tree.leaves(value, is_leaf=_is_state)
        if inside and not any(map(_is_state, inside)):
            other.append(name)
        return value

    made = map_slots(visit, plain)
    if sorted(seen) != sorted(slots) or other:
        keeps = _by_state(slots) or "a count at most"
        has = ", ".join([*seen, *other]) or "nothing"
        raise ValueError(
            f"{where}: this optimizer goes on from {keeps}, and optax's state has {has} "
            f"(it is {kinds(plain)}). It is another optimizer's: give the state of the one that "
            "this is the low-memory form of."
        )
    return made


def _by_state(names: Iterable[str]) -> str:
    """Fields by their state: `mu, nu of one ScaleByAdamState`."""
    found: dict[str, list[str]] = {}
    for name in names:
        state, _, field = name.rpartition(".")
        found.setdefault(state, []).append(field)
    return " and ".join(f"{', '.join(fields)} of one {state}" for state, fields in found.items())


def _is_state(node: Any) -> bool:
    return trees.is_state(node) and bool(node._fields)


def check_paths(what: str, found: Iterable[str], wanted: Sequence[str], where: str) -> None:
    """Raises where optax's leaves of a slot are not those that have it here."""
    found = list(found)
    missing = [path for path in wanted if path not in found]
    extra = [path for path in found if path not in wanted]
    if missing or extra:
        raise ValueError(
            f"{where}: {what} has not the leaves of the parameters: missing {missing[:3]}, extra "
            f"{extra[:3]}. Give both optimizers the same parameters and masks."
        )


def kinds(state: optax.OptState) -> str:
    """The types of a state, such as `(EmptyState, FlashAdamState)`."""
    if type(state) is tuple:
        return f"({', '.join(map(kinds, state))})"
    if hasattr(state, "shape"):
        return f"{state.dtype}{list(state.shape)}"
    return type(state).__name__


def _forms(tree: object) -> str:
    return ", ".join(kinds(leaf) for leaf in jax.tree.leaves(tree)[:4])


def _unlike(ours: optax.OptState, plain: optax.OptState, where: str) -> ValueError:
    return ValueError(
        f"{where}: tx keeps {kinds(ours)} where the optax optimizer keeps {kinds(plain)}: they are "
        "not two forms of one optimizer. Build both of the same links, lowmem.chain(clip, "
        "flash_adamw(...)) and optax.chain(clip, adamw(...)), with the same wrappers."
    )


# ---- the slots of our states ---------------------------------------------------------------------

# one compiled call a leaf: eager, every operation of a codec would store its result
_encode = jax.jit(group_codec.encode, static_argnames=("codec", "group_size", "slot"))
_decode = jax.jit(group_codec.decode, static_argnames=("codec", "group_size", "length"))


class Decisions:
    """The decisions of an `init`, handed out in the order in which they were taken."""

    def __init__(self, decisions: list[context.Decision]):
        self._left: dict[tuple[str, str], list[context.Decision]] = collections.defaultdict(list)
        for decision in decisions:
            self._left[decision.path, decision.slot].append(decision)
        self._all = {(d.path, d.slot): d for d in decisions}
        self._outside: set[tuple[str, str]] = set()

    def take(self, path: str, slot: str) -> context.Decision:
        """The next one of a slot of a leaf."""
        return self._left[path, slot].pop(0)

    def take_own(self, path: str, slot: str) -> context.Decision:
        """`take` for a state that may be inside a `CompressedState`: f32 if that has the codes."""
        if (path, slot) in self._outside:
            decision = self._all[path, slot]
            return dataclasses.replace(decision, form=None, codec=None, reason="coded outside")
        return self.take(path, slot)

    def paths(self, slot: str) -> list[str]:
        """Return the leaves that have a slot."""
        return [path for path, name in self._all if name == slot]

    def values_shape(self, path: str, slot: str) -> tuple[int, ...]:
        """Return the shape of the values of a slot of a leaf."""
        return self._all[path, slot].values_shape

    def code_outside(self, state: CompressedState) -> None:
        """Note that the coded slots of this state are f32 to the states inside it."""

        def visit(slot: str, name: str, codes: Any) -> Any:
            del name
            self._outside.update((path, slot) for path, _ in trees.named_leaves(codes))
            return codes

        coded_slots(state, state.inner_state, visit)


def encode_leaf(
    decision: context.Decision, x: jax.Array, like: jax.Array, seed: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Slot and scales of f32 values, as the optimizer of a decision stores them.

    Args:
      decision: how.
      x: f32 values, one per element; the mean over each block is taken where a block shares one.
      like: the slot as it is stored.
      seed: of the state.
      count: steps so far; the next step has other random bits.
    """
    if decision.block is not None and x.shape != decision.values_shape:
        x = decision.block.mean(x)
    if decision.codec is None:
        return x.astype(like.dtype), jnp.zeros((), jnp.float32)
    key = random.leaf_key(seed, count, decision.path) if decision.stochastic else None
    flat = x.reshape(-1) if decision.block is not None else x  # the values of blocks lie in one row
    codes, scales = _encode(
        decision.codec, numerics.widen(flat), decision.group_size, key, slot=decision.slot
    )
    return codes.reshape(like.shape), scales


def decode_leaf(
    decision: context.Decision, stored: jax.Array, scales: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """f32 values of a stored slot, one per element of a leaf of this shape."""
    own = decision.values_shape
    if decision.codec is None:
        x = numerics.widen(stored)
    elif decision.block is None:
        x = _decode(decision.codec, stored, scales, decision.group_size, own[-1])
    else:  # the values of blocks lie in one row
        row, length = stored.reshape(-1), math.prod(own)
        x = _decode(decision.codec, row, scales, decision.group_size, length).reshape(own)
    if decision.block is not None and x.shape != shape:
        return decision.block.spread(x, shape)
    return x


def coded_slots(
    state: CompressedState, inner: optax.OptState, function: Callable[[str, str, Any], Any]
) -> Any:
    """`inner`, a state like `state.inner_state`, with its coded slots replaced.

    Args:
      state: says by its scales which slots are coded.
      inner: the state whose slots are visited.
      function: (slot, key of its scales, its value) -> another value.
    """
    seen: collections.Counter[str] = collections.Counter()

    def visit(node: optax.OptState, field: str, value: Any) -> Any:
        del node
        name = f"{field}_scale" + (f"_{seen[field]}" if seen[field] else "")
        if name not in state.scales:
            return value
        seen[field] += 1
        return function(field, name, value)

    return map_slots(visit, inner)


# ---- from optax ----------------------------------------------------------------------------------


def from_optax(
    tx: optax.GradientTransformation,
    optax_state: optax.OptState,
    params: optax.Params,
    dtype: WeightDtype = jnp.bfloat16,
    *,
    seed: ArrayLike | None = None,
    allow_rounding: bool = False,
) -> tuple[Any, Any]:
    """Goes on with an optax optimizer's run in low memory, from where it is.

    `tx` is the low-memory form of the optimizer: `flash_adamw` of `optax.adamw`,
    `lowmem.chain(clip, flash_adamw)` of `optax.chain(clip, adamw)`, `compress_state(adan)` of
    `adan`; inside the same wrappers (masked, partition, MultiSteps, inject_hyperparams).

    Args:
      tx: the optimizer that is to go on.
      optax_state: the state of the one that ran so far, in f32.
      params: its parameters.
      dtype: of the weights, as in `lowmem.init`.
      seed: of stochastic rounding, as in `lowmem.init`.
      allow_rounding: as in `lowmem.init`.

    Returns:
      (weights, state), as of `lowmem.init`, with moments, counts and other state taken over.

    Raises:
      ValueError: for the state of another optimizer or other parameters; it says what has no
        counterpart.

    Numerics: counts, slots that stay in f32 and 32-bit master weights are exact. Other slots are
    encoded as the optimizer encodes them, its stochastic rounding included, and off by at most
    their codec's `error_bound`; 24-bit master weights by 2^-16 of themselves. Adam-mini takes the
    mean over each block of v. A momentum without a count (`optax.sgd` at a constant rate) starts
    counting at 0, which is where a schedule then starts.

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
    weights, empty = init(tx, params, dtype, seed=seed, allow_rounding=allow_rounding)
    _, decisions = context.dry_run(tx, weights)
    return weights, _Encoder(decisions).walk(empty, optax_state)


class _Encoder(Converter):
    def choose(self, ours: optax.OptState, plain: optax.OptState) -> tuple[Any, Any]:
        return ours, plain

    def split(self, ours: optax.OptState, inner: optax.OptState) -> Any:
        return ours._replace(inner_state=inner)

    def moments(
        self, ours: optax.OptState, plain: optax.OptState, record: OptimizerRecord, where: str
    ) -> Any:
        values_of: dict[str, dict[str, Any]] = {slot: {} for slot in record.optax_fields}
        counts: list[Any] = []

        def read(slot: str, tree: optax.Params) -> None:
            values_of[slot].update(trees.named_leaves(tree))

        def count_of(field: str, count: jax.Array) -> None:
            del field
            counts.append(count)

        map_optax(plain, record.optax_fields, read, count_of, where, record.optax_constants)
        if len({int(count) for count in counts}) > 1:
            raise ValueError(
                f"{where}: optax's state counts {sorted({int(c) for c in counts})} steps, in its "
                "moments and its schedule, and this optimizer has one count for both. Set them "
                "equal, with optax.tree.set, to the one to go on from."
            )
        count = jnp.asarray(counts[0] if counts else 0, jnp.int32)
        fields: dict[str, Any] = {"count": count}
        for slot, values in values_of.items():
            like, old_scales = getattr(ours, slot), jax.tree.leaves(getattr(ours, f"{slot}_scale"))
            check_paths(slot, values, self.decisions.paths(slot), f"{where}.{slot}")
            pairs, (_, in_packs) = [], packs.layout(like)
            for (path, leaf), scale in zip(trees.named_leaves(like), old_scales, strict=True):
                if path not in values:  # no slot of this leaf
                    pairs.append((leaf, scale))
                    continue
                own = []
                for name in in_packs.get(path, [path]):
                    decision = self.decisions.take_own(name, slot)
                    if values[name].shape not in (decision.shape, decision.values_shape):
                        raise ValueError(
                            f"{where}.{slot}: '{name}' has shape {values[name].shape} in optax's "
                            f"state and {decision.shape} here: give the parameters of this very "
                            "run."
                        )
                    own.append((decision, values[name]))
                decision, x = own[0]
                if path in in_packs:  # stored alike, with the random bits of its name
                    x = packs.join([values for _, values in own])
                pairs.append(encode_leaf(decision, x, leaf, ours.seed, count))
            treedef = jax.tree.structure(like)
            fields[slot] = jax.tree.unflatten(treedef, [codes for codes, _ in pairs])
            scales: Any = jax.tree.structure(getattr(ours, f"{slot}_scale"))
            fields[f"{slot}_scale"] = scales.unflatten([scale for _, scale in pairs])
        return ours._replace(**fields)

    def compressed(self, ours: CompressedState, plain: optax.OptState, where: str) -> Any:
        def wide(slot: str, name: str, codes: optax.Params) -> Any:
            rows = zip(trees.named_leaves(codes), jax.tree.leaves(ours.scales[name]), strict=True)
            # with scales as it was before encoding, else unchanged
            leaves = [
                jax.ShapeDtypeStruct(self.decisions.values_shape(path, slot), jnp.float32)
                if jnp.ndim(scales)
                else leaf
                for (path, leaf), scales in rows
            ]
            return jax.tree.unflatten(jax.tree.structure(codes), leaves)

        self.decisions.code_outside(ours)
        inner = self.walk(coded_slots(ours, ours.inner_state, wide), plain, where)
        counts = optax.tree.get_all_with_path(plain, "count")
        count = jnp.asarray(counts[0][1] if counts else 0, jnp.int32)
        scales: dict[str, Any] = {}

        def encode(slot: str, name: str, values: optax.Params) -> Any:
            like = stored[name]
            pairs = [
                encode_leaf(self.decisions.take(path, slot), x, leaf, ours.seed, count)
                for (path, x), leaf in zip(
                    trees.named_leaves(values), jax.tree.leaves(like), strict=True
                )
            ]
            treedef = jax.tree.structure(values)
            kept: Any = jax.tree.structure(ours.scales[name])
            scales[name] = kept.unflatten([scale for _, scale in pairs])
            return jax.tree.unflatten(treedef, [codes for codes, _ in pairs])

        stored: dict[str, Any] = {}
        coded_slots(ours, ours.inner_state, lambda _, name, codes: stored.setdefault(name, codes))
        return CompressedState(count, ours.seed, coded_slots(ours, inner, encode), scales)


# ---- to optax ------------------------------------------------------------------------------------


def to_optax(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    plain: optax.GradientTransformation | None = None,
) -> tuple[Any, Any]:
    """Goes on with a run of ours in plain optax and f32, from where it is.

    Args:
      tx: the optimizer that ran so far.
      state: its state.
      params: its weights.
      plain: the optax optimizer that is to go on. None finds one for our optimizers,
        `lowmem.chain`, `compress_state` and `split_master_weights`: `optax.adamw` for
        `flash_adamw` (`optax.adam` where weight_decay is 0), and so on, with a count of its own
        where the learning rate depends on the step. Inside wrappers of optax's it cannot be told.

    Returns:
      (f32 parameters, state of `plain`).

    Raises:
      ValueError: where `plain` is needed, or keeps what `tx` has not.

    Numerics: exact: what codes and corrections stand for, in f32. v of Adam-mini is spread over its
    blocks, whose mean `from_optax` takes again.

    Memory: 12 bytes per parameter for AdamW beside what is there.

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
    found = _Decoder(decisions).walk(state, abstract)
    return masters, _filled(found, chosen, masters)


def _filled(
    state: optax.OptState, plain: optax.GradientTransformation, params: optax.Params
) -> Any:
    """A state whose abstract leaves, numbers that ours has not, are as `plain.init` makes them."""
    leaves, treedef = jax.tree.flatten(state)
    left = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if left:  # under a jit, where the moments, which are not asked for, are not made
        made = jax.jit(lambda p: [jax.tree.leaves(plain.init(p))[i] for i in left])(params)
        for index, leaf in zip(left, made, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(treedef, leaves)


class _Decoder(Converter):
    def choose(self, ours: optax.OptState, plain: optax.OptState) -> tuple[Any, Any]:
        return plain, ours

    def split(self, ours: optax.OptState, inner: optax.OptState) -> Any:
        return inner

    def moments(
        self, ours: optax.OptState, plain: optax.OptState, record: OptimizerRecord, where: str
    ) -> Any:
        found: dict[str, dict[str, Any]] = {slot: {} for slot in record.optax_fields}

        def field_of(slot: str, like: optax.Params) -> Any:
            wanted = dict(trees.named_leaves(like))
            found[slot].update(wanted)
            tree, scales_of = getattr(ours, slot), jax.tree.leaves(getattr(ours, f"{slot}_scale"))
            _, in_packs = packs.layout(tree)
            stored = []
            for (path, codes), scales in zip(trees.named_leaves(tree), scales_of, strict=True):
                if path not in wanted:
                    stored.append(codes)
                    continue
                decision, shape = self.decisions.take_own(path, slot), wanted[path].shape
                if path in in_packs:
                    shape = (sum(math.prod(wanted[name].shape) for name in in_packs[path]),)
                    decision = dataclasses.replace(decision, shape=shape)
                stored.append(decode_leaf(decision, codes, scales, shape))
            values = packs.unpacked(array_metadata.like(tree, stored), wanted)
            leaves = [values[path].astype(leaf.dtype) for path, leaf in wanted.items()]
            return jax.tree.unflatten(jax.tree.structure(like), leaves)

        made = map_optax(
            plain, record.optax_fields, field_of, lambda *_: jnp.asarray(ours.count), where,
            record.optax_constants,
        )  # fmt: skip
        for slot, wanted in found.items():
            check_paths(slot, wanted, self.decisions.paths(slot), f"{where}.{slot}")
        return made

    def compressed(self, ours: CompressedState, plain: optax.OptState, where: str) -> Any:
        def decode(slot: str, name: str, codes: optax.Params) -> Any:
            rows = zip(trees.named_leaves(codes), jax.tree.leaves(ours.scales[name]), strict=True)
            values = []
            for (path, leaf), scales in rows:
                decision = self.decisions.take(path, slot)
                values.append(decode_leaf(decision, leaf, scales, decision.values_shape))
            return jax.tree.unflatten(jax.tree.structure(codes), values)

        self.decisions.code_outside(ours)
        return self.walk(coded_slots(ours, ours.inner_state, decode), plain, where)
