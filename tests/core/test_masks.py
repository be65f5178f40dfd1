"""Masks and dimension numbers: trees whose class is callable, functions, and what is neither."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Policy, Storage
from optax_lowmem._src.optim import context


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree that is called like a function, as Equinox modules are."""

    table: Any
    offset: Any

    def __call__(self, x):
        raise TypeError("the model was called")


PARAMS = Module(jnp.ones((64, 64)), jnp.ones((64, 64)))


def decays(make, name):
    """Return whether weight decay applies to each leaf, of the optimizer's plans."""
    return lambda mask: [plan.decays for plan in make(1e-3, **{name: mask}).engine.plans(PARAMS)]


def stored(make):
    """Return whether each leaf has a first moment in codes."""

    def of(mask):
        _, found = context.dry_run(make(Policy(mask=mask)), PARAMS)
        return [d.form is not None for d in found if d.slot == "mu"]

    return of


MASKS = {
    **{
        name: decays(record.make, "weight_decay_mask" if "muon" in name else "mask")
        for name, record in lowmem.OPTIMIZERS.items()
        if name != "flash_adam"
    },
    "Policy": stored(lambda policy: lowmem.flash_adamw(1e-3, storage=Storage(policy=policy))),
    "compress_state": stored(
        lambda policy: lowmem.compress_state(
            optax.adamw(1e-3), policy=policy, mu=lowmem.codecs.softsign()
        )
    ),
}
of_masks = pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)


@of_masks
def test_a_callable_tree_of_bools_is_a_mask(chosen):
    assert chosen(Module(True, False)) == [True, False]
    assert chosen(Module(np.True_, jnp.array(False))) == [True, False]
    assert chosen(lambda params: Module(False, True)) == [False, True]


def test_a_mask_decays_what_it_decays_in_optax():
    mask, grads = Module(True, False), jax.tree.map(jnp.zeros_like, PARAMS)
    for make in (optax.adamw, lowmem.flash_adamw):
        tx = make(0.1, weight_decay=0.1, mask=mask)
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates.table, -0.01, rtol=1e-6)
        assert (updates.offset == 0).all()


@of_masks
@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (lambda params: None, "the function of .*mask.* returned None: .*a tree of bools"),
        (Module(True, jnp.ones(64, bool)), r"'offset'.*one bool.*array of shape \(64,\)"),
        (Module("no decay", True), "a tree of bools or .*, not a name, got .*'no decay'"),
        (Module(lambda p: p, True), "'table'.* one bool .*, got <function"),
    ],
    ids=["None", "array", "string", "function"],
)
def test_what_is_no_mask_is_refused(chosen, mask, error):
    with pytest.raises(TypeError, match=error):
        chosen(mask)


def test_traced_masks_are_refused():
    traced = lambda keep: MASKS["Policy"](Module(keep, True)) and keep  # noqa: E731
    with pytest.raises(TypeError, match="'table'.* known when tracing"):
        jax.eval_shape(traced, True)


def test_a_callable_tree_of_dimension_numbers():
    dimensions = Module(optax.contrib.MuonDimensionNumbers(0, 1), None)
    for given in (dimensions, lambda params: dimensions):
        tx = lowmem.flash_muon(1e-3, muon_weight_dimension_numbers=given)
        assert [plan.matrices is not None for plan in tx.engine.plans(PARAMS)] == [True, False]
        state = lowmem.checkpoint.to_optax(tx, tx.init(PARAMS), PARAMS)
        assert optax.tree.get(state, "nu").offset.shape == (64, 64)
