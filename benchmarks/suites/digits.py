"""Many seeds of examples/train_digits.py, `--together` of them in a program; see its --help too."""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
import train_digits
from _gpt.arguments import compute_dtype, positive
from _gpt.train import F32, LOWMEM, bytes_by_slot

from benchmarks.training import say


def results(
    impl: str, digits: train_digits.Digits, args: argparse.Namespace, together: int
) -> list[dict[str, float]]:
    """Train from every seed; return the metrics of each."""
    tx = train_digits.optimizer(impl, args.steps)
    run = train_digits.trainer(impl, tx, digits, args)

    def train(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(*train_digits.start(impl, tx, seed), jax.random.fold_in(jax.random.key(seed), 1))

    params, _ = jax.eval_shape(lambda: train_digits.start(impl, tx, np.uint32(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    size = bytes_by_slot(tx, params)["total"] / count
    compiled, found = jax.jit(jax.vmap(train)), []
    seeds = np.arange(args.seed, args.seed + args.seeds, dtype=np.uint32)
    for some in np.split(seeds, range(together, len(seeds), together)):
        began = time.perf_counter()
        values = np.stack(compiled(some), 1).astype(float)
        found += [
            dict(zip(train_digits.UNITS, [*one, size], strict=True)) | {"parameters": count}
            for one in values.tolist()
        ]
        seconds = time.perf_counter() - began
        say(f"{impl}, seeds {some[0]} to {some[-1]}: {values.mean(0)} in {seconds:.1f} s")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--together", type=positive, default=60, help="default: 60")
    own, others = parser.parse_known_args(arguments)
    args = train_digits.parse_arguments(others)
    # a step under vmap has no kernel
    args.compute, args.implementation = compute_dtype(args.compute), "xla"
    digits = train_digits.load()
    runs = {impl: results(impl, digits, args, own.together) for impl in (F32, LOWMEM)}
    if args.record:
        train_digits.append(runs, args)
