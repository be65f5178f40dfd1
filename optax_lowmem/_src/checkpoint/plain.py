"""From a running optax optimizer to low memory, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.checkpoint.convert import (
    Converter,
    by_path,
    coded_slots,
    decode_leaf,
    encode_leaf,
    map_optax,
)
from optax_lowmem._src.checkpoint.counterparts import counterpart
from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.optimizers.record import OptimizerRecord
from optax_lowmem._src.update.masters import master_params
from optax_lowmem._src.wrappers.compress import CompressedState
from optax_lowmem._src.wrappers.init import init
from optax_lowmem._src.wrappers.start import WeightDtype

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
    _, decisions = scope.dry_run(tx, weights)
    return weights, _Encoder(decisions).walk(empty, optax_state)


class _Encoder(Converter):
    def choose(self, ours: optax.OptState, plain: optax.OptState) -> tuple[Any, Any]:
        return ours, plain

    def split(self, ours: optax.OptState, inner: optax.OptState) -> Any:
        return ours._replace(inner_state=inner)

    def moments(
        self, ours: optax.OptState, plain: optax.OptState, record: OptimizerRecord, where: str
    ) -> Any:
        trees_of: dict[str, Any] = {}
        counts: list[Any] = []
        fields_of = record.optax_fields
        map_optax(plain, fields_of, trees_of.__setitem__, lambda _, c: counts.append(c), where)
        if len({int(count) for count in counts}) > 1:
            raise ValueError(
                f"{where}: optax's state counts {sorted({int(c) for c in counts})} steps, in its "
                "moments and its schedule, and this optimizer has one count for both. Set them "
                "equal, with optax.tree.set, to the one to go on from."
            )
        count = jnp.asarray(counts[0] if counts else 0, jnp.int32)
        fields: dict[str, Any] = {"count": count}
        for slot, name in fields_of.items():
            like, field = getattr(ours, slot), name.rpartition(".")[2]
            names = [path for path, _ in trees.named_leaves(like)]
            values = by_path(field, trees_of[slot], names, f"{where}.{slot}")
            pairs = []
            for path, leaf in trees.named_leaves(like):
                decision = self.decisions.take_own(path, slot)
                if values[path].shape not in (decision.shape, decision.values_shape):
                    raise ValueError(
                        f"{where}.{slot}: '{path}' has shape {values[path].shape} in optax's state "
                        f"and {decision.shape} here: give the parameters of this very run."
                    )
                pairs.append(encode_leaf(decision, values[path], leaf, ours.seed, count))
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
    _, decisions = scope.dry_run(tx, params)
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
        def field_of(slot: str, like: optax.Params) -> Any:
            field = record.optax_fields[slot].rpartition(".")[2]
            names = [path for path, _ in trees.named_leaves(getattr(ours, slot))]
            wanted = by_path(field, like, names, f"{where}.{slot}")
            rows = zip(
                trees.named_leaves(getattr(ours, slot)),
                jax.tree.leaves(getattr(ours, f"{slot}_scale")),
                strict=True,
            )
            values = {}
            for (path, codes), scales in rows:
                shape, dtype = wanted[path].shape, wanted[path].dtype
                decision = self.decisions.take_own(path, slot)
                values[path] = decode_leaf(decision, codes, scales, shape).astype(dtype)
            leaves = [values[path] for path, _ in trees.named_leaves(like)]
            return jax.tree.unflatten(jax.tree.structure(like), leaves)

        return map_optax(
            plain, record.optax_fields, field_of, lambda *_: jnp.asarray(ours.count), where
        )

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
