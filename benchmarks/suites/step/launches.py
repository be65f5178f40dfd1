"""Steps compiled for an H100 that is not there: launches, and the bytes that they move.

JAX_PLATFORMS=cpu python -m benchmarks.run launches --record       # jax[cuda12]

Nothing is run or timed. `benchmarks.absent_gpu` says what is counted; a step may take the place of
weights and state.
"""

import argparse
from collections.abc import Iterator

import jax

from benchmarks import absent_gpu, records
from benchmarks.peers import cases, in_jax
from benchmarks.records import Rows

OPTIMIZERS = ("adamw", "lion", "sgd", "coat_adamw", "flash_adam_mini", "flash_factored_adamw")


@records.suite(
    leaf_set={"default": "llama-3.2-1b", "choices": tuple(cases.LEAF_SETS)},
    optimizer={"nargs": "+", "default": OPTIMIZERS, "choices": tuple(cases.OPTIMIZERS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    on, like = absent_gpu.mesh(), cases.LEAF_SETS[args.leaf_set]()
    for optimizer in args.optimizer:
        made = in_jax.make("lowmem.step", args.leaf_set, optimizer)
        params = jax.tree.map(lambda x, t=made.dtype: jax.ShapeDtypeStruct(x.shape, t), like)
        state = jax.eval_shape(made.init, params)
        text = absent_gpu.program(on, made.step, params, state, params, donated=(1, 2))
        found = [(times, times * size) for times, _, size in absent_gpu.kernels(text)]
        times, moved = map(sum, zip(*found, strict=True))
        each = moved / cases.parameters(args.leaf_set)
        values = {"launches": (times, ""), "moved_bytes_per_param": (each, "B")}
        case, device = f"{args.leaf_set}/{optimizer}", records.H100_NEVER_RUN
        yield records.records_of("launches", case, "lowmem.step", values, device=device)
