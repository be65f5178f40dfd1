"""Count the functions and files of the library that one leaf crosses, in a fresh process.

`python -m tests.repo.leaf_path [--list]` prints a line of JSON: for building `flash_adamw`, for
`lowmem.init` and for `lowmem.step` lowered to the CUDA kernel the distinct functions, the files,
and how often control passes from one file to another; with `--list` the functions too.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

import optax_lowmem as lowmem
from optax_lowmem._src.core import platform
from tests.lowering import gpu_mesh

ROOT = os.path.dirname(lowmem.__file__) + os.sep


def path_of(work):
    """Return what is called of the library, {file: functions}, the changes of file, the result."""
    files, changes, last = {}, 0, None

    def profile(frame, event, arg):
        nonlocal changes, last
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and "<" not in code.co_name:
            file = code.co_filename.removeprefix(ROOT)
            files.setdefault(file, set()).add(code.co_qualname)
            changes += last != file
            last = file

    sys.setprofile(profile)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return files, changes, result


def main():
    platform.no_device_reason = lambda: None  # as on a machine with one GPU
    params = {"w": jnp.ones((128, 256)) * 0.1}
    grads = {"w": jnp.ones((128, 256), jnp.bfloat16)}
    stages = {}

    def stage(name, work):
        files, changes, result = path_of(work)
        stages[name] = [sum(map(len, files.values())), len(files), changes]
        if "--list" in sys.argv:
            for file, names in files.items():
                print(f"{name}: {file}: {', '.join(sorted(names))}")
        return result

    tx = stage("build", lambda: lowmem.flash_adamw(1e-3, weight_decay=0.1))
    weights, state = stage("init", lambda: lowmem.init(tx, params))
    jax.device_count = lambda *_: 1
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))

    def lowered():
        with use_abstract_mesh(gpu_mesh()):
            return step.trace(grads, state, weights).lower(lowering_platforms=("cuda",))

    stage("step", lowered)
    print(json.dumps(stages))


if __name__ == "__main__":
    main()
