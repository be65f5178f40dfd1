"""`tx.init` of shapes alone, as optax's own optimizers allow it: the state of the same layout."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import EVERYONE, POLICY, Form, codes_shape, masters
from tests.tiers import in_turn, rows

FROM_WEIGHTS = lowmem.compress_state(
    optax.contrib.schedule_free(optax.sgd(0.1), 0.1), z=lowmem.codecs.softsign(), policy=POLICY
)
MADE = {
    **EVERYONE,
    "a slot that starts from weights": lambda lr, form: FROM_WEIGHTS,
    "gaussws_noise": lambda lr, form: lowmem.gaussws_noise(lowmem.flash_adamw(lr), "block/w"),
}


def _layout(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("name, dtype", in_turn(MADE, ["float32", "bfloat16"]))
def test_init_of_shapes(name, dtype):
    tx, params = MADE[name](1e-3, Form()), optax.tree.cast(masters(), dtype)
    found = tx.init(_layout(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, tx.init(params))
    assert _layout(found) == _layout(jax.eval_shape(tx.init, params))


@pytest.mark.parametrize("name", rows(MADE, list(MADE)[::3]))
def test_init_of_shapes_with_a_sharding(name):
    """Slots lie where their weight will."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"block": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where)}}
    slots = [
        leaf
        for leaf in jax.tree.leaves(MADE[name](1e-3, Form()).init(params))
        if leaf.shape == codes_shape(name, (64, 64))
    ]
    assert slots or name == "flash_sgd plain"
    for leaf in slots:
        assert leaf.sharding.is_equivalent_to(where, 2)
