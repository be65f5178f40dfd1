"""Orbax, whose casts and fillings are not trusted."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from optax_lowmem.checkpoint.comparison import unlike
from optax_lowmem.checkpoint.description import Forms, array_leaves, form_of, forms

PARAMS, STATE, DESCRIPTION = "params", "opt_state", "optax_lowmem"


def orbax() -> Any:
    """Orbax, which the package itself does not need."""
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "orbax":
            raise  # Orbax is there, and something that it needs is not
        raise ImportError(
            "checkpoints need Orbax: pip install 'optax-lowmem[checkpoint]'", name="orbax"
        ) from error
    return ocp


def is_remote(path: Any) -> bool:
    """Whether a path is one such as gs://bucket/run."""
    return "://" in str(path)


def absolute(path: Any) -> Any:
    """The path as Orbax wants it."""
    return path if is_remote(path) else os.path.abspath(path)


@contextmanager
def open_manager(path: Any, **options: Any) -> Iterator[Any]:
    """A `CheckpointManager` of our items."""
    ocp = orbax()
    arrays = ocp.StandardCheckpointHandler
    handlers = {PARAMS: arrays(), STATE: arrays(), DESCRIPTION: ocp.JsonCheckpointHandler()}
    made = ocp.CheckpointManager(
        absolute(path), item_handlers=handlers, options=ocp.CheckpointManagerOptions(**options)
    )
    with made:
        yield made


def description(manager: Any, step: int, undescribed: bool) -> Mapping[str, Any] | None:
    """The description of a step; None where there is none and that is accepted."""
    if DESCRIPTION in _stored(manager, step):
        return read(manager, step, {DESCRIPTION: orbax().args.JsonRestore()})[DESCRIPTION]
    if undescribed:
        return None
    raise ValueError(
        f"step {step} in {manager.directory} has no description of its format, so it was saved by "
        "other means than checkpoint.save or checkpoint.args. If its items 'params' and "
        "'opt_state' were made by this very optimizer, with these codecs and this group size, pass "
        "undescribed=True. For the state of a plain optax optimizer, restore it with Orbax and "
        "give it to checkpoint.from_optax."
    )


def _stored(manager: Any, step: int) -> Any:
    """What is known of each item of a step, by name."""
    with _reading(manager, step, (PARAMS, STATE, DESCRIPTION)):
        return manager.item_metadata(step)


def check_arrays(manager: Any, step: int, wanted: Mapping[str, Any]) -> None:
    """Raises where a file holds another dtype or shape: Orbax would cast, or fill."""
    found = _stored(manager, step)
    for name, target in wanted.items():
        stored = getattr(found[name], "tree", found[name]) if name in found else None
        if stored is None:  # a manager without our handlers does not say
            continue
        on_disk: Forms = {
            path: form_of(leaf)
            for path, leaf in array_leaves(stored)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        }
        remedy = "The files are not those that the description was saved with: save it again."
        for problem in unlike(name, on_disk, forms(target), remedy):
            raise ValueError(f"step {step} in {manager.directory}: {problem}")


def read(manager: Any, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
    """Items of a step by name, from their `ocp.args`."""
    with _reading(manager, step, items):
        found = manager.restore(step, args=orbax().args.Composite(**items))
        return jax.block_until_ready(dict(found.items()))


@contextmanager
def _reading(manager: Any, step: int, items: Iterable[str]) -> Iterator[None]:
    """Says of whatever tensorstore, json or the file system raise what it means."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"step {step} in {manager.directory} cannot be read: files of {', '.join(items)} are "
            "missing, cut short or damaged. Restore another step "
            f"({sorted(manager.all_steps())} are there) or a copy. {type(error).__name__}: {error}"
        ) from error
