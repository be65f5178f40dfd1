"""The memory that the compiler plans for whole training steps of a Llama on one chip."""

import math

import jax
import numpy as np
import pytest
from _llama import config, train
from _llama import mesh as meshes
from jax.sharding import AxisType, Mesh

from benchmarks.suites.tpu import chips
from tests.tiers import rows

pytestmark = pytest.mark.tpu

# chip, model, sequences of a batch: the largest that fits, at 2,048 tokens
EVERY = [("v5e", "1b", 1), ("v5e", "1b", 2), ("v6e", "1b", 4), ("v6e", "3b", 1)]
IN_CI = [("v5e", "350m", 4)]
OF_MEMORY = 0.97  # that a program can have; the runtime takes the rest


def settings(preset, batch):
    of = config.PRESETS[preset]
    return config.Settings(
        preset=preset, optimizer="flash_adamw", shape=of.shape, sequence=of.sequence, batch=batch,
        steps=1, learning_rate=of.learning_rate, text="random", remat="full", compute="bfloat16",
        seed=0, attention="xla", activations="lean", stacked=True, unroll=1,
    )  # fmt: skip


@pytest.mark.parametrize(("chip", "preset", "batch"), rows([*EVERY, *IN_CI], IN_CI))
def test_a_training_step_fits(chip, preset, batch, monkeypatch):
    """Weights, state, gradients and activations, in place but for the loss."""
    devices = np.reshape(chips.mesh(chip).devices, (1, 1, 1))
    mesh = Mesh(devices, meshes.AXES, axis_types=(AxisType.Auto,) * 3)
    monkeypatch.setattr(meshes, "make_mesh", lambda settings: mesh)
    # the examples broadcast, which tests of the library must not
    with (
        jax.numpy_rank_promotion("allow"),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        program = train.make_program(settings(preset, batch))
        memory = program.step.lower(*program.like, program.tokens).compile().memory_analysis()
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.like))
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(program.like[0]))
    assert memory.alias_size_in_bytes >= own and 5.1 < own / parameters < 5.3
    planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert planned + 2 * parameters > own  # gradients are somewhere
    assert planned <= OF_MEMORY * chips.CHIPS[chip]
