"""Checksums of all files of a checkpoint, computed by the process that wrote each file.

XXH3 detects flipped, moved and exchanged bytes, and takes less time than the copy out of the page
cache. Several threads hash a file in blocks; its checksum is the hash of the blocks' hashes. Its
cost is in docs/internals/checkpoints.md.
"""

# Orbax does not check the arrays' files as it restores (no upstream issue known; Orbax 0.12.8).

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

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


def write_of_process(folder: "epath.Path") -> None:
    """Write the checksums of the files of an item that this process wrote."""
    part = f"process_{jax.process_index()}"  # is in the paths of these files
    paths = [p for p in _files(folder) if any(s.split(".")[-1] == part for s in p.split("/"))]
    _write_checksums(folder, f"checksums.{part}.json", paths)


def write_rest(folder: "epath.Path") -> None:
    """Write the checksums of all other files, including those that `write_of_process` wrote."""
    parts = [path.name for path in folder.glob("checksums.process_*.json")]
    summed = {path for part in parts for path in _read_checksums(folder, part)}
    _write_checksums(folder, NAME, [path for path in _files(folder) if path not in summed])


def _write_checksums(folder: "epath.Path", name: str, paths: list[str]) -> None:
    """Write the checksums of files of an item to a file in the item's folder."""
    paths = [path for path in paths if path != name]
    rows = zip(paths, _checksums(folder, paths), strict=True)
    sums = {path: list(form) for path, form in rows if form}
    (folder / name).write_text(json.dumps({FORM: sums}))


def damaged(folder: "epath.Path") -> Iterator[str]:
    """Yield a message for each file that differs from what was written; none without checksums.

    Each process checks a share of the files. If only other processes find a problem, a process
    yields a message about that, so that all processes fail together.
    """
    if not (folder / NAME).exists():
        return
    known = _read_checksums(folder, NAME)
    parts = [path for path in known if path.startswith("checksums.")]
    for part, form in zip(parts, _checksums(folder, parts), strict=True):
        if _difference(form, known[part]) is None:  # otherwise it is reported below
            known |= _read_checksums(folder, part)
    share = sorted(known)[jax.process_index() :: jax.process_count()]
    results = [
        f"'{folder.name}/{path}' {problem}"
        for path, form in zip(share, _checksums(folder, share), strict=True)
        if (problem := _difference(form, known[path]))
    ]
    if jax.process_count() > 1:
        counts = np.asarray(multihost_utils.process_allgather(np.int32(len(results))))
        if not results and counts.any():
            results = [
                f"process {int(np.argmax(counts > 0))} found damaged files of '{folder.name}'"
            ]
    yield from results


def _difference(form: tuple[int, int] | None, expected: list[int]) -> str | None:
    if form is None:
        return "is missing"
    if form[0] != expected[0]:
        return f"has {form[0]} bytes, but {expected[0]} were written"
    return "has other bytes than were written" if form[1] != expected[1] else None


def _read_checksums(folder: "epath.Path", name: str) -> dict[str, list[int]]:
    result = json.loads((folder / name).read_text())
    if FORM not in result:
        raise ValueError(f"'{folder.name}/{name}' has no checksums of the form '{FORM}'")
    return result[FORM]


def _files(folder: "epath.Path") -> list[str]:
    """Return the paths of all files in a folder, relative to it (an epath has no rglob)."""
    files: list[str] = []
    folders = [folder]
    for parent in folders:
        for path in parent.iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                files.append(path.relative_to(folder).as_posix())
    return sorted(files)


def _checksums(folder: "epath.Path", paths: Sequence[str]) -> list[tuple[int, int] | None]:
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

    hasher, left = xxhash.xxh3_64(), _BLOCK
    with path.open("rb") as file:
        file.seek(start)
        while left and (piece := file.read(min(_PIECE, left))):
            hasher.update(piece)
            left -= len(piece)
    return hasher.digest()
