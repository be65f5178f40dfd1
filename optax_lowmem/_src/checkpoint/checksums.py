"""Checksums of all files of a checkpoint, computed by the process that wrote each file.

XXH3 detects flipped, moved and exchanged bytes, and takes less time than the copy out of the page
cache. Several threads hash a file in blocks; its checksum is the hash of the blocks' hashes. Its
cost is in docs/internals/checkpoints.md.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

if TYPE_CHECKING:
    from etils import epath  # comes with Orbax

FORM = "xxh3 of blocks"
NAME = "checksums.json"
_BLOCK = 8 << 20  # bytes; the checksums depend on it
_PIECE = 1 << 20  # bytes read and hashed at once: fits a core's cache; smaller costs more calls
_THREADS = 8


def own_files(index: int) -> Callable[[str], bool]:
    """Return a predicate for the files that a process writes, whose paths contain its number."""
    return lambda name: any(part.split(".")[-1] == f"process_{index}" for part in name.split("/"))


def write(folder: "epath.Path", name: str, mine: Callable[[str], bool]) -> None:
    """Write the checksums of some files of an item to a file in the item's folder.

    Args:
      folder: the folder of the item, an `epath.Path`.
      name: name of the file to write.
      mine: selects files by their path relative to `folder`.
    """
    results = [path for path in _files(folder) if mine(path) and path != name]
    rows = zip(results, _sums(folder, results), strict=True)
    sums = {path: list(form) for path, form in rows if form}
    (folder / name).write_text(json.dumps({FORM: sums}))


def write_own(folder: "epath.Path") -> None:
    """Write the checksums of the files that this process wrote."""
    index = jax.process_index()
    write(folder, _name_of(index), own_files(index))


def write_rest(folder: "epath.Path") -> None:
    """Write the checksums of all other files, including those that `write_own` wrote."""
    summed = {path for part in _parts(folder) for path in _read(folder, part)}
    write(folder, NAME, lambda path: path not in summed)


def damaged(folder: "epath.Path") -> Iterator[str]:
    """Yield a message for each file that differs from what was written; none without checksums.

    Each process checks a share of the files. If only other processes find a problem, a process
    yields a message about that, so that all processes fail together.
    """
    if not (folder / NAME).exists():
        return
    known = _read(folder, NAME)
    parts = [path for path in known if path.startswith("checksums.")]
    for part, form in zip(parts, _sums(folder, parts), strict=True):
        if _problem(form, known[part]) is None:  # otherwise it is reported below
            known |= _read(folder, part)
    share = sorted(known)[jax.process_index() :: jax.process_count()]
    results = [
        f"'{folder.name}/{path}' {problem}"
        for path, form in zip(share, _sums(folder, share), strict=True)
        if (problem := _problem(form, known[path]))
    ]
    if jax.process_count() > 1:
        counts = np.asarray(multihost_utils.process_allgather(np.int32(len(results))))
        if not results and counts.any():
            results = [
                f"process {int(np.argmax(counts > 0))} found damaged files of '{folder.name}'"
            ]
    yield from results


def _problem(form: tuple[int, int] | None, wanted: list[int]) -> str | None:
    if form is None:
        return "is missing"
    if form[0] != wanted[0]:
        return f"has {form[0]} bytes, but {wanted[0]} were written"
    return "has other bytes than were written" if form[1] != wanted[1] else None


def _name_of(index: int) -> str:
    return f"checksums.process_{index}.json"


def _parts(folder: "epath.Path") -> list[str]:
    return [p.name for p in folder.glob("checksums.process_*.json")]


def _read(folder: "epath.Path", name: str) -> dict[str, list[int]]:
    result = json.loads((folder / name).read_text())
    if FORM not in result:
        raise ValueError(f"'{folder.name}/{name}' has no checksums of the form '{FORM}'")
    return result[FORM]


def _files(folder: "epath.Path") -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in _walk(folder))


def _walk(folder: "epath.Path") -> Iterator[Any]:
    for path in folder.iterdir():  # an epath has no rglob
        yield from _walk(path) if path.is_dir() else [path]


def _sums(folder: "epath.Path", paths: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return (bytes, checksum) of each file, None for a missing one."""
    import xxhash  # an optional dependency; files.orbax raises if it is missing

    with ThreadPoolExecutor(_THREADS) as pool:
        sizes = list(pool.map(lambda path: _size(folder / path), paths))
        blocks = [
            [pool.submit(_hash, folder / path, at) for at in range(0, size or 0, _BLOCK)]
            for path, size in zip(paths, sizes, strict=True)
        ]
        sums = [
            xxhash.xxh3_64_intdigest(b"".join(block.result() for block in of_file))
            for of_file in blocks
        ]
    rows = zip(sizes, sums, strict=True)
    return [None if size is None else (size, total) for size, total in rows]


def _size(path: "epath.Path") -> int | None:
    try:
        return path.stat().length
    except FileNotFoundError:
        return None


def _hash(path: "epath.Path", start: int) -> bytes:
    """Hash one block; several threads run this at once."""
    import xxhash

    hasher, piece = xxhash.xxh3_64(), memoryview(bytearray(_PIECE))
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(_BLOCK // _PIECE):
            hasher.update(piece[: _fill(file, piece)])
    return hasher.digest()


def _fill(file: BufferedIOBase, piece: memoryview) -> int:
    """Read until the piece is full or the file ends, by as many reads as that takes."""
    count = 0
    while count < len(piece):
        part = file.read(len(piece) - count) if not hasattr(file, "readinto") else None
        got = file.readinto(piece[count:]) if part is None else len(part)
        if not got:
            break
        if part is not None:
            piece[count : count + got] = part
        count += got
    return count
