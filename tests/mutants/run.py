"""Runs each mutant's tests on a copy of the package with its bug: `make mutants`.

A mutant is a small, plausible bug as a substitution of text, in mutants.toml. It names the text and
no file, so that it survives moves of code. It is caught when its tests, which pass on the package
as it is, fail on the copy.
"""

import argparse
import dataclasses
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = "optax_lowmem"
PINS = REPO / ".ci/jax"
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = (PACKAGE, "tests", "pyproject.toml")
TIER = "not gpu and not tpu and not repo and not full"  # as in `make test`
LIMIT = 300  # seconds for the tests of one mutant
FAILED = 1  # pytest's exit status for tests that failed; others say that it could not run them


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug, and the tests that notice it.

    Attributes:
      name: in the printed table.
      find: text that occurs once in the package.
      replace: what stands there in the mutant.
      killed_by: pytest's ids of tests, of which each alone notices it, or `file::function`.
      jax: the files of pins in .ci/jax with whose versions they notice it; none: with every one.
    """

    name: str
    find: str
    replace: str
    killed_by: tuple[str, ...]
    jax: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str  # "caught", "survived", or what went wrong
    seconds: float


def table(path: Path = TABLE) -> list[Mutant]:
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{key: tuple(value) if isinstance(value, list) else value
                      for key, value in row.items()}) for row in rows]  # fmt: skip


def jax_here() -> str:
    """The name of the file of pins in .ci/jax that has the installed version of JAX."""
    installed = version("jax")
    return installed if (PINS / f"{installed}.txt").exists() else "newest"


def sources(root: Path = REPO) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((root / PACKAGE).rglob("*.py"))}


def place(mutant: Mutant, texts: dict[Path, str]) -> Path:
    """The one file that has a mutant's text.

    Raises:
      ValueError: where the text is nowhere, or more than once.
    """
    counts = {path: text.count(mutant.find) for path, text in texts.items()}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        where = ", ".join(path.name for path in found) or "no file"
        raise ValueError(
            f"mutant '{mutant.name}': its text occurs {sum(counts.values())} times ({where}), not "
            f"once: {mutant.find!r}. Follow the code that it is about."
        )
    return found[0]


def mutated(mutant: Mutant, texts: dict[Path, str]) -> str:
    """The text of the mutant's file with the bug."""
    return texts[place(mutant, texts)].replace(mutant.find, mutant.replace)


def copy_to(folder: Path) -> None:
    for name in COPIED:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name)  # compiled modules too
        else:
            shutil.copy2(REPO / name, folder / name)


def pytest(folder: Path, tests: list[str], limit: float | None = None) -> tuple[int | None, str]:
    """Pytest's exit status (None past the limit) and output, on the package of a folder."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", TIER, *tests]
    # a cached program would keep the partitioning that a bug changes: it is not part of JAX's key
    env = {**os.environ, "PYTHONPATH": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, folder: Path) -> Outcome:
    """Runs the mutant's tests on a copy, which is the package again afterwards."""
    start, texts = time.monotonic(), sources(folder)
    path = place(mutant, texts)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    path.write_text(mutated(mutant, texts))
    try:
        status, output = pytest(folder, list(mutant.killed_by), LIMIT)
    finally:
        path.write_text(texts[path])
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    if status == FAILED:
        verdict = "caught"
    elif status == 0:
        verdict = "SURVIVED"
    else:
        last = output.strip().splitlines()[-1:] or [f"no end within {LIMIT} s"]
        verdict = f"BROKEN (pytest's status {status}): {last[0]}"
    return Outcome(mutant, verdict, time.monotonic() - start)


def unmutated(mutants: list[Mutant], folder: Path) -> bool:
    """Run the tests on the package as it is and return whether they pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.killed_by))
    start = time.monotonic()
    status, output = pytest(folder, tests)
    print(f"{'as it is':<44}{time.monotonic() - start:>6.1f} s  {len(tests)} tests", flush=True)
    if status != 0:
        print(output, f"These tests do not pass on the package as it is (status {status}).")
    return status == 0


def run(mutants: list[Mutant], jobs: int) -> bool:
    """Prints a row for each mutant; whether all were caught."""
    texts = sources()
    for mutant in mutants:
        place(mutant, texts)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            folder = Path(scratch) / str(job)
            folder.mkdir()
            copy_to(folder)
            folders.put(folder)

        def one(mutant: Mutant) -> Outcome:
            folder = folders.get()
            try:
                outcome = judge(mutant, folder)
            finally:
                folders.put(folder)
            print(f"{mutant.name:<44}{outcome.seconds:>6.1f} s  {outcome.verdict}", flush=True)
            return outcome

        clean = folders.get()
        passes = unmutated(mutants, clean)
        folders.put(clean)
        if not passes:
            return False
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(one, mutants))
    others = [outcome for outcome in outcomes if outcome.verdict != "caught"]
    print(
        f"{len(outcomes) - len(others)} of {len(outcomes)} mutants caught in "
        f"{time.monotonic() - start:.0f} s"
    )
    for outcome in others:
        print(f"  {outcome.mutant.name}: {outcome.verdict}")
    return not others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to run (all); part of a name will do")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    args = parser.parse_args()
    mutants = [m for m in table() if not args.names or any(n in m.name for n in args.names)]
    mutants = [m for m in mutants if not m.jax or jax_here() in m.jax]
    if not mutants:
        parser.error(f"no mutant is called {' or '.join(args.names)}")
    return 0 if run(mutants, args.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
