"""From low memory back to a plain optax optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.checkpoint.convert import Converter, by_path, map_optax
from optax_lowmem._src.checkpoint.counterparts import Moments, counterpart
from optax_lowmem._src.checkpoint.slots import coded_slots, decode_leaf
from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.update.masters import master_params
from optax_lowmem._src.wrappers.compress import CompressedState


def to_optax(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
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

    Memory: 12 bytes a parameter for AdamW beside what is there.

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


def _filled(state: Any, plain: optax.GradientTransformation, params: Any) -> Any:
    """A state whose abstract leaves, numbers that ours has not, are as `plain.init` makes them."""
    leaves, treedef = jax.tree.flatten(state)
    left = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if left:  # under a jit, where the moments, which are not asked for, are not made
        made = jax.jit(lambda p: [jax.tree.leaves(plain.init(p))[i] for i in left])(params)
        for index, leaf in zip(left, made, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(treedef, leaves)


class _Decoder(Converter):
    def choose(self, ours: Any, plain: Any) -> tuple[Any, Any]:
        return plain, ours

    def split(self, ours: Any, inner: Any) -> Any:
        return inner

    def moments(self, ours: Any, plain: Any, known: Moments, where: str) -> Any:
        slots = {field: slot for slot, field in known.fields.items()}

        def field_of(field: str, like: Any) -> Any:
            slot = slots[field]
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

        return map_optax(plain, known, field_of, lambda *_: jnp.asarray(ours.count), where)

    def compressed(self, ours: CompressedState, plain: Any, where: str) -> Any:
        def decode(slot: str, name: str, codes: Any) -> Any:
            rows = zip(trees.named_leaves(codes), jax.tree.leaves(ours.scales[name]), strict=True)
            values = [
                decode_leaf(self.decisions.take(path, slot), leaf, scales, leaf.shape)
                for (path, leaf), scales in rows
            ]
            return jax.tree.unflatten(jax.tree.structure(codes), values)

        self.decisions.code_outside(ours)
        return self.walk(coded_slots(ours, ours.inner_state, decode), plain, where)
