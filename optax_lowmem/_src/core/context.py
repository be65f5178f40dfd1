"""Context that an `init` reads, and reports to, beyond its arguments and result.

optax wrappers hide the transformations inside them, and their states hold arrays only. While a tree
of transformations is initialised, ours report their decisions here (for `explain` and the memory
report) and pick up the master weights and the seed that `lowmem.init` was given.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.core import trees
from optax_lowmem._src.core.placement import Placement
from optax_lowmem._src.core.typing import T


@dataclasses.dataclass(frozen=True)
class Decision:
    """Storage of one slot of one leaf, with the reason.

    Attributes:
      path: the leaf, as in `jax.tree_util.keystr(..., simple=True, separator="/")`.
      slot: `mu`, `nu`, ..., `correction`, or `step` for the implementation of the leaf's step.
      form: the name of the codec or the split, None where the slot is not compressed or not split;
        for a step `pallas`, `triton` or `xla`.
      reason: one clause, for display.
      group_size: neighbours that share a scale, where the slot is compressed.
      codec: the codec, where the slot is compressed.
      stochastic: whether its codes, or master weights, are rounded stochastically.
      block: the `Block` whose elements share a value, where they do.
      shape: of the parameter; of the values of a slot, where they have another and no block.
    """

    path: str
    slot: str
    form: str | None
    reason: str
    group_size: int | None = None
    codec: Any = None
    stochastic: bool = False
    block: Any = None
    shape: tuple[int, ...] = ()

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the slot's values: one per element, or one per block."""
        return self.shape if self.block is None else self.block.mean_shape(self.shape)


@dataclasses.dataclass
class Masters:
    """Values that `lowmem.init` passes to the `init` inside it, and those that it gets back.

    Attributes:
      corrections: corrections by leaf path, for splits to take.
      taken: paths of the corrections that a split took.
      seed: the seed of all hashes.
      originals: f32 parameters by path, for transformations that keep them.
      sampled: the first weights that the loss sees, by path, from transformations that add noise.
    """

    corrections: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    taken: list[str] = dataclasses.field(default_factory=list)
    seed: ArrayLike | None = None
    originals: dict[str, jax.Array] | None = None
    sampled: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


_decisions: ContextVar[list[Decision] | None] = ContextVar("decisions", default=None)
_policies: ContextVar[list[Any] | None] = ContextVar("policies", default=None)
_emitted: ContextVar[dict[str, jax.Array] | None] = ContextVar("emitted", default=None)
_implementation: ContextVar[str | None] = ContextVar("implementation", default=None)
_placements: ContextVar[Mapping[str, Placement] | None] = ContextVar("placements", default=None)
_masters: ContextVar[Masters | None] = ContextVar("masters", default=None)


@contextlib.contextmanager
def _bound(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def recording() -> contextlib.AbstractContextManager[list[Decision]]:
    """Collects the decisions of every `init` that runs inside."""
    return _bound(_decisions, [])


@contextlib.contextmanager
def absorbing() -> Iterator[list[Decision]]:
    """Keeps the decisions taken inside from an enclosing `recording`; none without one."""
    if _decisions.get() is None:
        yield []
        return
    with recording() as decisions:
        yield decisions


def noting_policies() -> contextlib.AbstractContextManager[list[Any]]:
    """Collects the policies that every `init` inside asks."""
    return _bound(_policies, [])


def note_policy(policy: Any) -> None:
    """Reports a policy that is asked to an enclosing `noting_policies`."""
    log = _policies.get()
    if log is not None and policy not in log:
        log.append(policy)


def is_observed() -> bool:
    """Return whether a `recording`, `noting_policies` or `providing` context is active."""
    variables = _decisions, _policies, _masters
    return any(variable.get() is not None for variable in variables)


def is_recording() -> bool:
    """Return whether a `recording` is active: what an `init` inside says is not for users."""
    return _decisions.get() is not None


def emitting() -> contextlib.AbstractContextManager[dict[str, jax.Array]]:
    """Collects the updates that split optimizers emit inside, by leaf path."""
    return _bound(_emitted, {})


def providing(masters: Masters) -> contextlib.AbstractContextManager[Masters]:
    """Hands corrections and a seed to every `init` that runs inside."""
    return _bound(_masters, masters)


def implementing(name: str | None) -> contextlib.AbstractContextManager[str | None]:
    """Steps that are traced inside use this implementation."""
    return _bound(_implementation, name)


def implementation() -> str | None:
    """The implementation that an enclosing `implementing` asks for."""
    return _implementation.get()


def placing(
    placements: Mapping[str, Placement] | None,
) -> contextlib.AbstractContextManager[Mapping[str, Placement] | None]:
    """Steps that are traced inside find the leaves on a mesh, by path."""
    return _bound(_placements, placements)


def is_placing() -> bool:
    """Return whether an enclosing `placing` context has the sharding of any leaf."""
    return bool(_placements.get())


def placement(path: str) -> Placement | None:
    """Return the `Placement` of a leaf in the enclosing `placing` context, or None."""
    return (_placements.get() or {}).get(path)


def dry_run(
    tx: optax.GradientTransformation, params: optax.Params
) -> tuple[optax.OptState, list[Decision]]:
    """The abstract state of `tx.init`, and the decisions it takes; nothing is allocated."""
    trees.check_transformation(tx, "pass (tx, params), in this order.", params)
    with recording() as decisions:
        # a fresh function each time: eval_shape does not run one again that it has traced before
        state = jax.eval_shape(lambda p: tx.init(p), params)
    return state, decisions


def record(decision: Decision) -> None:
    """Reports a decision to an enclosing `recording`."""
    log = _decisions.get()
    if log is not None:
        log.append(decision)


def is_emitting() -> bool:
    """Return whether an enclosing `emitting` context collects updates."""
    return _emitted.get() is not None


def emit(path: str, update: jax.Array) -> None:
    """Reports the update of a leaf that is split, or rounded itself, to an enclosing `emitting`."""
    log = _emitted.get()
    if log is not None:
        log[path] = update


def provided_correction(path: str) -> jax.Array | None:
    """The correction that `lowmem.init` has for a leaf."""
    masters = _masters.get()
    if masters is None or path not in masters.corrections:
        return None
    if path in masters.taken:
        raise ValueError(
            f"leaf '{path}' would get two corrections: two optimizers split its master weight, or "
            "two leaves have this path. Keep one split, and give the other optimizer "
            "storage=Storage(master_weight_bits=None); rename a leaf whose key has a '/'."
        )
    masters.taken.append(path)
    return masters.corrections[path]


@contextlib.contextmanager
def joining(
    packs: Mapping[str, Sequence[str]], join: Callable[[list[jax.Array]], jax.Array]
) -> Iterator[None]:
    """Hands an `init` inside, of a tree with packs, the joined corrections of their leaves.

    Args:
      packs: the name of each, and of its leaves.
      join: what makes one array of those of the leaves.
    """
    masters = _masters.get()
    if masters is None:
        yield
        return
    corrections, taken = dict(masters.corrections), list(masters.taken)
    for name, leaves in packs.items():
        own = [provided_correction(leaf) for leaf in leaves]
        for leaf in leaves:
            corrections.pop(leaf, None)
        kept = [correction for correction in own if correction is not None]
        if len(kept) == len(leaves):
            corrections[name] = join(kept)
    with providing(dataclasses.replace(masters, corrections=corrections, taken=taken)) as inner:
        yield
    masters.taken += [path for path in inner.taken if path not in masters.taken]


def provided_original(path: str) -> jax.Array | None:
    """The f32 parameter that `lowmem.init` was given."""
    masters = _masters.get()
    return None if masters is None or masters.originals is None else masters.originals.get(path)


def hand_sampled(path: str, weight: jax.Array) -> None:
    """Gives `lowmem.init` the weight that the loss shall see first."""
    masters = _masters.get()
    if masters is not None:
        masters.sampled[path] = weight


def provided_seed(default: int) -> jax.Array:
    """The seed that `lowmem.init` was given, else `default`, as uint32 []."""
    masters = _masters.get()
    seed = default if masters is None or masters.seed is None else masters.seed
    if isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**31) <= seed < 2**32:
            raise ValueError(f"seed must be a number of 32 bits, got {seed}")
        return jnp.asarray(seed % 2**32, jnp.uint32)
    seed = jnp.asarray(seed)
    if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed must be an integer, got {seed.dtype}{list(seed.shape)}; of a key make one with "
            "jax.random.bits(key)"
        )
    return seed.astype(jnp.uint32)
