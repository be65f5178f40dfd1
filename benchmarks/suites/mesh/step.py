"""The optimizer's step of a Llama of the examples, its arrays cut over a mesh as they train it.

A process of `benchmarks.run mesh`, which says on its standard input what to measure.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import train_llama
from _gpt.train import F32, LOWMEM, optimizer_step
from _llama import mesh, train
from _llama.config import PLAIN, PRESETS, Settings  # noqa: F401 (PRESETS for the benchmark)

from benchmarks.peers import cases, device_loop


class Runner(device_loop.Runner):
    """`device_loop.Runner`, of arrays that are cut; bytes are those of one device."""

    def __init__(self, settings: Settings, steps: int) -> None:
        program = train.make_program(settings)
        params, state = program.like
        carry = params, state, params  # a gradient lies where its weight does
        take = _step(settings, program)

        def kept(params: Any, state: Any) -> tuple[Any, Any]:
            # what a loop hands on must lie as it was, and nothing else says so
            return jax.lax.with_sharding_constraint((params, state), program.shardings)

        # where results lie is said here too, or XLA pairs them with donated arrays of the same
        # shape by its own lights, and copies
        step = jax.jit(take, donate_argnums=(1, 2), out_shardings=program.shardings)
        self.step = step.lower(params, state, params).compile()
        loop = device_loop.looped(lambda *args: kept(*take(*args)), steps)
        self.loop = loop.lower(carry).compile()
        no_loop = device_loop.looped(lambda grads, state, params: kept(params, state), 0)
        self.no_loop = no_loop.lower(carry).compile()
        self.make, self.steps = functools.partial(_start, program), steps
        self.found = {
            "device_bytes": program.device_bytes,
            "live_bytes": device_loop.live_bytes(jax.tree.map(_part, carry)),
            "temp_bytes": self.step.memory_analysis().temp_size_in_bytes,
            "loop_temp_bytes": self.loop.memory_analysis().temp_size_in_bytes,
            "steps": steps,
        }


def _step(settings: Settings, program: train.Program) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(gradients, state, weights) -> (weights, state), as the example takes it."""
    plain = settings.optimizer == PLAIN
    take = optimizer_step(F32 if plain else LOWMEM, settings.implementation)
    of_weights, of_state = program.shardings
    the_mesh = jax.tree.leaves(of_weights)[0].mesh
    where = {} if plain else mesh.step_placement(of_state, the_mesh)
    return functools.partial(take, program.tx, **where)


def _start(program: train.Program) -> device_loop.Carry:
    """Weights and state as a run begins, and gradients as random as the weights."""
    params, state = program.start()
    small = cases.GRADIENT_SCALE / cases.WEIGHT_SCALE
    scaled = jax.jit(
        lambda tree: jax.tree.map(lambda w: w * small, tree), out_shardings=program.shardings[0]
    )
    return params, state, scaled(params)


def _part(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of one device's shard of a leaf."""
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Times and bytes of a step.

    Args:
      job: `words` of the example's command line, `steps` of one call, and `repeats`.
    """
    arguments = train_llama.parse_arguments(job["words"])
    runner = Runner(train_llama.make_settings(arguments), job["steps"])
    runner.start()
    return {"times": [runner.time() for _ in range(job["repeats"])], **runner.found}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
