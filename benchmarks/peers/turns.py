"""One process at a time on the device, while others compile. Imports neither jax nor torch."""

import fcntl
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []


def take(path: str) -> None:
    """Waits for the device, which is then this process's until it ends, its memory with it."""
    file = Path(path).open("w", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)
