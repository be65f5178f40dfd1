"""Orbax's handlers of our items, with a checksum of every file they write."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from optax_lowmem._src.checkpoint import checksums, files
from optax_lowmem._src.checkpoint.files import DESCRIPTION, PARAMS, STATE, StrPath

if TYPE_CHECKING:
    from etils import epath  # comes with Orbax


def handlers() -> Any:
    """Handlers of the items of `args` that store checksums, for a `CheckpointManager` of your own.

    `ocp.CheckpointManager(path, handler_registry=checkpoint.handlers())` writes the checkpoints
    that `save` writes; without them `restore_from` cannot tell a flipped bit.

    Returns:
      A registry of handlers by item; give each manager its own.

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
    ocp = files.orbax()
    arrays, json = _kinds()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in (PARAMS, STATE):
        handler = arrays()
        registry.add(item, ocp.args.StandardSave, handler)
        registry.add(item, ocp.args.StandardRestore, handler)
    handler = json()
    registry.add(DESCRIPTION, ocp.args.JsonSave, handler)
    registry.add(DESCRIPTION, ocp.args.JsonRestore, handler)
    return registry


@contextmanager
def open_manager(path: StrPath, **options: object) -> Iterator[Any]:
    """A `CheckpointManager` of our items."""
    ocp = files.orbax()
    made = ocp.CheckpointManager(
        files.absolute(path),
        handler_registry=handlers(),
        options=ocp.CheckpointManagerOptions(**options),
    )
    with made:
        yield made


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """Handlers of arrays and of JSON; Orbax is not there when this module is imported."""
    ocp = files.orbax()
    arrays = type("Arrays", (_Summing, ocp.StandardCheckpointHandler), {})
    return arrays, type("Json", (_Summing, ocp.JsonCheckpointHandler), {})


class _Summing:
    """Beside a handler of Orbax: checksums before a step has its name."""

    async def async_save(self, directory: "epath.Path", *args: object, **kwargs: object) -> Any:
        futures = await super().async_save(directory, *args, **kwargs)  # type: ignore[misc]
        return [_Summed(futures or [], directory)] if jax.process_count() > 1 else futures

    def finalize(self, directory: "epath.Path") -> None:
        """On one process, when all have written."""
        super().finalize(directory)  # type: ignore[misc]
        checksums.write_rest(directory)


class _Summed:
    """Done when the files of this process are written and summed."""

    def __init__(self, futures: list[Any], directory: "epath.Path"):
        self._futures, self._directory = futures, directory

    def result(self, timeout: float | None = None) -> None:
        for future in self._futures:
            future.result(timeout)
        checksums.write_own(self._directory)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()
