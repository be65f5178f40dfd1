"""FlashOptim's Figure 4: NMSE of a state's moments through its codecs, leaf by leaf."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem import codecs

GROUP = 32
# slot -> the field of optax's states, and codecs
MOMENTS = {
    "m": ("mu", {"linear": codecs.linear_paper(), "companded": codecs.softsign_paper()}),
    "v": ("nu", {"linear": codecs.linear_paper(signed=False), "companded": codecs.sqrt_paper()}),
}


def errors(state: Any) -> dict[str, np.ndarray]:
    """`nmse SLOT CODEC, paper` -> [leaves]: sum (stored - x)^2 / sum x^2; NaN where x is 0.

    Of the leaves that are whole groups of 32.
    """
    found = {}
    for slot, (field, of) in MOMENTS.items():
        leaves = jax.tree.leaves(optax.tree_utils.tree_get(state, field))
        whole = [x for x in leaves if x.shape[-1] % GROUP == 0]
        for name, codec in of.items() if whole else ():
            squares = jax.device_get([_squares(x, codec) for x in whole])
            wrong, power = np.array([[x.sum(dtype=np.float64) for x in one] for one in squares]).T
            nmse = wrong / np.where(power > 0, power, np.nan)
            found[f"nmse {slot} {name}, paper"] = np.float32(nmse)
    return found


@functools.partial(jax.jit, static_argnames="codec")
def _squares(x: jax.Array, codec: codecs.GroupCodec) -> tuple[jax.Array, jax.Array]:
    """Sums of squares in each group: of the codec's errors, and of the values."""
    groups = x.reshape(-1, GROUP)
    # squares of small moments are denormal, which a device may flush: in units of the largest
    unit = 1 / jnp.maximum(jnp.abs(groups).max(), jnp.finfo(jnp.float32).tiny)
    wrong = codec.decode(*codec.encode(groups)) - groups
    return jnp.square(wrong * unit).sum(-1), jnp.square(groups * unit).sum(-1)
