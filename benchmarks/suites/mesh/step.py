"""The optimizer's step of a Llama of the examples, its arrays cut over a mesh as they train it.

A process of `benchmarks.run mesh`, which says on its standard input what to measure.
"""

import functools
import json
import sys
from typing import Any

import jax
import train_llama
from _gpt.train import F32, LOWMEM, optimizer_step
from _llama import mesh, train
from _llama.config import PLAIN, PRESETS, Settings  # noqa: F401 (PRESETS for the benchmark)

from benchmarks.peers import cases, device_loop
from benchmarks.peers.in_jax import Implementation


class Setup:
    """Shapes of weights, state and gradients as a run begins; made when it is called."""

    def __init__(self, program: train.Program) -> None:
        params, state = program.like
        self.program, self.shapes = program, (params, state, params)

    def __call__(self) -> device_loop.Carry:
        """Return weights and state, and gradients as random as the weights, which lie alike."""
        params, state = self.program.start()
        small, where = cases.GRADIENT_SCALE / cases.WEIGHT_SCALE, self.program.shardings[0]
        scaled = jax.jit(lambda tree: jax.tree.map(lambda w: w * small, tree), out_shardings=where)
        return params, state, scaled(params)


def runner(settings: Settings, steps: int) -> device_loop.Runner:
    """The step of arrays that are cut, as the example takes it."""
    program = train.make_program(settings)
    plain, where = settings.optimizer == PLAIN, program.shardings
    the_mesh = jax.tree.leaves(where[0])[0].mesh
    take = functools.partial(
        optimizer_step(F32 if plain else LOWMEM, settings.implementation),
        program.tx, **({} if plain else mesh.step_placement(where[1], the_mesh)),
    )  # fmt: skip

    def kept(*args: Any) -> Any:
        # what a loop hands on must lie as it was, and nothing else says so
        return jax.lax.with_sharding_constraint(take(*args), where)

    # where results lie is said again, or XLA pairs them with donated arrays of the same shape by
    # its own lights, and copies
    made = Implementation(program.tx.init, kept, None, shardings=where)
    return device_loop.Runner(made, Setup(program), lambda moved: steps)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Times and bytes of a step, by the example's `words`, `steps` of one call, and `repeats`."""
    arguments = train_llama.parse_arguments(job["words"])
    own = runner(train_llama.make_settings(arguments), job["steps"])
    own.start()
    found = own.found | {"device_bytes": own.make.program.device_bytes}
    return {"times": [own.time() for _ in range(job["repeats"])], **found}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
