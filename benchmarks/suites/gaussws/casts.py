"""Casts of trained weights to formats of a few bits, and what they do to the loss (Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem import gaussws
from optax_lowmem.gaussws.parts import chooser

# (exponent, mantissa) bits: Table 2's rows of b_t = 3, 4, 5, 6, and others of 4 to 8 bits
FORMATS = ((2, 1), (3, 2), (3, 3), (3, 4), (3, 1), (2, 3), (4, 3))
CLEAN, SAFE = "clean", "safe"


def name_of(exponent: int, mantissa: int) -> str:
    return f"e{exponent}m{mantissa}"


def of_parts(weights: Any, parts: str, cast: Callable[[jax.Array], jax.Array]) -> Any:
    """The weights with the leaves of some parts cast."""
    chosen = chooser(parts)

    def leaf(keys: Any, w: jax.Array) -> jax.Array:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return cast(w) if chosen(path, w) else w

    return jax.tree_util.tree_map_with_path(leaf, weights)


def losses(
    weights: Any, parts: Mapping[str, Mapping[str, jax.Array]], loss: Callable[[Any], float]
) -> dict[str, float]:
    """Losses of f32 weights as they are, and of their parts in the formats.

    Args:
      weights: without noise.
      parts: which to cast -> b_t by path, for the safe formats of Table 2; of a control those of a
        run with noise.
      loss: of weights in f32.

    Returns:
      `clean`, `all safe`, `all e3m4`, ... -> loss.
    """
    found = {CLEAN: loss(weights)}
    for name, bits in parts.items():
        found[f"{name} {SAFE}"] = loss(gaussws.safe_cast(weights, bits))
        for exponent, mantissa in FORMATS:
            to = (exponent, mantissa)
            cast = of_parts(weights, name, lambda w, to=to: gaussws.fake_cast(w, to))
            found[f"{name} {name_of(*to)}"] = loss(cast)
    return found


def stored_as(like: Any) -> Callable[[Any], Any]:
    """f32 weights -> in the dtypes that an evaluation was compiled for; formats of 7 mantissa bits
    at most are exact in bf16."""
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, like)
    return lambda weights: jax.tree.map(lambda w, d: jnp.asarray(w, d), weights, dtypes)
