"""From a running optax optimizer to low memory."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.checkpoint.convert import Converter, by_path, map_optax
from optax_lowmem._src.checkpoint.counterparts import Moments
from optax_lowmem._src.checkpoint.slots import coded_slots, encode_leaf
from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.wrappers.compress import CompressedState
from optax_lowmem._src.wrappers.init import init
from optax_lowmem._src.wrappers.start import WeightDtype


def from_optax(
    tx: optax.GradientTransformation,
    optax_state: Any,
    params: Any,
    dtype: WeightDtype = jnp.bfloat16,
    *,
    seed: Any = None,
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
    _, decisions = scope.dry_run(tx, weights)
    return weights, _Encoder(decisions).walk(empty, optax_state)


class _Encoder(Converter):
    def choose(self, ours: Any, plain: Any) -> tuple[Any, Any]:
        return ours, plain

    def split(self, ours: Any, inner: Any) -> Any:
        return ours._replace(inner_state=inner)

    def moments(self, ours: Any, plain: Any, known: Moments, where: str) -> Any:
        trees_of: dict[str, Any] = {}
        counts: list[Any] = []
        map_optax(plain, known, trees_of.__setitem__, lambda _, c: counts.append(c), where)
        if len({int(count) for count in counts}) > 1:
            raise ValueError(
                f"{where}: optax's state counts {sorted({int(c) for c in counts})} steps, in its "
                "moments and its schedule, and this optimizer has one count for both. Set them "
                "equal, with optax.tree.set, to the one to go on from."
            )
        count = jnp.asarray(counts[0] if counts else 0, jnp.int32)
        fields: dict[str, Any] = {"count": count}
        for slot, field in known.fields.items():
            like = getattr(ours, slot)
            names = [path for path, _ in trees.named_leaves(like)]
            values = by_path(field, trees_of[field], names, f"{where}.{slot}")
            shapes = {path: leaf.shape for path, leaf in trees.named_leaves(ours.mu)}
            pairs = []
            for path, leaf in trees.named_leaves(like):
                if values[path].shape not in (shapes[path], leaf.shape):
                    raise ValueError(
                        f"{where}.{slot}: '{path}' has shape {values[path].shape} in optax's state "
                        f"and {shapes[path]} here: give the parameters of this very run."
                    )
                decision = self.decisions.take_own(path, slot)
                pairs.append(encode_leaf(decision, values[path], leaf, ours.seed, count))
            treedef = jax.tree.structure(like)
            fields[slot] = jax.tree.unflatten(treedef, [codes for codes, _ in pairs])
            scales: Any = jax.tree.structure(getattr(ours, f"{slot}_scale"))
            fields[f"{slot}_scale"] = scales.unflatten([scale for _, scale in pairs])
        return ours._replace(**fields)

    def compressed(self, ours: CompressedState, plain: Any, where: str) -> Any:
        def wide(slot: str, name: str, codes: Any) -> Any:
            leaves, treedef = jax.tree.flatten(codes)
            rows = zip(leaves, jax.tree.leaves(ours.scales[name]), strict=True)
            return jax.tree.unflatten(treedef, [_as_f32(*row) for row in rows])

        self.decisions.code_outside(ours)
        inner = self.walk(coded_slots(ours, ours.inner_state, wide), plain, where)
        counts = optax.tree.get_all_with_path(plain, "count")
        count = jnp.asarray(counts[0][1] if counts else 0, jnp.int32)
        scales: dict[str, Any] = {}

        def encode(slot: str, name: str, values: Any) -> Any:
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


def _as_f32(codes: Any, scales: Any) -> Any:
    """Return the form of a slot before encoding: f32 where it has scales, else unchanged."""
    return jax.ShapeDtypeStruct(codes.shape, jnp.float32) if jnp.ndim(scales) else codes
