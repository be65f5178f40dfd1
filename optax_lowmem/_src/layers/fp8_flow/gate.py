"""Activation functions, gated or not, that save their inputs in 8 bits."""

from functools import partial

import jax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.fp8_flow import kernels, storage
from optax_lowmem._src.layers.fp8_flow.storage import DEFAULT, ArrayFunction, Coded, Recipe


def gated_product(
    gate: jax.Array,
    up: jax.Array | None = None,
    *,
    activation: str = "silu",
    recipe: Recipe = DEFAULT,
) -> Coded:
    r"""Compute h = f(gate) \cdot up, quantized for an FP8 product.

    Args:
      gate: [..., n], f32 or 16 bits.
      up: array of the same shape and dtype; None: h = f(gate).
      activation: f: `silu`, `gelu` (tanh approximation), `gelu_exact` or `relu`.
      recipe: storage of gate and up for the backward pass.

    Returns:
      h: quantized with one scale per tensor; its `value` has the gate's dtype.

    Raises:
      ValueError: for another activation, or if gate and up differ in shape or dtype.

    Memory: for the backward pass, codes of gate and up and a 16-bit scale per group; 2.25 bytes for
    both in groups of 16. f(gate), which the paper also saves, is recomputed. With
    `Recipe(storage="bf16")`, gate and up are saved unquantized.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import fp8_flow
      >>> h = fp8_flow.gated_product(jnp.ones((2, 4)), jnp.full((2, 4), 2.0), activation="relu")
      >>> h.value.tolist()[0]
      [2.0, 2.0, 2.0, 2.0]
    """
    check_choice("activation", activation, kernels.ACTIVATIONS)
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        raise ValueError(
            f"gate is {gate.dtype}{list(gate.shape)} and up {up.dtype}{list(up.shape)}: "
            "they are multiplied elementwise, pass arrays of the same shape and dtype"
        )
    with jax.named_scope("activation"):
        given = (gate,) if up is None else (gate, up)
        if not recipe.quantizes:
            # not widened, so that 16-bit results equal those of jax.nn's functions bit for bit
            return storage.recomputed(ArrayFunction(kernels.gated, activation, wide=False), *given)
        return _gated(recipe, activation, *given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(recipe: Recipe, activation: str, *given: jax.Array) -> Coded:
    return _coded(recipe, activation, False, *given)[0]


@partial(numerics.first_order_only, static=3)
def _coded(recipe: Recipe, activation: str, keep: bool, *given: jax.Array) -> tuple[Coded, PyTree]:
    """Return the quantized product, and the residuals of the backward pass if `keep` is set."""
    size, exact = recipe.group_size, recipe.exact
    stored, absmax = kernels.store_gated(given, activation, size, exact, keep=keep or not exact)
    if exact:
        formula, lowers = ArrayFunction(kernels.gated, activation), kernels.lowers(activation)
        return storage.coded(recipe, formula, given, absmax, stored, keep, in_kernel=lowers)
    h = kernels.gated(activation, *(kernels.restore(one, size) for one in stored))
    codes, stored = storage.kept(kernels.quantized(h, absmax), stored)
    return Coded(h.astype(given[0].dtype), codes), stored


@partial(numerics.first_order_only, static=2)
def _gradients(
    recipe: Recipe, activation: str, saved: PyTree, g: jax.Array
) -> tuple[jax.Array, ...]:
    values = [kernels.restore(one, recipe.group_size) for one in saved]
    pull = jax.vjp(partial(kernels.gated, activation), *values)[1]
    return tuple(dx.astype(g.dtype) for dx in pull(numerics.widen(g)))


_gated.defvjp(
    lambda recipe, activation, *given: _coded(recipe, activation, True, *given),
    lambda recipe, activation, saved, g: _gradients(recipe, activation, saved, g.value),
)
