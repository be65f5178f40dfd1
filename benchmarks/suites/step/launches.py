"""Kernels that a step launches and bytes that they move, compiled for an H100.

JAX_PLATFORMS=cpu python -m benchmarks.run launches --record   # jax[cuda12], and no GPU

Nothing is run or timed: `benchmarks.absent_gpu` says what is counted. A step may take the place of
weights and state.
"""

import argparse
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from benchmarks import absent_gpu, records
from benchmarks.peers import cases, in_jax
from benchmarks.records import Rows

LEAF_SET = "llama-3.2-1b"
OPTIMIZERS = ("adamw", "lion", "sgd", "coat_adamw", "flash_adam_mini", "flash_factored_adamw")


def count(on: Mesh, leaf_set: str, optimizer: str) -> tuple[int, int]:
    """Launches of a step, and the bytes that they move, on the device of a mesh."""
    made = in_jax.make("lowmem.step", leaf_set, optimizer)
    like = cases.LEAF_SETS[leaf_set]()
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, made.dtype), like)
    state = jax.eval_shape(made.init, params)
    text = absent_gpu.program(on, made.step, params, state, params, donated=(1, 2))
    found = [(times, times * size) for times, _, size in absent_gpu.kernels(text)]
    launches, moved = map(sum, zip(*found, strict=True))
    return launches, moved


@records.suite(
    leaf_set={"default": LEAF_SET, "choices": tuple(cases.LEAF_SETS)},
    optimizer={"nargs": "+", "default": OPTIMIZERS, "choices": tuple(cases.OPTIMIZERS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    on = absent_gpu.mesh()
    size, device = cases.parameters(args.leaf_set), records.H100_NEVER_RUN
    for optimizer in args.optimizer:
        launches, moved = count(on, args.leaf_set, optimizer)
        values = {"launches": (launches, ""), "moved_bytes_per_param": (moved / size, "B")}
        case = f"{args.leaf_set}/{optimizer}"
        yield records.records_of("launches", case, "lowmem.step", values, device=device)
