"""A run of examples/train_llama.py, and what its step plans beside the backward pass.

    python -m benchmarks.account --preset 8b --steps 12 --release --record FILE

The arguments are those of the example, but for --offload.
"""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train_llama
from _gpt.train import planned_bytes
from _llama import train
from _llama.config import Settings

import optax_lowmem as lowmem
from benchmarks import example_records
from benchmarks.render import GIB


def planned(program: train.Program) -> dict[str, float]:
    """Return the bytes per device of a step, as planned by the compiler."""
    settings, model, (params, _) = program.settings, program.model, program.like
    rows = settings.batch // settings.accumulate
    tokens = program.tokens.update(shape=(rows, *program.tokens.shape[1:]))
    # without gradients of weights
    alone = jax.jit(lambda *args: jax.value_and_grad(model.beyond)(model.first(*args), *args))
    backward = alone.lower(params, tokens).compile().memory_analysis().temp_size_in_bytes
    total = planned_bytes(program.compiled)
    given = program.compiled.memory_analysis().argument_size_in_bytes
    parameters = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(params))
    return {
        "argument_bytes": given,
        "temporary_bytes": total - given,
        "backward_bytes": backward,
        "beside_backward": (total - backward) / parameters,
    }


def optimizer_share(run: train.Run, program: train.Program) -> float:
    """Return the optimizer's part of a step's time; its steps change the weights."""

    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        return lowmem.step(program.tx, grads, state, params)

    grads = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))(run.params)
    update = jax.jit(step, donate_argnums=(1, 2), out_shardings=program.shardings)
    update, seconds = update.lower(grads, run.params, run.state).compile(), []
    for _ in range(5):
        begin = time.perf_counter()
        run.params, run.state = jax.block_until_ready(update(grads, run.params, run.state))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)) / run.step_s


def main(words: Sequence[str]) -> dict[str, float]:
    """Run the example; print and record what it does not."""
    args = train_llama.parse_arguments(words)
    settings = train_llama.make_settings(args)
    program = train.make_program(settings)
    found = planned(program)
    gib = {n: found[f"{n}_bytes"] / GIB for n in ("argument", "temporary", "backward")}
    print(
        f"planned: {gib['argument']:.3f} GiB of weights and state and {gib['temporary']:.3f} GiB "
        f"beside, where forward and backward alone take {gib['backward']:.3f} GiB: the rest is "
        f"{found['beside_backward']:.2f} bytes per parameter"
    )
    keep(args, settings, program, found)  # also where the run has no memory
    result = train_llama.main(words)
    if not settings.release:
        share = {"optimizer_share": optimizer_share(result.run, result.program)}
        print(f"optimizer {share['optimizer_share']:.1%} of a step")
        keep(args, settings, program, share)
        found |= share
    return found | result.numbers


def keep(args: Any, settings: Settings, program: train.Program, found: dict[str, float]) -> None:
    """Append records."""
    if args.record:
        append = example_records.append_llama
        append(settings, program.settings, program.report, found, args.record)


if __name__ == "__main__":
    main(sys.argv[1:])
