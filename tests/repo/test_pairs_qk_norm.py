"""QK normalization of the paired runs' GPT-2."""

import jax
import numpy as np
import pytest

pytest.importorskip("flax.nnx")

from benchmarks.suites.pairs import training  # noqa: E402
from benchmarks.suites.pairs.presets import PRESETS  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)


@pytest.mark.parametrize("name", ["smoke-gpt2", "smoke-gpt2-qk"])
def test_the_scale_of_queries_and_keys(name):
    """It cancels where they are normalized, and only there."""
    run = PRESETS[name]
    weights, loss = training.model(run, run.vocab, "standard")
    params = weights(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, run.context + 1), 0, run.vocab)
    before = loss(params, tokens)
    width = run.shape.width
    for block in params["h"].values():
        kernel = block["attn"]["c_attn"]["kernel"]
        block["attn"]["c_attn"]["kernel"] = kernel.at[:, : 2 * width].multiply(30)
    same = np.isclose(before, loss(params, tokens), rtol=1e-5)
    assert same == (name == "smoke-gpt2-qk")
