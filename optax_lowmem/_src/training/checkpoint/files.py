"""Orbax checkpoint folders: checks that Orbax omits, and handlers that write checksums."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_lowmem._src.arrays.typing import Json, PyTree
from optax_lowmem._src.training.checkpoint import checksums
from optax_lowmem._src.training.checkpoint.description import array_differences, dtypes_and_shapes

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from etils import epath  # comes with Orbax

Manager: TypeAlias = "ocp.CheckpointManager"
StrPath = str | os.PathLike[str]
_STEP = re.compile(r"(?:.*_)?(\d+)")  # names of Orbax's folders: 7, step_7, 0007
_TEMPORARY = re.compile(r"\d+\.orbax-checkpoint-tmp")
_REMOVALS = 5  # attempts to remove a temporary folder, within a second
PARAMS, STATE, DESCRIPTION = "params", "opt_state", "optax_lowmem"


def orbax() -> ModuleType:
    """Import Orbax, an optional dependency; raise if Orbax or xxhash (checksums) is missing."""
    try:
        import orbax.checkpoint as ocp
        import xxhash  # noqa: F401
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in ("orbax", "xxhash"):
            raise  # Orbax is installed, but a dependency of it is missing
        raise ImportError(
            "checkpoints need Orbax and xxhash: pip install orbax-checkpoint xxhash", name=name
        ) from error
    return ocp


def is_remote(path: StrPath) -> bool:
    """Return whether a path is a URL such as gs://bucket/run."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a directory, as a str or an os.PathLike, got {path!r}")
    return "://" in str(path)


def absolute(path: StrPath) -> StrPath:
    """Return the absolute path, which Orbax needs; URLs are returned unmodified."""
    return path if is_remote(path) else os.path.abspath(path)


def description(manager: Manager, step: int) -> Json:
    """Read the description of a step's format."""
    if DESCRIPTION in _item_metadata(manager, step):
        return read(manager, step, {DESCRIPTION: orbax().args.JsonRestore()})[DESCRIPTION]
    raise ValueError(
        f"step {step} in {manager.directory} has no description of its format, so it was not saved "
        "by checkpoint.save or with checkpoint.args: restore it with Orbax. If it has the state of "
        "a plain optax optimizer, pass that to checkpoint.from_optax."
    )


def _item_metadata(manager: Manager, step: int) -> Mapping[str, object]:
    """Return Orbax's metadata of each item of a step, by name."""
    with _explaining_errors(manager, step, (PARAMS, STATE, DESCRIPTION)):
        return manager.item_metadata(step)


def verify_checksums(manager: Manager, step: int) -> bool:
    """Raise if a file differs from what was written; return whether every item has checksums."""
    items = [folders(manager)[step] / name for name in (PARAMS, STATE, DESCRIPTION)]
    items = [item for item in items if item.exists()]
    with _explaining_errors(manager, step, [item.name for item in items]):
        for problem in itertools.chain.from_iterable(map(checksums.damaged, items)):
            raise OSError(problem)
    return all((item / checksums.NAME).exists() for item in items)


def folders(manager: Manager) -> dict[int, "epath.Path"]:
    """Return the folder of each step, complete or not, for any naming scheme of the manager."""
    if not manager.directory.exists():
        return {}
    named = ((_STEP.fullmatch(path.name), path) for path in manager.directory.iterdir())
    return {int(name[1]): path for name, path in named if name and path.is_dir()}


def steps(manager: Manager) -> list[int]:
    """Return the steps that are complete checkpoints: have a description, or both trees."""
    complete = [
        step
        for step, folder in folders(manager).items()
        if (folder / DESCRIPTION / "metadata").exists()
        or all((folder / name / "_METADATA").exists() for name in (PARAMS, STATE))
    ]
    return [step for step in manager.all_steps() if step in complete]


@contextlib.contextmanager
def sole_writer(path: StrPath) -> Iterator[None]:
    """Hold the lock of a directory; raise if another save holds it.

    It is a lock of the operating system on the directory, so it ends with its process. Buckets and
    file systems without locks are not locked. Process 0 takes the lock for all processes.
    """
    folder, busy = None, False
    if jax.process_index() == 0 and fcntl is not None and not is_remote(path):
        os.makedirs(path, exist_ok=True)
        folder = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:  # a file system without locks
            pass
    try:
        if jax.process_count() > 1:
            busy = bool(np.any(multihost_utils.process_allgather(np.bool_(busy))))
        if busy:
            raise BlockingIOError(
                f"another save writes to {path}, and only one may at a time: wait for it, or save "
                "to another directory."
            )
        yield
    finally:
        if folder is not None:
            if not busy:
                with contextlib.suppress(OSError):  # a forked process would keep it otherwise
                    fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)


def remove_temporary(path: StrPath) -> None:
    """Remove temporary folders of saves that failed or were killed; needs `sole_writer`.

    Orbax's threads may outlive a failed save and write for a moment, so removal is retried.
    """
    from etils import epath  # comes with Orbax

    parent = epath.Path(absolute(path))
    if jax.process_index() != 0 or not parent.exists():
        return
    for attempt in range(_REMOVALS):
        left = [folder for folder in parent.iterdir() if _TEMPORARY.match(folder.name)]
        if not left:
            return
        time.sleep(0.1 * attempt)
        for folder in left:
            with contextlib.suppress(OSError):
                folder.rmtree()


def check_arrays(manager: Manager, step: int, expected: Mapping[str, object]) -> None:
    """Raise if a stored array has another dtype or shape, which Orbax would cast or pad."""
    result = _item_metadata(manager, step)
    for name, target in expected.items():
        stored = getattr(result[name], "tree", result[name]) if name in result else None
        if stored is None:  # a manager without these handlers has no metadata
            continue
        arrays = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None, stored
        )
        remedy = "The files do not belong to the saved description: save the checkpoint again."
        for problem in array_differences(
            name, dtypes_and_shapes(arrays), dtypes_and_shapes(target), remedy
        ):
            raise ValueError(f"step {step} in {manager.directory}: {problem}")


def read(manager: Manager, step: int, items: Mapping[str, object]) -> dict[str, PyTree]:
    """Read items of a step, given their `ocp.args` by name."""
    with _explaining_errors(manager, step, items):
        result = manager.restore(step, args=orbax().args.Composite(**items))
        return jax.block_until_ready(dict(result.items()))


@contextlib.contextmanager
def _explaining_errors(manager: Manager, step: int, items: Iterable[str]) -> Iterator[None]:
    """Raise errors of tensorstore, json or the file system as one that explains them."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"step {step} in {manager.directory} cannot be read: files of {', '.join(items)} are "
            "missing, truncated or damaged. Restore another step "
            f"(available: {sorted(steps(manager))}) or a copy. {type(error).__name__}: {error}"
        ) from error


# ---- handlers that write a checksum of every file ------------------------------------------------


def handlers() -> "ocp.handlers.CheckpointHandlerRegistry":
    """Return handlers that write checksums of the items of `args`, for your `CheckpointManager`.

    `ocp.CheckpointManager(path, handler_registry=checkpoint.handlers())` writes the same files as
    `save`; without these handlers `restore_from` cannot detect a flipped bit. They do not limit how
    much is compressed at a time.

    Returns:
      A registry of handlers by item; make a new one for each manager.

    Raises:
      ImportError: without Orbax.

    Example:
      >>> import tempfile, orbax.checkpoint as ocp, optax_lowmem as lowmem
      >>> with tempfile.TemporaryDirectory() as path:
      ...     registry = lowmem.checkpoint.handlers()
      ...     with ocp.CheckpointManager(path, handler_registry=registry) as manager:
      ...         manager.all_steps()
      []
    """
    return _handlers()


def _handlers(**options: object) -> "ocp.handlers.CheckpointHandlerRegistry":
    """Return `handlers()` with options of Orbax's handler of arrays."""
    ocp = orbax()
    arrays = type("Arrays", (_WritesChecksums, ocp.StandardCheckpointHandler), {})
    json = type("Json", (_WritesChecksums, ocp.JsonCheckpointHandler), {})
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item, handler, save, restore in (
        (PARAMS, arrays(**options), ocp.args.StandardSave, ocp.args.StandardRestore),
        (STATE, arrays(**options), ocp.args.StandardSave, ocp.args.StandardRestore),
        (DESCRIPTION, json(), ocp.args.JsonSave, ocp.args.JsonRestore),
    ):
        registry.add(item, save, handler)
        registry.add(item, restore, handler)
    return registry


@contextlib.contextmanager
def open_manager(path: StrPath, largest: int = 0, **options: object) -> Iterator[Manager]:
    """Open a `CheckpointManager` with these handlers.

    The shards that a process compresses and writes at the same time have at most 2 GB in all, more
    if `largest`, the bytes of the largest shard, requires it: Orbax raises for a shard that is not
    smaller than the limit.
    """
    ocp = orbax()
    settings = ocp.CheckpointManagerOptions(**options)
    registry = _handlers(save_concurrent_gb=1 + max(1, largest // 10**9))
    with ocp.CheckpointManager(
        absolute(path), handler_registry=registry, options=settings
    ) as manager:
        yield manager


class _WritesChecksums:
    """Mixin for a handler of Orbax: writes checksums before a step gets its final name."""

    async def async_save(
        self, directory: "epath.Path", *args: object, **kwargs: object
    ) -> "list[ocp.future.Future] | None":
        futures = await super().async_save(directory, *args, **kwargs)  # type: ignore[misc]
        return [_ChecksumFuture(futures or [], directory)] if jax.process_count() > 1 else futures

    def finalize(self, directory: "epath.Path") -> None:
        """Write the remaining checksums; Orbax calls this on one process after all have written."""
        super().finalize(directory)  # type: ignore[misc]
        checksums.write_rest(directory)


class _ChecksumFuture:
    """A future that is done when the files of this process and their checksums are written."""

    def __init__(self, futures: "list[ocp.future.Future]", directory: "epath.Path"):
        self._futures, self._directory = futures, directory

    def result(self, timeout: float | None = None) -> None:
        for future in self._futures:
            future.result(timeout)
        checksums.write_of_process(self._directory)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()
