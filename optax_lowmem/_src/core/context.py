"""Context variables that an `init` reads and reports to, beside its arguments and result.

optax wrappers hide the transformations inside them, and their states hold arrays only. While a tree
of transformations is initialised, ours report their decisions here (for `explain` and the memory
report) and read the master weights and the seed passed to `lowmem.init`.
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
    """How one slot of one leaf is stored, and why.

    Attributes:
      path: path of the leaf, as from `jax.tree_util.keystr(..., simple=True, separator="/")`.
      slot: `mu`, `nu`, ..., `correction`, or `step` for the implementation of the leaf's step.
      form: name of the codec or the split, None if the slot is neither compressed nor split; for a
        step `pallas`, `triton` or `xla`.
      reason: one clause, for display.
      group_size: number of neighbours that share a scale, if the slot is compressed.
      codec: the codec, if the slot is compressed.
      stochastic: whether its codes or master weights are rounded stochastically.
      block: the `Block` whose elements share a value, if any.
      shape: shape of the parameter, or of the slot's values if it differs without a block.
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
    """Values that `lowmem.init` passes to the inner `init`, and values that it gets back.

    Attributes:
      corrections: corrections by leaf path, which splits consume.
      taken: paths of the consumed corrections.
      seed: the seed of all hashes.
      originals: f32 parameters by path, for transformations that store them.
      sampled: initial weights with noise, by path, from transformations that add noise.
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
    """Collect the decisions of every `init` that runs in this context."""
    return _bound(_decisions, [])


@contextlib.contextmanager
def absorbing() -> Iterator[list[Decision]]:
    """Hide decisions in this context from an enclosing `recording`; yield them if there is one."""
    if _decisions.get() is None:
        yield []
        return
    with recording() as decisions:
        yield decisions


def noting_policies() -> contextlib.AbstractContextManager[list[Any]]:
    """Collect the policies that every `init` in this context consults."""
    return _bound(_policies, [])


def note_policy(policy: Any) -> None:
    """Report a consulted policy to an enclosing `noting_policies`."""
    log = _policies.get()
    if log is not None and policy not in log:
        log.append(policy)


def is_observed() -> bool:
    """Return whether a `recording`, `noting_policies` or `providing` context is active."""
    variables = _decisions, _policies, _masters
    return any(variable.get() is not None for variable in variables)


def is_recording() -> bool:
    """Return whether a `recording` is active, in which an `init` need not inform the user."""
    return _decisions.get() is not None


def emitting() -> contextlib.AbstractContextManager[dict[str, jax.Array]]:
    """Collect the updates that split optimizers emit in this context, by leaf path."""
    return _bound(_emitted, {})


def providing(masters: Masters) -> contextlib.AbstractContextManager[Masters]:
    """Pass corrections and a seed to every `init` that runs in this context."""
    return _bound(_masters, masters)


def implementing(name: str | None) -> contextlib.AbstractContextManager[str | None]:
    """Make steps that are traced in this context use this implementation."""
    return _bound(_implementation, name)


def implementation() -> str | None:
    """Return the implementation set by an enclosing `implementing`, or None."""
    return _implementation.get()


def placing(
    placements: Mapping[str, Placement] | None,
) -> contextlib.AbstractContextManager[Mapping[str, Placement] | None]:
    """Set the placement of each leaf, by path, for steps that are traced in this context."""
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
    """Return the abstract state of `tx.init` and its decisions, without allocating anything."""
    trees.check_transformation(tx, "pass (tx, params), in this order.", params)
    with recording() as decisions:
        # a new function for each call: eval_shape does not trace the same one again
        state = jax.eval_shape(lambda p: tx.init(p), params)
    return state, decisions


def record(decision: Decision) -> None:
    """Report a decision to an enclosing `recording`."""
    log = _decisions.get()
    if log is not None:
        log.append(decision)


def is_emitting() -> bool:
    """Return whether an enclosing `emitting` context collects updates."""
    return _emitted.get() is not None


def emit(path: str, update: jax.Array) -> None:
    """Report the update of a leaf that its optimizer splits or rounds to an `emitting` context."""
    log = _emitted.get()
    if log is not None:
        log[path] = update


def provided_correction(path: str) -> jax.Array | None:
    """Return the correction that `lowmem.init` provides for a leaf, or None."""
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
    """Pass the joined corrections of each pack's leaves to an `init` of a tree with packs.

    Args:
      packs: names of the leaves of each pack, by the pack's name.
      join: joins the leaves' arrays into one.
    """
    masters = _masters.get()
    if masters is None:
        yield
        return
    corrections, selected = dict(masters.corrections), list(masters.taken)
    for name, leaves in packs.items():
        own = [provided_correction(leaf) for leaf in leaves]
        for leaf in leaves:
            corrections.pop(leaf, None)
        kept = [correction for correction in own if correction is not None]
        if len(kept) == len(leaves):
            corrections[name] = join(kept)
    with providing(dataclasses.replace(masters, corrections=corrections, taken=selected)) as inner:
        yield
    masters.taken += [path for path in inner.taken if path not in masters.taken]


def provided_original(path: str) -> jax.Array | None:
    """Return the f32 parameter passed to `lowmem.init`, or None."""
    masters = _masters.get()
    return None if masters is None or masters.originals is None else masters.originals.get(path)


def hand_sampled(path: str, weight: jax.Array) -> None:
    """Pass the initial weight with noise to `lowmem.init`."""
    masters = _masters.get()
    if masters is not None:
        masters.sampled[path] = weight


def provided_seed(default: int) -> jax.Array:
    """Return the seed passed to `lowmem.init`, else `default`, as uint32 []."""
    masters = _masters.get()
    seed = default if masters is None or masters.seed is None else masters.seed
    if isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**31) <= seed < 2**32:
            raise ValueError(f"seed must be a number of 32 bits, got {seed}")
        return jnp.asarray(seed % 2**32, jnp.uint32)
    seed = jnp.asarray(seed)
    if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed must be an integer, got {seed.dtype}{list(seed.shape)}; convert a key with "
            "jax.random.bits(key)"
        )
    return seed.astype(jnp.uint32)
