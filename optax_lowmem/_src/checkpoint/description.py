"""Description of the format of a checkpoint: its arrays, and the storage of each slot."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.core import scope, trees

FORMAT_VERSION = 2
NAME = "optax_lowmem"
Forms = dict[str, list[Any]]  # path -> [dtype, shape]


def form_of(leaf: Any) -> list[Any]:
    """[dtype, shape] of an array, as JSON has it."""
    return [str(leaf.dtype), list(jnp.shape(leaf))]


def forms(tree: Any) -> Forms:
    """Path -> [dtype, shape] of every array of a tree."""
    return {path: form_of(leaf) for path, leaf in array_leaves(tree)}


def array_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of a tree, with every key in the path."""
    return trees.unique_names(tree, _whole_name)


def _whole_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def words(form: Any) -> str:
    """`int8[64, 128]` of a form, or `nothing`."""
    return f"{form[0]}{form[1]}" if form else "nothing"


def metadata(tx: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    """The description of the format in which an optimizer keeps its state; JSON has types for it.

    Save it with a checkpoint of your own making, and give it to `check` before you restore one.

    Args:
      tx: any optax transformation.
      params: the weights as they are stored, or their `jax.eval_shape`; nothing is allocated.

    Returns:
      A dict: `format` and `version`; `params` and `state`, the dtype and shape of each array; and
      `slots`, by leaf and slot the codec, scale format, group size and rounding, the block that
      shares a value, and the split of master weights.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> described = lowmem.checkpoint.metadata(lowmem.flash_lion(1e-4), params)
      >>> described["version"], described["slots"]["w"]["correction"]
      (2, {'split': 'bits-24'})
      >>> described["slots"]["w"]["mu"]["codec"], described["slots"]["w"]["mu"]["group_size"]
      ('softsign-int8', 32)
    """
    state, decisions = scope.dry_run(tx, params)
    slots: dict[str, dict[str, Any]] = {}
    for decision in decisions:
        if decision.slot != "step":
            of_leaf = slots.setdefault(decision.path, {})
            of_leaf[_free_name(decision.slot, of_leaf)] = _described(decision)
    return {
        "format": NAME,
        "version": FORMAT_VERSION,
        "params": forms(params),
        "slots": slots,
        "state": forms(state),
    }


def _free_name(slot: str, taken: Mapping[str, Any]) -> str:
    """`mu`, and `mu_1` where a leaf has two."""
    same = sum(name == slot or name.removeprefix(f"{slot}_").isdigit() for name in taken)
    return f"{slot}_{same}" if same else slot


def _described(decision: scope.Decision) -> dict[str, Any]:
    if decision.slot == "correction":
        return {"split": decision.form}
    found: dict[str, Any] = {"codec": None}
    if decision.codec is not None:
        found = {
            "codec": decision.codec.name,
            "scale": decision.codec.scale.name,
            "group_size": decision.group_size,
            "rounding": "stochastic" if decision.stochastic else "nearest",
        }
    if decision.block is not None:
        block = decision.block
        heads = list(block.heads) if block.heads else None
        found["block"] = {"axes": list(block.axes), "heads": heads}
    return found
