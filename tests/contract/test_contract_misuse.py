"""Nestings that would leave corrections behind are refused or reported; right ones are not."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import CASES, Form, masters
from tests.tiers import in_turn, rows

NAMES = pytest.mark.parametrize("name", ["flash_adamw", "flash_lion", "optax.adan"])
LR = 1e-2


def _split(name: str) -> optax.GradientTransformationExtraArgs:
    return CASES[name].make(LR, Form())


def _bare(name: str) -> optax.GradientTransformationExtraArgs:
    return CASES[name].make(LR, Form(bits=None))


def _weights() -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters())


def _both(weights: Any) -> optax.LookaheadParams:
    return optax.LookaheadParams(weights, weights)


def _same(weights: Any) -> Any:
    return weights


WRONG = {
    "scale": (_same, lambda tx: optax.chain(tx, optax.scale(0.5))),
    "learning rate": (_same, lambda tx: optax.chain(tx, optax.scale_by_learning_rate(2.0))),
    "schedule_free": (_same, lambda tx: optax.contrib.schedule_free(tx, LR)),
    "lookahead": (_both, lambda tx: optax.lookahead(tx, 1, 0.5)),
}
RIGHT = {
    "alone": (_same, lambda split, bare: split),
    "chain": (_same, lambda split, bare: optax.chain(optax.clip_by_global_norm(1.0), split)),
    "lowmem.chain": (_same, lambda split, bare: lowmem.chain(optax.clip(1.0), split)),
    "masked": (_same, lambda split, bare: optax.masked(split, {"block": True, "norm": False})),
    "MultiSteps": (_same, lambda split, bare: optax.MultiSteps(split, 2)),
    "apply_if_finite": (_same, lambda split, bare: optax.apply_if_finite(split, 3)),
    "schedule_free": (
        _same,
        lambda split, bare: lowmem.split_master_weights(optax.contrib.schedule_free(bare, LR)),
    ),
    "lookahead": (
        _both,
        lambda split, bare: lowmem.split_master_weights(optax.lookahead(bare, 2, 0.5)),
    ),
}


@pytest.mark.parametrize(
    "wrapper, name", in_turn(WRONG, ["flash_adamw", "flash_lion", "optax.adan"])
)
def test_what_changes_updates_after_the_split_is_reported(name, wrapper):
    tree, wrap = WRONG[wrapper]
    warnings = lowmem.explain(wrap(_split(name)), tree(_weights())).warnings
    assert len(warnings) == 1
    assert "split" in warnings[0]


@NAMES
@pytest.mark.parametrize("wrapper", RIGHT)
def test_right_nestings_are_not_reported(name, wrapper):
    tree, wrap = RIGHT[wrapper]
    explanation = lowmem.explain(wrap(_split(name), _bare(name)), tree(_weights()))
    assert explanation.warnings == ()
    assert any(d.slot == "correction" and d.form for d in explanation.decisions)


@pytest.mark.parametrize("name", rows(["flash_adamw", "flash_lion", "optax.adan"], ["flash_lion"]))
def test_our_own_wrappers_refuse_a_split_inside(name):
    sgd = lowmem.codecs.softsign()
    compressed = lowmem.compress_state(_split(name), **{CASES[name].slots[0]: sgd})
    for tx, message in (
        (compressed, "split_master_weights"),
        (lowmem.split_master_weights(_split(name)), "master_weight_bits=None"),
        (lowmem.split_master_weights(optax.chain(optax.clip(1.0), _split(name))), "itself"),
        (lowmem.chain(_split(name), optax.scale(0.5)), "link 0"),
    ):
        with pytest.raises(ValueError, match=message):
            tx.init(_weights())
        with pytest.raises(ValueError, match=message):
            lowmem.init(tx, masters())


def test_a_scalar_fp16_weight_without_a_correction_is_its_own_master():
    params = {"s": jnp.float16(1.5), "w": jnp.full((4,), 2.5, jnp.float16)}
    state = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(None)).init(params)
    found = lowmem.master_params(params, state)
    assert float(found["s"]) == 1.5 and found["w"].tolist() == [2.5] * 4
