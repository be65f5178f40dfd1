"""Print which functions of the package a parameter goes through in each call of a user.

`python -m tests.repo.parameter_path` prints, for each call, how many distinct functions and files
it enters, and how often it goes from one file to another. `--list CALL` prints the functions.
"""

import argparse
import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from unittest import mock

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.kernels import platform
from tests.lowering import lower_for_cuda

PACKAGE = str(Path(lowmem.__file__).parent)
SHAPE = (64, 64)


@contextlib.contextmanager
def recorded(package: str = PACKAGE) -> Iterator[list[CodeType]]:
    """The code of each function of the package that is called inside, in order."""
    calls: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module or the body of a class
        if event == "call" and is_function and code.co_filename.startswith(package):
            if not code.co_name.startswith("<"):  # comprehensions
                calls.append(code)

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def first_time(call: Callable[[], object]) -> list[CodeType]:
    jax.clear_caches()
    with recorded() as calls:
        call()
    return calls


def walks() -> Iterator[tuple[str, list[CodeType]]]:
    """(what is called, the calls in it), each as a process sees it for the first time."""
    tx = lowmem.flash_adamw(1e-3)
    given = {"w": jnp.ones(SHAPE)}
    yield "lowmem.init", first_time(lambda: lowmem.init(tx, given))
    params, state = lowmem.init(tx, given)
    grads = params

    def step(g: object, s: object, p: object) -> object:
        return lowmem.step(tx, g, s, p)

    yield "lowmem.step, CPU", first_time(lambda: jax.jit(step).lower(grads, state, params))
    with mock.patch.object(platform, "no_gpu_reason", lambda: None):
        yield "lowmem.step, CUDA", first_time(lambda: lower_for_cuda(step, grads, state, params))
    with tempfile.TemporaryDirectory() as folder:
        yield (
            "checkpoint.save",
            first_time(lambda: checkpoint.save(folder, tx, params, state, step=0)),
        )
        yield ("checkpoint.restore", first_time(lambda: checkpoint.restore(folder, tx, params)))


def summary(calls: list[CodeType]) -> tuple[int, int, int]:
    """(functions, files, changes of file)."""
    files = [code.co_filename for code in calls]
    changes = sum(a != b for a, b in zip(files, files[1:], strict=False))
    return len(set(calls)), len(set(files)), changes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", help="the call whose functions are printed")
    chosen = parser.parse_args().list
    for name, calls in walks():
        if chosen is None:
            print("{}: {} functions, {} files, {} changes of file".format(name, *summary(calls)))
        elif name == chosen:
            for code in dict.fromkeys(calls):
                file = code.co_filename.removeprefix(PACKAGE)
                print(f"{file}:{code.co_firstlineno} {code.co_qualname}")
