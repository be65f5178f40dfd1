"""Command-line options, exit codes and the progress bar that the examples share."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich import progress as bars

OUT_OF_MEMORY, INTERRUPTED = 3, 130  # exit codes


def free_bytes() -> int:
    """Return the free memory of this machine, or of the container that the process runs in."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        most, now = ((group / f"memory.{name}").read_text("utf-8") for name in ("max", "current"))
        rows = dict(
            line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines()
        )
        files = int(rows.get("inactive_file", 0))  # pages that are freed when memory is short
        return min(free, int(most) - int(now) + files)
    except (OSError, ValueError):  # no container, or none with a limit ("max")
        return free


def allow_pinned_memory() -> None:
    """Let XLA pin most of the free host memory (by default 64 GiB); before JAX begins.

    XLA pins more than it needs, in regions of which each is twice as large as the one before.
    """
    limit = int(0.92 * free_bytes() / 2**30)
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(limit, 1)))


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Return whether XLA ran out of memory; a CPU's error has the second text only."""
    return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory"))


def out_of_memory_message(error: jax.errors.JaxRuntimeError, offload: str | bool | None) -> str:
    """Return XLA's message; with `offload`, also what to try."""
    message = str(error).splitlines()[0]
    if offload and "XLA_PYTHON_CLIENT_ALLOCATOR" not in os.environ:
        message += (
            "\nFree memory may be divided into pieces that are too small: set "
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, with which steps take longer."
        )
    return message


def number(limits: str, is_allowed: Callable[[Any], bool], kind: type = float) -> Callable:
    """Return a type of argparse."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r}")

    return read


positive = number("at least 1", lambda x: x >= 1, int)


def preset_values(presets: Mapping[str, Any], name: str) -> str:
    """Return a field of the presets as text, for the help of an option that replaces it."""
    by_value: dict[str, list[str]] = {}
    for preset, values in presets.items():
        value = getattr(values, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        by_value.setdefault(shown, []).append(preset)
    told = "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
    return f"default: {told}"


def rate_factors(factors: Mapping[str, float]) -> str:
    """Return the factors of a preset's learning rate as text, for the help of `--lr`."""
    unlike = ", ".join(f"{factor:g} for {name}" for name, factor in factors.items() if factor != 1)
    return f"the optimizer's factor ({unlike}, 1 for others)"


def add_common(add: Callable[..., object]) -> None:
    """Adds what every example has; `add` is a parser's `add_argument`."""
    add("--compute", choices=("auto", "float32", "bfloat16"), default="auto",
        help="dtype of matrix products; auto: float32 on a CPU, bfloat16 elsewhere")  # fmt: skip
    add("--implementation", default="auto", metavar="NAME",
        help="of lowmem.step: auto (the fastest there is), xla (plain jnp), ...")  # fmt: skip
    add("--seed", type=int, default=0, help="of the weights, the batches and the rounding")
    add("--record", type=Path, metavar="FILE", help="append benchmark records (JSON lines)")


def changed(preset: Any, kind: type, given: Mapping[str, Any]) -> Any:
    """Return the settings of a run: a preset's, but for those that are given and not None."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**vars(preset) | {k: x for k, x in given.items() if k in names and x is not None})


def compute_dtype(chosen: str) -> str:
    """The dtype that `--compute` means on this machine."""
    if chosen != "auto":
        return chosen
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def records_of_examples() -> Any:
    """Return the module that `--record` needs, of the repository beside the library."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from benchmarks import example_records

    return example_records


def progress_bar(title: str, **more: Any) -> bars.Progress:
    """Return a bar with a title, and after it the field `now` of its task."""
    left, right = bars.TextColumn(title), bars.TextColumn("{task.fields[now]}")
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
    return bars.Progress(left, *columns, right, **more)
