"""Context passed through optax's wrappers: the decisions of an `init` and its master weights.

optax wrappers hide the transformations inside them, and their states hold arrays only. While a tree
of transformations is initialised, ours report their decisions here (for `explain` and the memory
report) and read the master weights and the seed passed to `lowmem.init`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.codecs import GroupCodec
from optax_lowmem._src.arrays.typing import T


@dataclasses.dataclass(frozen=True)
class Decision:
    """The stored form of one slot of one parameter, and the reason."""

    path: str  # path of the leaf, as from `jax.tree_util.keystr(..., simple=True, separator="/")`
    slot: str  # `mu`, `nu`, ..., `correction`, or `step` for the implementation of the leaf's step
    # name of the codec or the split, None if the slot is neither compressed nor split; for a step
    # that `explain` describes, one of `IMPLEMENTATIONS`
    form: str | None
    reason: str  # one clause, for display
    group_size: int | None = None  # if the slot is compressed
    codec: GroupCodec | None = None  # if the slot is compressed
    stochastic: bool = False  # whether its codes or master weights are rounded stochastically
    block: Block | None = None  # the `Block` whose elements share a value, if any
    # shape of the parameter, or of the slot's values if it differs without a block
    shape: tuple[int, ...] = ()
    # for a step, a function that returns form and reason; only `explain` calls it
    choose: Callable[[], tuple[str, str]] | None = None
    # `Policy.exclude` of the policy that decided about the slot
    patterns: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the slot's values: one per element, or one per block."""
        return self.shape if self.block is None else self.block.mean_shape(self.shape)


@dataclasses.dataclass
class Masters:
    """Values that `lowmem.init` passes to the inner `init`, and values that it gets back."""

    # corrections by leaf path, for splits
    corrections: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # paths of the corrections that splits have read
    consumed: list[str] = dataclasses.field(default_factory=list)
    seed: ArrayLike | None = None  # the seed of all hashes
    # f32 parameters by path, for transformations that store them
    originals: dict[str, jax.Array] | None = None
    # initial weights with noise, by path, from transformations that add noise
    sampled: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Context:
    """Values that an `init`, or a trial update, reports through the closures of optax's wrappers.

    A field is None outside of the context managers that set it (`recording`, `emitting`, ...).
    """

    decisions: list[Decision] | None = None  # how each slot is stored
    masters: Masters | None = None  # values from `lowmem.init`, and values for it
    # updates of optimizers that split or round weights, by leaf path
    emitted: dict[str, jax.Array] | None = None


# an optax state holds arrays only, so what an `init` decided has no other way out of its wrappers,
# which are closures: https://github.com/google-deepmind/optax/issues/1
_context: ContextVar[Context] = ContextVar("context", default=Context())  # noqa: B039 (frozen)


@contextlib.contextmanager
def _bound(field: str, value: T) -> Iterator[T]:
    """Set one field of the `Context`."""
    change: dict[str, Any] = {field: value}
    token = _context.set(dataclasses.replace(_context.get(), **change))
    try:
        yield value
    finally:
        _context.reset(token)


def recording() -> contextlib.AbstractContextManager[list[Decision]]:
    """Collect the decisions of every `init` that runs in this context."""
    return _bound("decisions", [])


def absorbing() -> contextlib.AbstractContextManager[list[Decision]]:
    """Hide decisions in this context from an enclosing `recording`; yield them if there is one."""
    return recording() if is_recording() else contextlib.nullcontext([])


def current() -> Context:
    """Return the `Context` that the enclosing context managers have set."""
    return _context.get()


def is_recording() -> bool:
    """Return whether a `recording` is active, in which an `init` need not inform the user."""
    return _context.get().decisions is not None


def emitting() -> contextlib.AbstractContextManager[dict[str, jax.Array]]:
    """Collect the updates that split optimizers emit in this context, by leaf path."""
    return _bound("emitted", {})


def providing(masters: Masters) -> contextlib.AbstractContextManager[Masters]:
    """Pass corrections and a seed to every `init` that runs in this context."""
    return _bound("masters", masters)


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
    log = _context.get().decisions
    if log is not None:
        log.append(decision)


def emit(path: str, update: jax.Array) -> None:
    """Report to an enclosing `emitting` the update of a leaf whose weight is split or rounded."""
    log = _context.get().emitted
    if log is not None:
        log[path] = update


def provided_correction(path: str) -> jax.Array | None:
    """Return the correction that `lowmem.init` provides for a leaf, or None."""
    masters = _context.get().masters
    if masters is None or path not in masters.corrections:
        return None
    if path in masters.consumed:
        raise ValueError(
            f"leaf '{path}' would get two corrections: two optimizers split its master weight, or "
            "two leaves have this path. Keep one split, and give the other optimizer "
            "storage=Storage(master_weight_bits=None); rename a leaf whose key has a '/'."
        )
    masters.consumed.append(path)
    return masters.corrections[path]


def provided_original(path: str) -> jax.Array | None:
    """Return the f32 parameter passed to `lowmem.init`, or None."""
    masters = _context.get().masters
    return None if masters is None or masters.originals is None else masters.originals.get(path)


def report_sampled(path: str, weight: jax.Array) -> None:
    """Pass the initial weight with noise to `lowmem.init`."""
    masters = _context.get().masters
    if masters is not None:
        masters.sampled[path] = weight


def provided_seed(default: int) -> jax.Array:
    """Return the seed passed to `lowmem.init`, else `default`, as uint32 []."""
    masters = _context.get().masters
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
