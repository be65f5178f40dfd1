"""Check that host memory is large enough for the arrays of offloaded training."""

import os
from pathlib import Path

import jax

_GIB = 2**30
_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT = 64  # XLA's: https://github.com/openxla/xla/pull/20633


def free_bytes() -> int | None:
    """Return the free memory of the machine, or of the control group; None if unknown."""
    found = []
    info = _read("/proc/meminfo")
    for line in (info or "").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _read(f"/sys/fs/cgroup/{limit}"), _read(f"/sys/fs/cgroup/{used}")
        if most is None or now is None or not most.strip().isdigit():
            continue
        stat = _read(f"/sys/fs/cgroup/{Path(used).parent}/memory.stat") or ""
        rows = dict(line.split() for line in stat.splitlines())
        found.append(int(most) - int(now) + int(rows.get(inactive, 0)))  # files' pages are freed
    return min(found, default=None)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return None


def check_room(needed: int, what: str, device: jax.Device, pinned: int = 0) -> None:
    """Raise if host memory is too small for `needed` bytes, beside those `pinned` already."""
    needs = f"{what} needs {needed / _GIB:.2f} GiB of pinned host memory"
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(f"{needs}, and {free / _GIB:.2f} GiB are free on this host.")
    if device.platform != "gpu":
        return
    limit = float(os.environ.get(_LIMIT, _DEFAULT_LIMIT))
    if needed + pinned > limit * _GIB:
        raise MemoryError(
            f"{needs} beside {pinned / _GIB:.2f} GiB in use, and XLA pins {limit:g} GiB at most: "
            f"set {_LIMIT}={-(-(needed + pinned) * 9 // (8 * _GIB))} in the environment before JAX "
            "starts."
        )
