"""`tx.update(grads, state)`, as loops of Brax and Haiku call it."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from tests.contract_cases import assert_same
from tests.tiers import rows

PARAMS = {"w": jnp.linspace(-1, 1, 6144).reshape(48, 128), "b": jnp.ones(8), "s": jnp.float32(2)}
GRADS = jax.tree.map(jnp.cos, PARAMS)
UNSPLIT = Storage(master_weight_bits=None)
NEEDLESS = {
    "flash_adam": lambda **how: lowmem.flash_adam(1e-2, **how),
    "flash_sgd": lambda **how: lowmem.flash_sgd(1e-2, momentum=0.9, **how),
    "flash_sgd plain": lambda **how: lowmem.flash_sgd(1e-2, **how),
    "flash_lion": lambda **how: lowmem.flash_lion(1e-2, weight_decay=0.0, **how),
    "stable_adamw": lambda **how: lowmem.stable_adamw(1e-2, weight_decay=0.0, **how),
    "adam_mini": lambda **how: lowmem.flash_adam_mini(
        1e-2, weight_decay=0.0, blocks=lowmem.blocks.Structure(default="whole"), **how
    ),
    "into moments": lambda **how: lowmem.accumulate_gradients(
        lowmem.flash_adam(1e-2, **how), 2, "moments"
    ),
    "chain": lambda **how: lowmem.chain(
        optax.clip_by_global_norm(1.0), lowmem.flash_adam(1e-2, **how)
    ),
}


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(NEEDLESS, ["float32", "bfloat16"]),
        list(zip(NEEDLESS, itertools.cycle(["float32", "bfloat16", "bfloat16", "float32"])))[::2],
    ),
)
def test_weights_that_are_not_needed(name, dtype):
    tx = NEEDLESS[name](**({} if dtype == "float32" else {"storage": UNSPLIT}))
    params, grads = optax.tree.cast((PARAMS, GRADS), dtype)
    state = tx.init(params)
    wanted = jax.jit(tx.update)(grads, state, params)
    assert_same(jax.jit(tx.update)(grads, state), wanted)


NEEDED = {
    "16-bit weights": (lowmem.flash_adam(1e-2), "bfloat16", "corrects the 16-bit weight 'w'"),
    "decay": (lowmem.flash_adamw(1e-2), "float32", "weight decay uses its value"),
    "l2": (lowmem.flash_sgd(1e-2, weight_decay=0.1), "float32", "weight decay uses its value"),
    "dtype": (
        lowmem.flash_adam(1e-2, storage=Storage(None, update_dtype="param")),
        "bfloat16",
        "update_dtype='param' uses its dtype",
    ),
}


@pytest.mark.parametrize(("tx", "dtype", "why"), NEEDED.values(), ids=NEEDED)
def test_weights_that_are_needed(tx, dtype, why):
    params, grads = optax.tree.cast(({"w": PARAMS["w"]}, {"w": GRADS["w"]}), dtype)
    with pytest.raises(ValueError, match=rf"not passing `params`.*Call tx\.update.*{why}"):
        tx.update(grads, tx.init(params))


def test_a_16_bit_scalar_alone():
    """The correction of a 0-d weight has the shape of a placeholder."""
    params = {"s": jnp.bfloat16(2)}
    tx = lowmem.flash_adam(1e-2)
    with pytest.raises(ValueError, match="corrects the 16-bit weight 's'"):
        tx.update(params, tx.init(params))
