"""Effects of low-precision state on training: saturated, zero and floored codes, stalls."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import groups, numerics, trees
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.masters import master_params


@dataclasses.dataclass(frozen=True)
class CodeShares:
    """Shares of saturated, zero and floored codes in one slot of one leaf.

    Attributes:
      saturated: share at the leaf's largest code (1/32 is normal: the maximum of each group of 32).
      zero: share at code 0.
      floored: share of unsigned codes at 1, the floor for small second moments.
    """

    saturated: jax.Array
    zero: jax.Array
    floored: jax.Array


jax.tree_util.register_dataclass(CodeShares, ["saturated", "zero", "floored"], [])


def code_shares(
    state: optax.OptState,
    tx: optax.GradientTransformation | None = None,
    params: optax.Params | None = None,
) -> dict[str, dict[str, CodeShares]]:
    """Return the shares of saturated, zero and floored codes: slot -> leaf path -> `CodeShares`.

    Works under jit. Slots of `codecs.affine` and `codecs.expanded`, whose groups have different
    grids, are omitted.

    Args:
      state: the state of any optimizer of this library, wrapped or not.
      tx: the optimizer, to find slots with several codes per byte (`codecs.linear4`); without it,
        each byte is one code.
      params: its parameters, or their `jax.eval_shape`; required with `tx`.

    Raises:
      ValueError: for 8-bit arrays without one scale per group on the last axis, as this library's
        codecs have; for a state with two slots of the same name for a leaf; if bytes evidently hold
        several codes, and `tx` and `params` are not given.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> state = tx.init({"w": jnp.ones((64, 64))})
      >>> float(lowmem.diagnostics.code_shares(state)["nu"]["w"].zero)
      1.0
    """
    shares: dict[str, dict[str, CodeShares]] = {}
    decided: dict[tuple[str, str], context.Decision] = {}
    if tx is not None:
        decided = {(d.slot, d.path): d for d in context.dry_run(tx, params)[1]}
    fields = [
        (slot, path, leaf)
        for slot, tree in trees.state_fields(state)
        for path, leaf in trees.named_leaves(tree)
    ]
    arrays = {(slot, path): leaf for slot, path, leaf in fields}
    for slot, path, codes in fields:
        if slot != "correction" and codes.ndim and codes.dtype in (jnp.int8, jnp.uint8):
            scales = arrays.get((f"{slot}_scale", path))
            decision = decided.get((slot, path))
            if decision is None or decision.codec is None:
                _check_one_a_byte(slot, path, codes, arrays.get(("correction", path)))
            elif decision.codec.codes_per_byte > 1:
                shape = decision.values_shape
                row = codes.ndim != len(shape)  # per-block values are stored as one row
                codes = decision.codec.unpack(codes, math.prod(shape) if row else shape[-1])
            _check_scales_fit(slot, path, codes, scales)
            if path in shares.get(slot, {}):
                raise ValueError(
                    f"two states here have a slot '{slot}' of '{path}': pass only one of them."
                )
            if scales is not None and scales.dtype != jnp.uint32:
                shares.setdefault(slot, {})[path] = _code_shares(codes)
    return shares


def _check_one_a_byte(slot: str, path: str, codes: jax.Array, correction: jax.Array | None) -> None:
    """Raise ValueError if dtype or shape show that bytes hold several codes."""
    whole = codes.shape if correction is None or correction.ndim != codes.ndim else correction.shape
    packed = [(*whole[:-1], groups.group_count(whole[-1], several)) for several in (2, 4, 8)]
    # codes of mu are signed
    if (
        (slot == "mu" and codes.dtype == jnp.uint8)
        or codes.shape != whole
        and codes.shape in packed
    ):
        raise ValueError(
            f"'{slot}' of '{path}', {codes.dtype}{list(codes.shape)}, has several codes per byte: "
            "also pass the optimizer and its parameters, code_shares(state, tx, params)."
        )


def _check_scales_fit(slot: str, path: str, codes: jax.Array, scales: jax.Array | None) -> None:
    """Raise ValueError unless the scales can be those of the codes, for some size of groups.

    Their leading axes are equal, and a row of codes has at least one scale and at most as many as
    codes; an empty row has none.
    """
    if scales is not None and codes.shape[:-1] == scales.shape[:-1]:
        length, count = codes.shape[-1], scales.shape[-1]
        if (1 if length else 0) <= count <= length:
            return
    beside = "no scales" if scales is None else f"scales {scales.dtype}{list(scales.shape)}"
    raise ValueError(
        f"'{slot}' of '{path}' is {codes.dtype}{list(codes.shape)} with {beside}, which no codec "
        "of this library writes (packed, or another library's): pass only states of "
        "optax_lowmem's optimizers."
    )


def _code_shares(codes: jax.Array) -> CodeShares:
    unsigned = codes.dtype == jnp.uint8
    magnitude = jnp.abs(codes.astype(jnp.int32))

    def share(hits: jax.Array) -> jax.Array:
        return jnp.mean(hits.astype(jnp.float32))

    return CodeShares(
        saturated=share((magnitude > 0) & (magnitude == jnp.max(magnitude, initial=0))),
        zero=share(magnitude == 0),
        floored=share(magnitude == 1) if unsigned else jnp.zeros((), jnp.float32),
    )


def largest_step(
    params: optax.Params,
    state: optax.OptState,
    new_params: optax.Params,
    new_state: optax.OptState,
    learning_rate: float | jax.Array,
) -> dict[str, jax.Array]:
    """Return max |change of the master weight| / learning rate of one step, per leaf.

    About 1 for Lion, and for Adam with an up-to-date second moment; the paper's variance codes
    reach 3558.

    Args:
      params: weights before the step.
      state: state before the step.
      new_params: weights after the step.
      new_state: state after the step.
      learning_rate: learning rate of the step.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_lion(0.5, weight_decay=0.0)
      >>> before = lowmem.init(tx, {"w": jnp.zeros(3)})
      >>> after = lowmem.step(tx, {"w": jnp.ones(3)}, *reversed(before))
      >>> float(lowmem.diagnostics.largest_step(*before, *after, 0.5)["w"])
      1.0
    """
    before, after = master_params(params, state), master_params(new_params, new_state)
    change = jax.tree.map(lambda a, b: jnp.max(jnp.abs(b - a)) / learning_rate, before, after)
    return dict(trees.named_leaves(change))


@dataclasses.dataclass(frozen=True)
class Stall:
    """A leaf whose largest weights a step of one learning rate cannot change.

    Attributes:
      path: path of the leaf.
      largest: its largest magnitude.
      half_spacing: half the distance between neighbouring master weights at that magnitude.
      share: share of its weights that do not move.
    """

    path: str
    largest: float
    half_spacing: float
    share: float


def stalled_leaves(
    tx: optax.GradientTransformation,
    params: optax.Params,
    learning_rate: float,
    *,
    action: str = "warn",
) -> list[Stall]:
    """Return leaves where a step of one learning rate is under half the master weights' spacing.

    For magnitudes in [2^e, 2^(e+1)), a 24-bit master weight is a multiple of 2^(e-15), a 32-bit one
    of 2^(e-23), and a bf16 weight without correction of 2^(e-7). With stochastic rounding, the
    default, 24 bits have f32's result in the mean, so the spacing is f32's, 2^(e-23).

    Args:
      tx: the optimizer, to find how each leaf is stored.
      params: the weights.
      learning_rate: the smallest learning rate of interest, such as the end of a schedule.
      action: `warn`, `raise` or `none`.

    Returns:
      One `Stall` per such leaf.

    Raises:
      ValueError: with action="raise", naming the leaves.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.full((64, 64), 8.0, jnp.bfloat16)}
      >>> nearest = lowmem.flash_adamw(1e-5, storage=lowmem.Storage(master_rounding="nearest"))
      >>> lowmem.diagnostics.stalled_leaves(nearest, params, 1e-5, action="none")
      [Stall(path='w', largest=8.0, half_spacing=0.0001220703125, share=1.0)]
    """
    check_choice("action", action, ("warn", "raise", "none"))
    _, decisions = context.dry_run(tx, params)
    kept = {d.path: (d.form, d.stochastic) for d in decisions if d.slot == "correction"}
    stalls = []
    for path, leaf in trees.named_leaves(params):
        if leaf.size and path in kept:
            stall = _stall(path, leaf, *kept[path], learning_rate)
            stalls += [stall] if stall else []
    if stalls and action != "none":
        names = ", ".join(f"{s.path} ({s.share:.1%} of its weights)" for s in stalls[:5])
        message = (
            f"a step of {learning_rate:g} cannot move the largest weights of {names}: use "
            "Storage(master_weight_bits=32), or 24 bits with master_rounding='stochastic', or keep "
            "these leaves in f32."
        )
        if action == "raise":
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    return stalls


def _stall(
    path: str, leaf: jax.Array, form: str | None, stochastic: bool, learning_rate: float
) -> Stall | None:
    magnitude = jnp.abs(numerics.widen(leaf))
    exponent = (numerics.to_bits(magnitude) >> 23).astype(jnp.int32) - 127
    mantissa = 23  # bits that are stored of a master weight
    if not stochastic and leaf.dtype != jnp.float32:
        correction = int(form.split("-")[1]) - 16 if form else 0
        mantissa = min(23, int(jnp.finfo(leaf.dtype).nmant) + correction)
    spacing = exponent - mantissa
    half = numerics.power_of_two(jnp.maximum(spacing - 1, -126))  # exp2 is not exact on a CPU
    stuck = (magnitude > 0) & (jnp.float32(learning_rate) < half)
    share = float(jnp.mean(stuck.astype(jnp.float32)))
    if share == 0:
        return None
    return Stall(path, float(jnp.max(magnitude)), float(jnp.max(half * (magnitude > 0))), share)
