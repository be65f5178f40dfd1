"""Precision of weights that would be lost without a word: refused, and shown by explain."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint, codecs

WITHOUT_SPLIT = {
    "direction": lambda: optax.chain(lowmem.scale_by_flash_adam(), optax.scale(-1e-4)),
    "compressed": lambda: lowmem.compress_state(optax.adan(1e-4), m=codecs.softsign()),
    "optax": lambda: optax.adam(1e-4),
}


def masters():
    return {"b": jnp.full(8, 0.3), "w": jnp.full((8, 64), 0.1)}


@pytest.mark.parametrize("kind", WITHOUT_SPLIT)
def test_init_refuses_to_round_what_nobody_splits(kind):
    tx = WITHOUT_SPLIT[kind]()
    with pytest.raises(ValueError, match="'b' and 1 more would be rounded from float32 to bfloat"):
        lowmem.init(tx, masters())
    weights, _ = lowmem.init(tx, masters(), jnp.float32)
    assert weights["w"].dtype == jnp.float32
    weights, _ = lowmem.init(tx, masters(), allow_rounding=True)
    assert weights["w"].dtype == jnp.bfloat16
    kept, state = lowmem.init(lowmem.split_master_weights(tx), masters())
    near = lowmem.master_params(kept, state)["w"]
    assert jnp.abs(near / jnp.float32(0.1) - 1).max() < 2**-16


def test_a_storage_without_masters_says_so_itself():
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(master_weight_bits=None))
    assert lowmem.init(tx, masters())[0]["w"].dtype == jnp.bfloat16


def test_a_leaf_that_a_mask_leaves_out():
    """Named; a dtype that keeps it in f32 is enough."""
    tx = optax.masked(lowmem.flash_adamw(1e-3), {"b": False, "w": True})
    with pytest.raises(ValueError, match="^'b' would be rounded"):
        lowmem.init(tx, masters())
    weights, _ = lowmem.init(
        tx, masters(), lambda path, leaf: jnp.float32 if path == "b" else jnp.bfloat16
    )
    assert (weights["b"].dtype, weights["w"].dtype) == (jnp.float32, jnp.bfloat16)


def test_what_is_in_16_bits_already_is_not_rounded():
    given = jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters())
    assert lowmem.init(optax.adam(1e-3), given)[0]["w"] is given["w"]


def test_from_optax_as_init():
    plain = optax.adan(1e-4)
    state = plain.init(masters())
    tx = WITHOUT_SPLIT["compressed"]()
    with pytest.raises(ValueError, match="would be rounded"):
        checkpoint.from_optax(tx, state, masters())
    weights, _ = checkpoint.from_optax(tx, state, masters(), allow_rounding=True)
    assert weights["w"].dtype == jnp.bfloat16
    kept, _ = checkpoint.from_optax(tx, state, masters(), keep_f32=("*",))
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(kept))


def test_flax_as_init():
    flax = pytest.importorskip("optax_lowmem.flax")
    create = flax.TrainState.create
    given = {"apply_fn": None, "params": masters(), "tx": optax.adam(1e-3), "dtype": jnp.bfloat16}
    with pytest.raises(ValueError, match="would be rounded"):
        create(**given)
    assert create(**given, allow_rounding=True).params["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", WITHOUT_SPLIT)
def test_explain_has_a_row_for_each_leaf_without_a_correction(kind):
    params = {**masters(), "w": jnp.ones((8, 64), jnp.bfloat16), "h": jnp.ones(3, jnp.float16)}
    found = lowmem.explain(WITHOUT_SPLIT[kind](), params)
    rows = {d.path: d for d in found.decisions if d.slot == "correction"}
    assert set(rows) == {"h", "w"}
    assert all(d.form is None and d.reason.startswith("none: ") for d in rows.values())
    assert any("correction" in line and "none: " in line for line in str(found).splitlines())
    described = checkpoint.metadata(WITHOUT_SPLIT[kind](), params)["slots"]
    assert not any("correction" in slots for slots in described.values())


CHANGED = {
    "wrapped": (lambda p: {"params": p}, "no correction of weight 'params/b', but one of 'b'"),
    "renamed": (lambda p: {"b": p["b"], "v": p["w"]}, "of weight 'v', but one of 'w'"),
    "f32": (lambda p: {**p, "w": p["w"].astype(jnp.float32)}, "weight 'w' is float32"),
    "f16": (lambda p: {**p, "w": p["w"].astype(jnp.float16)}, "weight 'w' is float16"),
    "shape": (lambda p: {**p, "w": p["w"].T}, "weight 'w' is bfloat16.64, 8."),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_masters_of_other_weights_are_refused(kind, tmp_path):
    """Renamed, wrapped, cast or reshaped: what came back were 16-bit numbers in f32."""
    changed, words = CHANGED[kind]
    weights, state = lowmem.init(lowmem.flash_adamw(1e-3), masters())
    for read in (
        lambda: lowmem.master_params(changed(weights), state),
        lambda: jax.eval_shape(lowmem.master_params, changed(weights), state),
        lambda: checkpoint.export(tmp_path / "w.safetensors", changed(weights), state),
    ):
        with pytest.raises(ValueError, match=words):
            read()
    assert not list(tmp_path.iterdir())


def test_masters_of_a_part_of_the_weights():
    """A part under its own names, and weights that have no correction, are what they are."""
    weights, state = lowmem.init(lowmem.flash_adamw(1e-3), masters())
    part = lowmem.master_params({"w": weights["w"]}, state)
    assert jnp.abs(part["w"] / jnp.float32(0.1) - 1).max() < 2**-16
    weights, state = lowmem.init(optax.adam(1e-3), masters(), allow_rounding=True)
    assert lowmem.master_params(weights, state)["w"].dtype == jnp.float32
