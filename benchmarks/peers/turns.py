"""One process at a time on the device, once all have compiled. Imports neither jax nor torch."""

import fcntl
import os
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []


def compiling(path: str) -> int:
    """A descriptor for a process about to start: while it is open, nobody gets the device."""
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def take(path: str, compiling: int) -> None:
    """Waits for the device, which is then this process's until it ends, its memory with it."""
    os.close(compiling)
    file = Path(path).open("w", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)
