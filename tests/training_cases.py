"""Quick programs and an easily learnt text, shared by the tests of the training benchmarks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training import Text
from tests.contract_cases import QUICK_COMPILE


@pytest.fixture(autouse=True)
def as_users_do(monkeypatch):
    """Models broadcast; only the library is held to explicit ranks. Programs compile quickly."""
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda own: compiled(own, QUICK_COMPILE))
    with jax.numpy_rank_promotion("allow"):
        yield


def text_for(context: int, vocab: int = 256) -> Text:
    """Tokens of which each follows from the one before, so that a few steps learn something."""
    tokens = jnp.asarray(np.arange(5000) * 7 % vocab, jnp.uint16)
    windows = tokens[jnp.arange(8)[:, None] * 100 + jnp.arange(context + 1)]
    return Text(tokens, windows.reshape(2, 4, -1).astype(int), vocab, 0.5, 1.0)
