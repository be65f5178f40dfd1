"""The parts of a transformer layer between which arrays travel in 16 bits (appendix G.1)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_lowmem._src.fp8_flow.gate import gated_product
from optax_lowmem._src.fp8_flow.storage import DEFAULT, Coded, Recipe

Norm = Callable[[jax.Array], Coded]
Layer = Callable[[Any], jax.Array]


def project(layer: Layer, x: Coded) -> jax.Array:
    """A linear layer of what is quantized: of its value, if the layer takes no codes."""
    return layer(x if getattr(layer, "takes_codes", False) else x.value)


def before_attention(x: jax.Array, norm: Norm, layers: Sequence[Layer]) -> tuple[jax.Array, ...]:
    """Queries, keys and values: the normalised input, through a linear layer for each.

    Args:
      x: [..., n], what goes past the layer too.
      norm: `rms_norm` with its scale, or a module.
      layers: `Projection`, `Fp8Linear`; any other linear layer gets the normalised input itself.

    Memory: codes of x with scales of groups, and those of the normalised x, once for all layers.

    Example:
      >>> import functools, jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> norm = functools.partial(fp8_flow.rms_norm, scale=jnp.ones(8))
      >>> layers = [fp8_flow.Projection(jnp.ones((8, n))) for n in (8, 4, 4)]
      >>> [y.shape for y in fp8_flow.before_attention(jnp.ones((2, 8)), norm, layers)]
      [(2, 8), (2, 4), (2, 4)]
    """
    coded = norm(x)
    return tuple(project(layer, coded) for layer in layers)


def after_attention(mixed: jax.Array, residual: jax.Array, layer: Layer) -> jax.Array:
    """The output projection of attention, added to what went past it.

    Args:
      mixed: the attention's output, [..., k].
      residual: [..., n].
      layer: with keep="input" where attention keeps `mixed` itself (appendix D).
    """
    return residual + layer(mixed).astype(residual.dtype)


def mlp_residual(
    x: jax.Array,
    norm: Norm,
    gate: Layer,
    up: Layer | None,
    down: Layer,
    *,
    activation: str = "silu",
    recipe: Recipe = DEFAULT,
) -> jax.Array:
    """x + down(f(gate(norm(x))) * up(norm(x))).

    Args:
      x: [..., n].
      norm: as of `before_attention`.
      gate: linear layer n -> m, as of `before_attention`.
      up: n -> m; None: no product.
      down: m -> n.
      activation: f, as of `gated_product`.
      recipe: of the product.

    Memory: codes of x, gate(x) and up(x) with scales of groups; codes of the inputs of the linear
    layers.
    """
    coded = norm(x)
    of_up = None if up is None else project(up, coded)
    of_gate = project(gate, coded)
    h = gated_product(of_gate, of_up, activation=activation, recipe=recipe)
    return x + project(down, h).astype(x.dtype)
