"""Tests of a checkpoint's format: other settings and other versions are refused."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.training.checkpoint import description
from tests import contract_cases as cases
from tests.checkpoint_cases import SMALL, abstract, adamw, assert_same_bits, scrambled, two_steps

# ---- what does not fit ---------------------------------------------------------------------------
LIKE = {
    "block": {"w": jax.ShapeDtypeStruct((3, 40), jnp.bfloat16)},
    "norm": jax.ShapeDtypeStruct((40,), jnp.bfloat16),
}
LINEAR = lowmem.codecs.linear(signed=False)
PLAIN = lowmem.Storage(mu=None, nu=None)
WITHOUT = {"block": LIKE["block"]}
MISFITS = {
    "codec": (
        adamw(), LIKE, adamw(nu=LINEAR), LIKE,
        r"slot nu of 'block/w' was saved as sqrt-uint8 in groups of 32 with f32 scales, and this "
        r"optimizer reads linear-uint8 .* Restore with nu=the codec sqrt-uint8, group_size=32 .*"
        r"checkpoint.to_optax, then checkpoint.from_optax. \(1 more like this\)",
    ),
    "scale": (
        adamw(), LIKE, adamw(mu=lowmem.codecs.softsign_paper()), LIKE,
        "slot mu of 'block/w' was saved as softsign-int8 .* e8m8 scales, .* softsign-int8-paper",
    ),
    # 40 elements are two groups of 32 and of 39 alike: the arrays do not tell
    "group size": (
        adamw(), LIKE, adamw(group_size=39), LIKE,
        "slot mu of 'block/w' was saved as softsign-int8 in groups of 32 .* in groups of 39 .*"
        "group_size=32",
    ),
    "f32 into int8": (
        adamw(mu=None), LIKE, adamw(), LIKE,
        "slot mu of 'block/w' was saved as uncompressed numbers, and this optimizer reads "
        "softsign-int8 .* Restore with Storage\\(mu=None\\)",
    ),
    "optax into int8": (
        optax.adamw(1e-3), LIKE, adamw(), LIKE, "lacks 'count', 'seed', 'mu/block/w' and .* more",
    ),
    "master width": (
        adamw(), LIKE, adamw(master_weight_bits=32), LIKE,
        "slot correction of 'block/w' was saved as master weights split by bits-24, and .* bits-32"
        r".* Restore with Storage\(master_weight_bits=24, split='bits'\)",
    ),
    "no masters": (
        adamw(master_weight_bits=None), LIKE, adamw(), LIKE,
        r"saved as no correction, .* Storage\(master_weight_bits=None\)",
    ),
    "split": (
        adamw(), LIKE, adamw(split="ulp"), LIKE, "split by bits-24, and .* split by ulp-24",
    ),
    "leaf": (
        adamw(), WITHOUT, adamw(), LIKE,
        "different tree of parameter arrays: it lacks 'norm', and has nothing in addition. Restore "
        "with the parameters that it was saved with",
    ),
    "shape": (
        adamw(), {**LIKE, "norm": jax.ShapeDtypeStruct((41,), jnp.bfloat16)}, adamw(), LIKE,
        r"parameter 'norm' was saved as bfloat16\[41\], but bfloat16\[40\] is expected",
    ),
    "dtype": (
        adamw(), abstract(cases.masters()), adamw(), LIKE,
        r"parameter 'block/w' was saved as float32\[3, 40\], but bfloat16\[3, 40\] is expected",
    ),
    "optimizer": (
        lowmem.flash_lion(1e-3, storage=SMALL), LIKE, adamw(), LIKE,
        "different tree of state arrays: it lacks 'nu/block/w', .* Restore with the optimizer",
    ),
    "blocks": (
        lowmem.flash_adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="whole")), LIKE,
        lowmem.flash_adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="elementwise")), LIKE,
        r"slot nu of 'block/w' was saved as uncompressed numbers, a value for each block of axes "
        r"\[0, 1\], .* reads uncompressed numbers, a value per element, .* Restore with the "
        "optimizer, and its blocks or min_dim_size_to_factor, that it was saved with",
    ),
    "rows and columns": (
        lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=2), LIKE,
        lowmem.flash_adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="whole")), LIKE,
        r"slot nu of 'block/w' was saved as uncompressed numbers, a value for each row and each "
        r"column of axes \[0, 1\], and .* a value for each block of axes \[0, 1\], .* Restore with "
        "the optimizer",
    ),
    "neither rows nor columns": (
        adamw(mu=None, nu=None), LIKE,
        lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=2, storage=PLAIN), LIKE,
        r"nu of 'block/w' was saved as uncompressed numbers, and .* a value for each row and each "
        r"column of axes \[0, 1\], .* Restore with the optimizer",
    ),
    "least size of rows and columns": (
        lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=2), LIKE,
        lowmem.flash_factored_adamw(1e-3), LIKE,
        r"each column of axes \[0, 1\], and this optimizer reads .*, a value per element, .* "
        "Restore with the optimizer, and its blocks or min_dim_size_to_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.filterwarnings("ignore:.*block")
def test_a_checkpoint_of_other_settings_is_refused(kind):
    old, old_params, new, params, message = MISFITS[kind]
    saved = checkpoint.metadata(old, old_params)
    checkpoint.check(saved, old, old_params)
    with pytest.raises(ValueError, match=message):
        checkpoint.check(saved, new, params)


def test_rounding_and_seed_may_change():
    saved = checkpoint.metadata(adamw(), LIKE)
    checkpoint.check(saved, adamw(rounding="nearest", seed=5), LIKE)


def test_restore_refuses_another_codec_before_it_reads(tmp_path):
    tx, (params, _), _ = two_steps(tmp_path)
    with pytest.raises(ValueError, match="slot nu of 'block/w' was saved as sqrt-uint8"):
        checkpoint.restore(tmp_path, adamw(nu=LINEAR), params)


def test_f32_files_never_become_int8(tmp_path):
    """Orbax casts them without a word."""
    tx, plain = adamw(), adamw(mu=None, nu=None)
    params, state = lowmem.init(plain, cases.masters())
    _, coded = lowmem.init(tx, cases.masters())
    items = checkpoint.args(tx, params, coded)
    items["opt_state"] = ocp.args.StandardSave(state)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**items))
    with pytest.raises(ValueError, match=r"'mu/block/w' was saved as float32\[3, 40\], but int8"):
        checkpoint.restore(tmp_path, tx, params)


def test_a_state_of_another_optimizer_is_not_saved():
    params, state = lowmem.init(adamw(mu=None), cases.masters())
    with pytest.raises(ValueError, match=r"not one of this optimizer .* float32\[3, 40\]"):
        checkpoint.args(adamw(), params, state)


def test_no_metadata_and_no_orbax(monkeypatch):
    with pytest.raises(ValueError, match="not a description of a checkpoint .* keys \\['a'\\]"):
        checkpoint.check({"a": 1}, adamw(), LIKE)
    for missing in (["xxhash"], ["orbax.checkpoint", "orbax"]):
        for name in missing:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"pip install orbax-checkpoint xxhash"):
            checkpoint.args(adamw(), LIKE, adamw().init(cases.masters()))
        monkeypatch.undo()


# ---- other versions, and managers of one's own ---------------------------------------------------
def test_a_checkpoint_without_a_description_is_refused(tmp_path):
    tx = adamw()
    params, state = lowmem.init(tx, cases.masters())
    items = {"params": ocp.args.StandardSave(params), "opt_state": ocp.args.StandardSave(state)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.Composite(**items))
    with pytest.raises(ValueError, match="no description of its format.*: restore it with Orbax"):
        checkpoint.restore(tmp_path, tx, params)


@pytest.mark.parametrize(
    "version, message",
    [
        (description.FORMAT_VERSION - 1, "version 2, .* reads 3 only: no release wrote the older"),
        (description.FORMAT_VERSION + 1, "version 4, .* reads 3 only: update optax_lowmem"),
    ],
    ids=["older", "newer"],
)
def test_another_version_is_refused(tmp_path, monkeypatch, version, message):
    tx = adamw()
    params, state = lowmem.init(tx, cases.masters())
    with monkeypatch.context() as other:
        other.setattr(description, "FORMAT_VERSION", version)
        described = checkpoint.metadata(tx, params)
        checkpoint.save(tmp_path, tx, params, state, step=0)
    for read in (
        lambda: checkpoint.check(described, tx, params),
        lambda: checkpoint.restore(tmp_path, tx, params),
    ):
        with pytest.raises(ValueError, match=message):
            read()


def test_a_manager_of_ones_own(tmp_path):
    tx = adamw()
    params, state = scrambled(lowmem.init(tx, cases.masters()))
    with ocp.CheckpointManager(tmp_path) as manager:
        items = checkpoint.args(tx, params, state)
        manager.save(9, args=ocp.args.Composite(**items, data=ocp.args.JsonSave({"batch": 7})))
        manager.wait_until_finished()
        restored = checkpoint.restore_from(manager, tx, abstract(params))
        data = manager.restore(9, args=ocp.args.Composite(data=ocp.args.JsonRestore()))
    assert_same_bits(restored, (params, state))
    assert data["data"] == {"batch": 7}


# ---- descriptions that lack something ------------------------------------------------------------
def without(described, *path):
    """A copy of a description with one part less."""
    copy = json.loads(json.dumps(described))
    node = copy
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return copy


@pytest.mark.parametrize(
    "path",
    [
        ("slots",), ("params",), ("state",),
        ("slots", "norm"), ("slots", "block/w"), ("slots", "block/w", "nu"),
        ("slots", "block/w", "correction"), ("slots", "block/w", "correction", "split"),
        ("slots", "block/w", "nu", "codec"), ("slots", "block/w", "nu", "scale"),
        ("slots", "block/w", "nu", "group_size"),
    ],
    ids="/".join,
)  # fmt: skip
def test_a_description_that_lacks_something_is_refused(path):
    saved = without(checkpoint.metadata(adamw(), LIKE), *path)
    for tx in (adamw(), adamw(nu=LINEAR)):
        with pytest.raises(ValueError, match=f"the description .*lacks .*{path[-1]}"):
            checkpoint.check(saved, tx, LIKE)


def test_a_description_with_null_for_slots_is_not_trusted(tmp_path):
    tx, (params, _), _ = two_steps(tmp_path)
    path = tmp_path / "2" / "optax_lowmem" / "metadata"
    saved = {**json.loads(path.read_text()), "slots": None}
    del saved["checksums"]
    path.write_text(json.dumps(saved))
    for sums in tmp_path.rglob("checksums.json"):
        sums.unlink()
    with pytest.raises(ValueError, match="the description .*lacks 'slots'"):
        checkpoint.restore(tmp_path, adamw(nu=LINEAR), params)
