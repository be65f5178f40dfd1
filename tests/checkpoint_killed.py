"""Saves that are killed: `checkpoint_killed.py FOLDER TIMES`, for tests of what is left of them.

Forks a child before JAX has started, lets it save one step after another and say so of each, and
kills it at some moment. Ends with a line of JSON: for each child the last step that it said was
saved and what `latest_step` found, and how many temporary folders were left.
"""

import json
import os
import random
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401 - once, not in every child

import optax_lowmem as lowmem
from optax_lowmem import checkpoint

TX = lowmem.flash_adamw(1e-3)
SHAPES = {"a": (256, 512), "b": (33,), "c": (4, 64, 64)}


def contents(step):
    """Weights and state of a step, with other bits at each."""
    params = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in SHAPES.items()}
    rng = np.random.default_rng(step)

    def leaf(x):
        bits = rng.integers(0, 256, x.size * x.dtype.itemsize, np.uint8)
        return jax.device_put(bits.view(x.dtype).reshape(x.shape))  # compiles nothing

    return jax.tree.map(leaf, (params, jax.eval_shape(TX.init, params)))


def saver(folder, pipe, first):
    """Saves until it is killed; a byte says that a step is acknowledged."""
    for step in range(first, first + 1000):
        made = contents(step)
        os.write(pipe, b"(")
        checkpoint.save(folder, TX, *made, step=step, keep=2)
        os.write(pipe, b")")


def inspector(folder, pipe):
    """Restores the newest step, compares every bit, and writes its number."""
    step = checkpoint.latest_step(folder)
    if step is not None:
        wanted = contents(step)
        found = checkpoint.restore(folder, TX, wanted[0])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    os.write(pipe, json.dumps(step).encode())


def forked(task, *args):
    """(process, end of a pipe) of a task in a child."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    try:
        task(*args[:1], write, *args[1:])
    except BaseException as error:  # noqa: BLE001 - its end is all that a child is for
        os.write(write, f" {type(error).__name__}: {error}".encode())
    os._exit(0)


def read_all(pipe):
    said = b""
    while part := os.read(pipe, 4096):
        said += part
    os.close(pipe)
    return said.decode()


def main(folder, times):
    rng, rounds, first = random.Random(0), [], 0
    for _ in range(times):
        process, pipe = forked(saver, folder, first)
        said = os.read(pipe, 1)  # it has begun to save
        time.sleep(rng.uniform(0, 0.6))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        said = said.decode() + read_all(pipe)
        acknowledged = first + said.count(")") - 1
        process, pipe = forked(inspector, folder)
        found = read_all(pipe)
        os.waitpid(process, 0)
        # a save that was killed at once has not made the folder yet
        there = os.listdir(folder) if os.path.isdir(folder) else []
        left = [name for name in there if "tmp" in name]
        rounds.append([said, acknowledged, found, len(left)])
        first = max(acknowledged, json.loads(found) if found.isdigit() else -1) + 1
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
