"""A small model's own gradients in 8 bits, against the tokens that they are a sum over."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.curves import Curves
from benchmarks.suites.switchback.training import PRESETS, Experiment, Remedied
from optax_lowmem import layers

FORWARD, WEIGHT = "forward and input gradient in int8", "the weight gradient's product in int8"


def of_part(stored: Curves, part: str) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """The runs of a part by their variant, and what they share."""
    mine = {k.partition("/")[2]: v for k, v in stored.runs.items() if k.startswith(f"{part}/")}
    return mine, stored.about[part]


def trained(text: Any, calls: int) -> Any:
    """The weights of the tiny model after `calls` calls of training, without 8 bits."""
    experiment = Experiment(PRESETS["cpu"]["run"], text, seed=0)
    program = experiment.lower("standard")
    (params, state), steps = program.start(), program.steps.compile()
    for starts in experiment.offsets[:calls]:
        params, state, _ = steps(params, state, text.tokens, starts)
    return params


def gradient_errors(params: Any, text: Any, batches: tuple[int, ...]) -> dict[str, list[float]]:
    """Squared errors of the layers' matrices' gradients over their squares, for batches of windows.

    LLM.int8() is SwitchBackQ with an 8-bit weight gradient: what they differ by is that product's.
    """
    run = PRESETS["cpu"]["run"]

    def matrices(kind: str, windows: jax.Array) -> list[jax.Array]:
        dot_general = layers.switchback_dot_general(kind)
        model = Remedied(run.shape, run.compute, dot_general=dot_general)
        grads = jax.grad(model)(params, windows)["layers"]
        return [leaf for leaf in jax.tree.leaves(grads) if leaf.ndim > 2]

    def square(trees: Any) -> jax.Array:
        return sum(jnp.sum(leaf**2) for leaf in trees)

    @jax.jit
    def errors(windows: jax.Array) -> dict[str, jax.Array]:
        plain, q, llm = (
            matrices(kind, windows) for kind in ("standard", "switchback_q", "llm_int8")
        )
        found = {FORWARD: (q, plain), WEIGHT: (llm, q)}
        return {
            name: square([a - b for a, b in zip(*pair, strict=True)]) / square(plain)
            for name, pair in found.items()
        }

    rows = []
    for batch in batches:
        starts = np.linspace(0, text.last - run.context - 1, batch).astype(np.int32)
        windows = text.tokens[starts[:, None] + np.arange(run.context + 1)].astype(jnp.int32)
        rows.append({name: float(value) for name, value in errors(windows).items()})
    return {name: [row[name] for row in rows] for name in rows[0]}
