"""The FP8 precision flow for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.layers.fp8_flow import gate, norm
from optax_lowmem._src.layers.fp8_flow.linear import QuantizedKernel, apply_layer
from optax_lowmem._src.layers.fp8_flow.storage import DEFAULT, Coded, Recipe, value_of


class Fp8Linear(nnx.Linear):
    """`nnx.Linear` with the same parameters, whose three products run in FP8.

    The input is an array, or a `Coded` from a norm or an activation function of this flow.

    Beside the arguments of `nnx.Linear` it has `keep` and `recipe` of `fp8_flow.linear`. A
    `dot_general`, given here or by `layers.convert`, computes the product instead, from the value
    of a `Coded`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> norm = layers.Fp8RMSNorm(8)
      >>> layers.Fp8Linear(8, 3, rngs=nnx.Rngs(0))(norm(jnp.ones((2, 8)))).shape
      (2, 3)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        keep: str = "codes",
        recipe: Recipe = DEFAULT,
        **more: Any,
    ):
        super().__init__(in_features, out_features, **more)
        self.keep, self.recipe = keep, recipe

    @property
    def takes_codes(self) -> bool:
        """Return whether `fp8_flow.linear` computes the product, not a given `dot_general`."""
        return self.dot_general is lax.dot_general

    def __call__(
        self,
        x: jax.Array | Coded,
        absmax: jax.Array | None = None,
        codes: QuantizedKernel | None = None,
    ) -> jax.Array:
        """Apply the layer to [..., in]; the result is [..., out].

        `absmax` and `codes` are `kernel_absmax` and `kernel_codes` of `fp8_flow.linear`.
        """
        if not self.takes_codes:
            return super().__call__(value_of(x))
        kernel = self.kernel[...]
        bias = self.bias[...] if self.bias is not None else None
        if isinstance(x, Coded):
            kernel = kernel.astype(x.value.dtype)
        else:
            x, kernel = self.promote_dtype((x, kernel), dtype=self.dtype)
        return apply_layer(self, x, kernel, bias, absmax, codes)


class Fp8RMSNorm(nnx.Module):
    """`fp8_flow.rms_norm` with a learned `scale`.

    Args:
      num_features: size of the last axis.
      epsilon: added under the square root.
      dtype: dtype of the result; None: that of the input.
      param_dtype: dtype of the scale.
      recipe: storage of the input for the backward pass.
      rngs: not used: the scale is initialised to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> layers.Fp8RMSNorm(32)(3 * jnp.ones((2, 32))).value.round(3).max()
      Array(1., dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        recipe: Recipe = DEFAULT,
        rngs: nnx.Rngs | None = None,
    ):
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        self.epsilon, self.dtype, self.recipe = epsilon, dtype, recipe

    def __call__(self, x: jax.Array) -> Coded:
        """Normalise x for linear layers of this flow; `.value` of the result is the array."""
        x = x.astype(self.dtype or x.dtype)
        return norm.rms_norm(x, self.scale[...], eps=self.epsilon, recipe=self.recipe)


class Fp8LayerNorm(nnx.Module):
    """`fp8_flow.layer_norm` with a learned `scale` and `bias`.

    Args:
      num_features: size of the last axis.
      epsilon: added under the square root.
      use_bias: whether there is a bias.
      dtype: dtype of the result; None: that of the input.
      param_dtype: dtype of scale and bias.
      recipe: storage of the input for the backward pass.
      rngs: not used: the scale is initialised to 1, the bias to 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> layers.Fp8LayerNorm(32)(3 * jnp.ones((2, 32))).value.max()
      Array(0., dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        recipe: Recipe = DEFAULT,
        rngs: nnx.Rngs | None = None,
    ):
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        zeros = jnp.zeros(num_features, param_dtype)
        self.bias = nnx.Param(zeros) if use_bias else nnx.data(None)
        self.epsilon, self.dtype, self.recipe = epsilon, dtype, recipe

    def __call__(self, x: jax.Array) -> Coded:
        """Normalise x for linear layers of this flow; `.value` of the result is the array."""
        x = x.astype(self.dtype or x.dtype)
        bias = None if self.bias is None else self.bias[...]
        scale, eps = self.scale[...], self.epsilon
        return norm.layer_norm(x, scale, bias, eps=eps, recipe=self.recipe)


class Fp8GatedProduct(nnx.Module):
    """`fp8_flow.gated_product` with these arguments, as a module without parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> layers.Fp8GatedProduct()(jnp.zeros((2, 32)), jnp.ones((2, 32))).value.shape
      (2, 32)
    """

    def __init__(self, activation: str = "silu", *, recipe: Recipe = DEFAULT):
        self.activation, self.recipe = activation, recipe

    def __call__(self, of_gate: jax.Array, up: jax.Array | None = None) -> Coded:
        """Compute the product for a linear layer of this flow; its `.value` is the array."""
        return gate.gated_product(of_gate, up, activation=self.activation, recipe=self.recipe)
