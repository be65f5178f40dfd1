"""`tx.init` of shapes alone, as optax's own optimizers allow it: the state of the same layout."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import CASES, POLICY, Form, masters

SOFTSIGN = lowmem.codecs.softsign()


def _flash(**options):
    return lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=POLICY, **options))


MADE = {
    **{name: lambda case=case: case.make(1e-3, Form()) for name, case in CASES.items()},
    **{
        f"{name} bare": lambda case=case: case.make(1e-3, Form(bits=None))
        for name, case in CASES.items()
        if name.startswith("optax.")
    },
    "scale_by_flash_adam": lowmem.scale_by_flash_adam,
    "scale_by_flash_lion": lowmem.scale_by_flash_lion,
    "flash_trace": lambda: lowmem.flash_trace(0.9),
    "flash_sgd plain": lambda: lowmem.flash_sgd(1e-3),
    "compand_momentum": lambda: lowmem.compand_momentum(optax.adam(1e-3), policy=POLICY),
    "compand_momentum adan": lambda: lowmem.compand_momentum(optax.adan(1e-3), policy=POLICY),
    "sqrt_variance_quant": lambda: lowmem.sqrt_variance_quant(optax.amsgrad(1e-3), policy=POLICY),
    "links": lambda: optax.chain(lowmem.compand_momentum(0.9), lowmem.sqrt_variance_quant(0.9)),
    "a slot that starts from weights": lambda: lowmem.compress_state(
        optax.contrib.schedule_free(optax.sgd(0.1), 0.1), z=SOFTSIGN, policy=POLICY
    ),
    "split_master_weights": lambda: lowmem.split_master_weights(optax.contrib.muon(0.02)),
    "track_master_ema": lambda: lowmem.track_master_ema(_flash(), 0.9),
    "accumulate_gradients": lambda: lowmem.accumulate_gradients(_flash(), 2, "bfloat16"),
    "accumulate_gradients moments": lambda: lowmem.accumulate_gradients(_flash(), 2, "moments"),
    "update_clipping": lambda: lowmem.update_clipping(optax.adamw(1e-3), b2=0.999, eps=1e-8),
    "per_tensor_loss_scale": lambda: lowmem.per_tensor_loss_scale(_flash(), 2.0),
    "gaussws_noise": lambda: lowmem.gaussws_noise(_flash(), "block/w"),
    "chain": lambda: lowmem.chain(optax.clip_by_global_norm(1.0), _flash()),
    "inject_hyperparams": lambda: lowmem.inject_hyperparams(lowmem.flash_adamw)(1e-3),
}


def _layout(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MADE)
def test_init_of_shapes(name, dtype):
    tx, params = MADE[name](), optax.tree.cast(masters(), dtype)
    found = tx.init(_layout(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, tx.init(params))
    assert _layout(found) == _layout(jax.eval_shape(tx.init, params))


@pytest.mark.parametrize("name", MADE)
def test_init_of_shapes_with_a_sharding(name):
    """Slots lie where their weight will."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"block": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where)}}
    slots = [leaf for leaf in jax.tree.leaves(MADE[name]().init(params)) if leaf.shape == (64, 64)]
    assert slots or "plain" in name
    for leaf in slots:
        assert leaf.sharding.is_equivalent_to(where, 2)
