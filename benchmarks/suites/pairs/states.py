"""FlashOptim's Figure 4: NMSE of a state's moments through codecs, on the device, leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites.flashoptim.measure import EPS, GROUP, MOMENTS, StateErrors


def moments(state: Any) -> dict[str, list[Any]]:
    """Slot (`m`, `v`) -> its leaves that are whole groups of 32."""
    found: dict[str, list[Any]] = {}
    for part in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "_fields")):
        for field, slot in StateErrors.FIELDS.items():
            if hasattr(part, field):
                own = jax.tree.leaves(getattr(part, field))
                found[slot] = [x for x in own if x.shape[-1] % GROUP == 0]
    return found


def errors(state: Any) -> dict[str, np.ndarray]:
    """`nmse SLOT CODEC` -> [leaves]: sum (stored - x)^2 / sum x^2 of each leaf; NaN where x is 0.

    Slot "u" is Adam's direction m / (sqrt(v) + eps) with only v stored.
    """
    sizes = [x.size // GROUP for x in next(iter(moments(state).values()))]
    starts = np.cumsum([0, *sizes[:-1]])

    def over_leaves(rows: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.float64(rows), starts)

    found = {}
    for slot, (power, wrong) in jax.device_get(_powers(state)).items():
        of_leaves = over_leaves(power)
        signal = np.where(of_leaves > 0, of_leaves, np.nan)
        for name, rows in wrong.items():
            found[f"nmse {slot} {name}"] = np.float32(over_leaves(rows) / signal)
    return found


@jax.jit
def _powers(state: Any) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
    """Slot -> sums of squares in each group of 32: of the values, and of each codec's errors."""
    own = {slot: jnp.concatenate([x.reshape(-1, GROUP) for x in tensors])
           for slot, tensors in moments(state).items()}  # fmt: skip
    kept = {
        slot: {name: codec.decode(*codec.encode(x)) for name, codec in MOMENTS[slot].items()}
        for slot, x in own.items()
    }
    if "v" in own:

        def direction(v: jax.Array) -> jax.Array:
            return own["m"] / (jnp.sqrt(v) + EPS)

        kept["u"] = {name: direction(v) for name, v in kept["v"].items()}
        own["u"] = direction(own["v"])
    found = {}
    for slot, x in own.items():
        # squares of small moments are denormal, which a device may flush: in units of the largest
        unit = 1 / jnp.maximum(jnp.abs(x).max(), jnp.finfo(jnp.float32).tiny)
        power = {name: jnp.square((y - x) * unit).sum(-1) for name, y in kept[slot].items()}
        found[slot] = jnp.square(x * unit).sum(-1), power
    return found
