"""A large GPU with the free memory of a smaller one: another process allocates the rest of it.

    python -m benchmarks.small_gpu 23.0    # leaves 23.0 GiB free until its standard input ends

This bounds all that a program takes of the GPU: its CUDA context, its libraries, and allocators
that enforce no limit of their own, such as `cuda_async`.
"""

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import ROOT
from benchmarks.render import GIB

_COMMAND = [sys.executable, "-m", "benchmarks.small_gpu"]


def fill(free_gib: float) -> float:
    """Allocate memory of the first visible GPU, and return how many GiB are free after that.

    Args:
      free_gib: GiB to leave free.

    Raises:
      RuntimeError: the driver reports an error, or less is free already.
    """
    driver = ctypes.CDLL("libcuda.so.1")  # without JAX, which would allocate more

    def call(name: str, *args: object) -> None:
        if code := getattr(driver, name)(*args):
            raise RuntimeError(f"{name} returned CUDA error {code}")

    def free_bytes() -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    rest = free_bytes() - int(free_gib * GIB)
    if rest <= 0:
        raise RuntimeError(f"{free_bytes() / GIB:.1f} GiB are free, asked to leave {free_gib:.1f}")
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rest))
    return free_bytes() / GIB


@contextlib.contextmanager
def leaving(free_gib: float) -> Iterator[subprocess.Popen[str]]:
    """Run `fill` in another process while the body runs; a RuntimeError where it fails."""
    pipe, command = subprocess.PIPE, [*_COMMAND, str(free_gib)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"{' '.join(command)} failed; its message is printed above")
        print(line, end="", flush=True)
        try:
            yield process
        finally:
            process.stdin.close()  # which ends it


if __name__ == "__main__":
    print(f"{fill(float(sys.argv[1])):.2f} GiB of the GPU are free", flush=True)
    sys.stdin.read()
