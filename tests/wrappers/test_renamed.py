"""A state under other names is refused, also where its arrays would fit by position."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import DISTINCT, EVERYONE, WRAPPERS, Form

LEAF = jnp.ones((64, 64))
PARAMS = OrderedDict(a=LEAF, z=LEAF)
OTHERS = OrderedDict(z1=LEAF, b1=LEAF), [LEAF, LEAF], OrderedDict(z=LEAF, a=LEAF)
# the last two are JAX's own, of its newest and of its oldest version here
MESSAGE = (
    r"missing \['a', 'z'\], extra|order is \['z', 'a'\]|state of 'a', slot|structure error"
    "|Mismatch custom node data"
)
KEPT = {
    **{name: EVERYONE[name] for name in (*DISTINCT, *WRAPPERS)},
    "ema of sgd": lambda lr, form: lowmem.track_master_ema(optax.sgd(lr), 0.9),
    "noise": lambda lr, form: lowmem.gaussws_noise(optax.sgd(lr), "*"),
}


@pytest.mark.parametrize("name", KEPT)
def test_states_under_other_names(name):
    tx = KEPT[name](1e-3, Form())
    state = jax.eval_shape(tx.init, PARAMS)
    for params in OTHERS:
        for call in (tx.update, lambda *arguments: lowmem.step(tx, *arguments)):
            with pytest.raises(ValueError, match=MESSAGE):
                jax.eval_shape(call, params, state, params)
