"""Scalars per leaf: RMS_t of gradients, norms of the master weights."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import numerics, patterns, trees
from optax_lowmem._src.arrays.codecs import GroupCodec, StoredSlot, decode_array
from optax_lowmem._src.arrays.hyperparameters import as_f32, check_decay, check_range, decay_at
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim.clipping import rms_of_ratio
from optax_lowmem._src.optim.step.masters import master_params
from optax_lowmem._src.optim.step.storage import Storage, codec_of, completed


def _chosen(named: Sequence[tuple[str, PyTree]], leaves: Sequence[str]) -> dict[str, PyTree]:
    """Return the leaves that match any of some glob patterns, each of which must match one."""
    chosen = patterns.matching("leaves", leaves, [path for path, _ in named])
    return {path: leaf for path, leaf in named if path in chosen}


_LEAST_EPS = 1e-18

Moment = tuple[jax.Array, PyTree]  # `nu` of a leaf (codes or values), and its step count or None


def rms(
    gradients: optax.Updates,
    state: optax.OptState,
    *,
    b2: float | jax.Array | Callable[[jax.Array], jax.Array | float] = 0.999,
    eps: float = 1e-8,
    leaves: Sequence[str] = ("*",),
    sample: int | None = None,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> dict[str, jax.Array]:
    r"""Return RMS_t of each tensor: about 1 if the second moment is up to date, else far over 1.

    .. math:: \mathrm{RMS}_t = \sqrt{\mathbb{E}\left[g_t^2 / \max(u_t, \epsilon^2)\right]}

    u_t is the debiased average of squared gradients including g_t: the u_t of Algorithm 2 with the
    maximum of appendix F.2. The mean is over one tensor (section 3.4). RMS_t is at most
    1 / sqrt(1 - b2), 31.6 at 0.999.

    Args:
      gradients: the gradients passed to the optimizer, with the parameters' structure; after
        clipping, if it clips before Adam.
      state: the state *after* that step, of our optimizers with a second moment, of
        `compress_state`, or of an optax transformation with a field `nu`, inside any wrapper.
      b2: the optimizer's b2: a number, an array or a schedule. The state does not store it.
      eps: the optimizer's eps, at least 1e-18 (1e-6 in the paper).
      leaves: glob patterns on leaf paths; each must match a leaf with a second moment. The paper
        needs only the patch embedding.
      sample: number of elements to read of a leaf, approximately, as every k-th slice of the first
        axis; None reads all.
      storage: the optimizer's storage, for the codec of `nu` and the group size; for
        `compress_state`, `Storage(nu=codec, group_size=...)`.

    Returns:
      Leaf path -> f32 scalar, for a logger or a `SpikeDetector`. NaN for a NaN gradient, and for a
      state before its first step.

    Raises:
      TypeError: for a string as `leaves`.
      ValueError: for a state without second moments, a pattern that matches no leaf, a leaf with
        two second moments or one of another shape, or a `storage` that does not match it.

    Cost: reads the gradient and 1.13 bytes of state per element of the selected leaves: 3.1 bytes
    with a bf16 gradient, while the step moves 12 to 18. A patch embedding, or a token embedding
    with a `sample` of 2^18, costs well under 1 % of the step of a model of 100M parameters; all
    leaves cost more. Call it under jit, where it fuses to one reduction without an f32 copy.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3, b2=0.99)
      >>> params = {"embed": jnp.ones((64, 64)), "head": jnp.ones((64, 64))}
      >>> state = tx.init(params)
      >>> for size in (0.01, 0.01, 0.01, 1.0):  # the learning signal changes
      ...     grads = {path: jnp.full((64, 64), size) for path in params}
      ...     _, state = tx.update(grads, state, params)
      >>> found = lowmem.diagnostics.rms(grads, state, b2=0.99, leaves=("embed",))
      >>> {f"rms/{path}": round(float(value), 2) for path, value in found.items()}
      {'rms/embed': 1.98}
    """
    check_decay("b2", b2)
    check_range("eps", eps, 0.0)
    if isinstance(eps, int | float) and eps < _LEAST_EPS:
        raise ValueError(
            f"eps must be at least {_LEAST_EPS:g}: its square must not underflow in f32"
        )
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int)):
        raise TypeError(f"sample must be a number of elements, or None, got {sample!r}")
    if sample is not None and sample < 1:
        raise ValueError(f"sample must be a number of elements, at least 1, got {sample!r}")
    moments, scales = _moments(state), _scales(state)
    named = [(path, g) for path, g in trees.named_leaves(gradients) if path in moments and g.size]
    storage = completed(storage)
    codec, size = codec_of("nu", storage.nu, signed=False), storage.group_size
    assert size is not None
    results = {}
    for path, g in _chosen(named, leaves).items():
        nu, count = moments[path]
        nu, stored = _checked(path, g, nu, scales.get(path), codec, size)
        g, nu, stored = _sampled(sample, g, nu, stored)
        if stored is not None and codec is not None:
            nu = decode_array(codec, nu, stored, size, g.shape[-1])
        u = numerics.widen(nu)
        if count is not None:
            u /= decay_at("b2", b2, count - 1).correction
        results[path] = rms_of_ratio(numerics.widen(g), u, as_f32("eps", eps))
    return results


def _moments(state: optax.OptState) -> dict[str, Moment]:
    """Return leaf path -> second moment, from every NamedTuple with a `nu` inside a state."""
    moments: dict[str, Moment] = {}
    for node in trees.states_with(state, "nu"):
        count = node.count if "count" in node._fields else None
        for path, nu in trees.named_leaves(node.nu):
            if path in moments:
                raise ValueError(
                    f"leaf '{path}' has two second moments in this state: pass the part of the "
                    "state that belongs to one of them."
                )
            moments[path] = (nu, count)
    if not moments:
        raise ValueError(
            "the state has no second moment `nu`: RMS_t exists for Adam and its variants, not for "
            "flash_lion and flash_sgd."
        )
    return moments


def _scales(state: optax.OptState) -> dict[str, jax.Array]:
    """Return leaf path -> scales of the codes of `nu`; compress_state numbers its scale trees."""
    return {
        path: scales
        for slot, tree in trees.state_fields(state)
        if slot.startswith("nu_scale")
        for path, scales in trees.named_leaves(tree)
        if scales.ndim
    }


def _checked(
    path: str,
    g: jax.Array,
    nu: jax.Array,
    scales: jax.Array | None,
    codec: GroupCodec | None,
    size: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Return `nu` and its scales (None if it is not compressed), checked against its storage."""
    is_code = nu.dtype in (jnp.int8, jnp.uint8)
    expected = codec.storage(g.shape, size) if codec is not None and is_code and g.ndim else None
    if nu.shape not in (g.shape, expected and expected.codes.shape):
        raise ValueError(
            f"the second moment of '{path}' has shape {nu.shape}, its gradient {g.shape}: pass the "
            "gradients and the state of one step, and leave out shared moments with `leaves`."
        )
    if not is_code:
        return nu, None
    kept = None if scales is None else StoredSlot(nu, scales)
    if kept is None or expected is None or not kept.is_like(expected):
        raise ValueError(
            f"the second moment of '{path}' is stored as {kept.text if kept else nu.dtype}, but "
            f"{codec.name if codec else 'storage.nu=None'} in groups of {size} would be "
            f"{expected.text if expected else 'f32'}. Pass the optimizer's storage=."
        )
    return nu, scales


def _sampled(sample: int | None, *arrays: jax.Array | None) -> list[PyTree]:
    """Return every k-th slice of the arrays' common first axis."""
    first = arrays[0]
    # slices of a 1-D array would split groups
    if sample is None or first is None or first.ndim < 2:
        return list(arrays)
    every = min(-(-first.size // sample), first.shape[0])
    return [None if a is None else a[::every] for a in arrays]


def norms(
    params: optax.Params, state: optax.OptState | None = None, *, leaves: Sequence[str] = ("*",)
) -> dict[str, PyTree]:
    r"""Return the norm :math:`\lVert\theta\rVert_2` of each leaf's master weight, in f32.

    Args:
      params: the weights.
      state: the optimizer's state, for the corrections; None uses the weights alone.
      leaves: glob patterns on leaf paths; each must match some leaf.

    Returns:
      Leaf path -> f32 scalar.

    Raises:
      TypeError: for a string as `leaves`.
      ValueError: for a pattern that matches no leaf, or a leaf with two corrections.

    Cost: reads 3 bytes per bf16 weight of the selected leaves (2, and 1 for the correction), or 4.
    Under jit, no f32 copy is stored.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"block": {"w": jnp.full((64, 64), 0.5), "b": jnp.zeros(64)}}
      >>> weights, state = lowmem.init(lowmem.flash_adamw(1e-3), params)
      >>> now = lowmem.diagnostics.norms(weights, state, leaves=("*/w",))
      >>> {f"norm/{path}": float(norm) for path, norm in now.items()}
      {'norm/block/w': 32.0}
    """
    weights = _chosen(trees.named_leaves(params), leaves)
    masters = master_params(weights, () if state is None else state)
    return {path: jnp.sqrt(jnp.sum(jnp.square(masters[path]))) for path in weights}
