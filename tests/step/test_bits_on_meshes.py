"""Bit equality between one device and eight: the table of docs/guides/sharding.md, row by row."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem.sharding import state_shardings
from tests.compilation import SAME_BITS
from tests.step.test_sharding import (
    LAYOUTS,
    LEARNING_RATE,
    PARTITIONS_CALLS,
    gradients,
    laid_out,
    made,
    masters,
    nearly,
)
from tests.tiers import rows

ROOT = Path(__file__).parents[2]
COMPRESSED = dict(mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt())
# the first column of the table -> what it is of
EVERY_BIT = {
    **{name: lambda name=name: made(name) for name in ("flash_adamw", "flash_adam", "flash_lion")},
    **{name: lambda name=name: made(name) for name in ("flash_sgd", "q_adamw")},
    'accumulate_gradients(into="bfloat16")': lambda: lowmem.accumulate_gradients(
        made("flash_adamw"), 2, into="bfloat16"
    ),
    "split_master_weights(compress_state(optax.adamw))": lambda: lowmem.split_master_weights(
        lowmem.compress_state(optax.adamw(LEARNING_RATE), **COMPRESSED)
    ),
}
LAST_BITS = {
    **{name: lambda name=name: made(name) for name in ("stable_adamw", "coat_adamw")},
    **{name: lambda name=name: made(name) for name in ("flash_adam_mini", "q_adam_mini")},
    **{name: lambda name=name: made(name) for name in ("flash_muon", "flash_factored_adamw")},
    "chain(clip_by_global_norm)": lambda: lowmem.chain(
        optax.clip_by_global_norm(1e-2), made("flash_adamw")
    ),
}


def stepped(tx, layout, steps):
    """Some steps, each a jit of its own, on one device or as a layout has it."""
    params, state = lowmem.init(tx, masters(), jnp.bfloat16)
    how = {}
    if layout is not None:
        of_params, zero_axis = laid_out(LAYOUTS[layout])
        of_state = state_shardings(tx, params, of_params, zero_axis=zero_axis)
        on_host = jax.device_get((params, state))  # as in test_sharding.py
        params, state = jax.device_put(on_host, (of_params, of_state))
        how = dict(out_shardings=(of_params, of_state))

    def step(params, state, grads):
        return lowmem.step(tx, grads, state, params)

    step = jax.jit(step, compiler_options=SAME_BITS, **how)
    for i in range(steps):
        params, state = step(params, state, jax.tree.map(lambda g, i=i: g[i], gradients()))
    return params, state


# of the others, the default tier has a layout each in tests/step/test_sharding.py
@pytest.mark.parametrize("name", rows(EVERY_BIT, ["flash_adamw"]))
def test_every_bit(name):
    """All bits are equal; where JAX partitions the CPU path's calls, at most 4 elements differ."""
    tx = EVERY_BIT[name]()
    found, wanted = stepped(tx, "both", 4), stepped(tx, None, 4)
    different = 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        different += int((np.asarray(a) != np.asarray(b)).sum())
    assert different <= (4 if PARTITIONS_CALLS else 0)


@pytest.mark.parametrize("name", rows(LAST_BITS, ["chain(clip_by_global_norm)"]))
def test_last_bits(name):
    """One step from the same state; afterwards stochastic rounding leads elsewhere."""
    tx = LAST_BITS[name]()
    pairs = (stepped(tx, "both", 1), stepped(tx, None, 1))
    of_optimizer = [(p, s if hasattr(s, "_replace") else s[-1]) for p, s in pairs]  # of a chain's
    nearly(*of_optimizer)


def test_the_table_has_every_optimizer():
    text = (ROOT / "docs" / "guides" / "sharding.md").read_text()
    section = text.split("## Which bits are the same")[1].split("\n## ")[0]
    lines = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    of_table = {kind: set() for kind in ("every bit", "all but last bits")}
    for names, kind in lines:
        of_table[kind.strip()] |= set(re.findall(r"`([^`]+)`", names))
    assert of_table["every bit"] == set(EVERY_BIT)
    assert of_table["all but last bits"] == set(LAST_BITS)
    assert set(lowmem.OPTIMIZERS) <= set(EVERY_BIT) | set(LAST_BITS)
