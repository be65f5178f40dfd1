"""Describe the format of a checkpoint, and compare it with the one that an optimizer expects."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import Json
from optax_lowmem._src.optim import context

FORMAT_VERSION = 3
NAME = "optax_lowmem"
DtypesAndShapes = dict[str, list[str | list[int]]]  # path -> [dtype, shape]


_full_path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")  # every key


def dtypes_and_shapes(tree: object) -> DtypesAndShapes:
    """Return path -> [dtype, shape], in types of JSON, for every array of a tree."""
    named = trees.named_leaves(tree, _full_path)
    return {path: [str(leaf.dtype), list(leaf.shape)] for path, leaf in named}


def metadata(tx: optax.GradientTransformation, params: optax.Params) -> Json:
    """Describe the format in which an optimizer stores its state, in types of JSON.

    Save the description with a checkpoint that you write yourself, and pass it to `check` before
    you restore.

    Args:
      tx: any optax transformation.
      params: the weights as stored, or their `jax.eval_shape`; nothing is allocated.

    Returns:
      A dict: `format` and `version`; `params` and `state`, the dtype and shape of each array; and
      `slots`, for each leaf and slot the codec, scale format, group size and rounding, the block
      that shares a value, and the split of master weights.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> described = lowmem.checkpoint.metadata(lowmem.flash_lion(1e-4), params)
      >>> described["version"], described["slots"]["w"]["correction"]
      (3, {'split': 'bits-24'})
      >>> described["slots"]["w"]["mu"]["codec"], described["slots"]["w"]["mu"]["group_size"]
      ('softsign-int8', 32)
    """
    return describe(params, *context.dry_run(tx, params))


def describe(
    params: optax.Params, state: optax.OptState, decisions: Sequence[context.Decision]
) -> Json:
    """Return `metadata`, from the state and the decisions of a `context.dry_run`."""
    slots: dict[str, dict[str, Json]] = {}
    for decision in decisions:
        if decision.slot == "step":
            continue
        name, of_leaf = decision.slot, slots.setdefault(decision.path, {})
        # `mu_1` if the leaf already has a `mu`
        same = sum(known == name or known.removeprefix(f"{name}_").isdigit() for known in of_leaf)
        of_leaf[f"{name}_{same}" if same else name] = _describe_slot(decision)
    return {
        "format": NAME,
        "version": FORMAT_VERSION,
        "params": dtypes_and_shapes(params),
        "slots": slots,
        "state": dtypes_and_shapes(state),
    }


def _describe_slot(decision: context.Decision) -> Json:
    if decision.slot == "correction":
        return {"split": decision.form}
    results: dict[str, object] = {"codec": None}
    if decision.codec is not None:
        results = {
            "codec": decision.codec.name,
            "scale": decision.codec.scale.name,
            "group_size": decision.group_size,
            "rounding": "stochastic" if decision.stochastic else "nearest",
        }
    if decision.block is not None:
        block = decision.block
        heads = list(block.heads) if block.heads else None
        factored = {"rows_and_columns": True} if len(block.parts) > 1 else {}
        results["block"] = {"axes": list(block.axes), "heads": heads, **factored}
    return results


def check(saved: Json, tx: optax.GradientTransformation, params: optax.Params) -> None:
    """Raise unless a checkpoint's description matches the format that an optimizer reads.

    Rounding and seed are not compared: they only affect later steps.

    Args:
      saved: the result of `metadata` when the checkpoint was saved.
      tx: the optimizer to continue with.
      params: the weights as stored, or their `jax.eval_shape`.

    Raises:
      ValueError: another format or version, tree, shape, dtype, codec, group size, block or width
        of master weights; it names the leaf, the saved format, the one that `tx` reads and a
        remedy.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64))}
      >>> saved = lowmem.checkpoint.metadata(lowmem.flash_adamw(1e-3), params)
      >>> lowmem.checkpoint.check(saved, lowmem.flash_adamw(3e-4), params)
    """
    check_version(saved)
    compare(saved, metadata(tx, params))


def compare(saved: Json, here: Json) -> None:
    """Raise unless a checkpoint's description matches the description of what is expected."""
    lacking = next(_missing_entries(saved, here), None)
    if lacking is not None:
        raise ValueError(
            f"the description of the checkpoint lacks {lacking}, which is needed to read the "
            "arrays: it is damaged, or was not made by checkpoint.metadata. Restore another step "
            "or a copy."
        )
    problems = list(_differences(saved, here))
    if problems:
        more = f" ({len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)


def check_version(saved: Json) -> None:
    """Raise unless a dict is a description, in this package's format version."""
    if saved.get("format") != NAME or not isinstance(saved.get("version"), int):
        raise ValueError(
            "this is not a description of a checkpoint of optax_lowmem: it has the keys "
            f"{sorted(saved)}. Pass what checkpoint.metadata returned."
        )
    if saved["version"] != FORMAT_VERSION:
        newer = saved["version"] > FORMAT_VERSION
        remedy = "update optax_lowmem to read it" if newer else "no release wrote the older one"
        raise ValueError(
            f"the checkpoint has format version {saved['version']}, and this package reads "
            f"{FORMAT_VERSION} only: {remedy}."
        )


def _missing_entries(saved: Json, here: Json) -> Iterator[str]:
    """Yield the entries that a description lacks for arrays that an optimizer reads."""
    parts = ("params", "slots", "state")
    yield from (repr(part) for part in parts if not isinstance(saved.get(part), Mapping))
    # if the trees differ, `_differences` reports that
    same = all(dict(saved[part]) == here[part] for part in ("params", "state"))
    for path, of_leaf in here["slots"].items():
        stored = saved["slots"].get(path, {})
        for slot, expected in of_leaf.items():
            if slot not in stored:
                if same:
                    yield f"slot '{slot}' of '{path}'"
                continue
            fields = ["split"] if "split" in expected else ["codec"]
            if stored[slot].get("codec") is not None:
                fields += ["scale", "group_size"]
            missing = [field for field in fields if field not in stored[slot]]
            yield from (f"'{field}' of slot '{slot}' of '{path}'" for field in missing)


def _differences(saved: Json, here: Json) -> Iterator[str]:
    """Yield messages on how a description differs from the expected one, most important first."""
    remedy = "Restore with the parameters that it was saved with."
    yield from array_differences("parameter", saved["params"], here["params"], remedy)
    for path, of_leaf in here["slots"].items():
        for slot, expected in of_leaf.items():
            stored = saved["slots"].get(path, {}).get(slot)
            if stored is not None and _without_rounding(stored) != _without_rounding(expected):
                yield (
                    f"slot {slot} of '{path}' was saved as {_slot_text(stored)}, and this "
                    f"optimizer reads {_slot_text(expected)}, which would decode the same bytes to "
                    f"other values. Restore with {_advice(slot, stored, expected)} and, to change "
                    "the format, convert it: checkpoint.to_optax, then checkpoint.from_optax."
                )
    remedy = (
        "Restore with the optimizer that it was saved with. For the state of a plain optax "
        "optimizer, use checkpoint.from_optax."
    )
    yield from array_differences("state", saved["state"], here["state"], remedy)


def array_differences(
    what: str, saved: DtypesAndShapes, here: DtypesAndShapes, remedy: str
) -> Iterator[str]:
    """Yield messages on how the saved arrays differ from the expected ones."""
    missing = [f"'{path}'" for path in here if path not in saved]
    extra = [f"'{path}'" for path in saved if path not in here]
    if missing or extra:
        lacks, has = (trees.some_of(paths) or "nothing" for paths in (missing, extra))
        yield (
            f"the checkpoint has a different tree of {what} arrays: it lacks {lacks}, and has "
            f"{has} in addition. {remedy}"
        )
    for path, form in here.items():
        if path in saved and list(saved[path]) != form:
            yield (
                f"{what} '{path}' was saved as {saved[path][0]}{saved[path][1]}, but "
                f"{form[0]}{form[1]} is expected and arrays are not cast. {remedy}"
            )


def _without_rounding(form: Json) -> Json:
    return {key: value for key, value in form.items() if key != "rounding"}


def _slot_text(form: Json) -> str:
    if "split" in form:
        return f"master weights split by {form['split']}" if form["split"] else "no correction"
    each = _block_text(form["block"]) if form.get("block") else ""
    if form["codec"] is None:
        return "uncompressed numbers" + each
    return f"{form['codec']} in groups of {form['group_size']} with {form['scale']} scales" + each


def _block_text(block: Json) -> str:
    """Return as text which elements share a value."""
    axes, heads = block["axes"], block["heads"]
    if block.get("rows_and_columns"):
        return f", a value for each row and each column of axes {axes}"
    if not axes and not heads:
        return ", a value per element"
    return f", a value for each block of axes {axes}" + (f" and heads {heads}" if heads else "")


def _advice(slot: str, stored: Json, expected: Json) -> str:
    """Return as text the settings that read what was saved."""
    alike, other = ({**_without_rounding(form), "block": None} for form in (stored, expected))
    if alike == other:
        return "the optimizer, and its blocks or min_dim_size_to_factor, that it was saved with"
    if "split" in stored:
        scheme, _, bits = (stored["split"] or "").partition("-")
        chosen = f"{bits}, split={scheme!r}" if bits else "None"
        return f"Storage(master_weight_bits={chosen})"
    if stored["codec"] is None:
        return f"Storage({slot}=None), or the policy that it was saved with,"
    return f"{slot}=the codec {stored['codec']}, group_size={stored['group_size']}"
