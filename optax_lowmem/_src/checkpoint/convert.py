"""A state of ours and one of optax, walked beside each other, and the slots of ours on the way."""

import abc
import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.checkpoint.counterparts import record_of
from optax_lowmem._src.codecs import group_codec
from optax_lowmem._src.core import numerics, random, scope, trees
from optax_lowmem._src.optimizers.record import OptimizerRecord
from optax_lowmem._src.update.slots import map_slots
from optax_lowmem._src.wrappers.compress import CompressedState

# numbers that inject_hyperparams keeps by name: those of one side may be more
_BY_NAME = ("hyperparams", "hyperparams_states")


class Converter(abc.ABC):
    """Makes one side's state of the other's.

    Args:
      decisions: those of the `init` of our side.
    """

    def __init__(self, decisions: list[scope.Decision]):
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
    fields: Mapping[str, str],
    of_field: Visit,
    of_count: Visit,
    where: str,
) -> Any:
    """optax's state for one of ours, with moments and counts replaced by what two functions say.

    Args:
      plain: the state, of one optimizer or the links of a chain.
      fields: slot -> where it has it, as `OptimizerRecord.optax_fields`.
      of_field: (slot, tree) -> tree, for each of `fields`.
      of_count: (field, count) -> count.
      where: names the state in errors.

    Raises:
      ValueError: for a state that has not each moment once, or has anything else.
    """
    slots = {field: slot for slot, field in fields.items()}
    seen: list[str] = []
    other: list[str] = []

    def visit(node: optax.OptState, field: str, value: Any) -> Any:
        name = f"{type(node).__name__}.{field}"
        if name in slots:
            seen.append(name)
            return of_field(slots[name], value)
        if field == "count":
            return of_count(field, value)
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


def by_path(what: str, tree: object, wanted: Sequence[str], where: str) -> dict[str, Any]:
    """The leaves of a tree by path; raises where one is missing."""
    found = dict(trees.named_leaves(tree))
    missing = [path for path in wanted if path not in found]
    extra = [path for path in found if path not in wanted]
    if missing or extra:
        raise ValueError(
            f"{where}: {what} has not the leaves of the parameters: missing {missing[:3]}, extra "
            f"{extra[:3]}. Give both optimizers the same parameters and masks."
        )
    return found


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

    def __init__(self, decisions: list[scope.Decision]):
        self._left: dict[tuple[str, str], list[scope.Decision]] = collections.defaultdict(list)
        for decision in decisions:
            self._left[decision.path, decision.slot].append(decision)
        self._all = {(d.path, d.slot): d for d in decisions}
        self._outside: set[tuple[str, str]] = set()

    def take(self, path: str, slot: str) -> scope.Decision:
        """The next one of a slot of a leaf."""
        return self._left[path, slot].pop(0)

    def take_own(self, path: str, slot: str) -> scope.Decision:
        """`take` for a state that may be inside a `CompressedState`: f32 if that has the codes."""
        if (path, slot) in self._outside:
            decision = self._all[path, slot]
            return dataclasses.replace(decision, form=None, codec=None, reason="coded outside")
        return self.take(path, slot)

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
    decision: scope.Decision, x: jax.Array, like: jax.Array, seed: jax.Array, count: jax.Array
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
    decision: scope.Decision, stored: jax.Array, scales: jax.Array, shape: tuple[int, ...]
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
