"""The FP8 precision flow for Flax Linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from optax_lowmem._src.layers.fp8_flow import gate, norm
from optax_lowmem._src.layers.fp8_flow.linear import QuantizedKernel, apply_layer
from optax_lowmem._src.layers.fp8_flow.storage import DEFAULT, Coded, Recipe, value_of


class Fp8Dense(nn.Dense):
    """`nn.Dense` with the same parameters and names, whose three products run in FP8.

    The input is an array, or a `Coded` from a norm or an activation function of this flow.

    Beside the attributes of `nn.Dense` it has `keep` and `recipe` of `fp8_flow.linear`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> y, variables = layers.Fp8Dense(3).init_with_output(jax.random.key(0), jnp.ones((2, 8)))
      >>> y.shape, variables["params"]["kernel"].shape
      ((2, 3), (8, 3))
    """

    keep: str = "codes"
    recipe: Recipe = DEFAULT

    @property
    def takes_codes(self) -> bool:
        """Return whether `fp8_flow.linear` computes the product, not a given `dot_general`."""
        return self.dot_general is None and self.dot_general_cls is None

    @nn.compact
    def __call__(
        self,
        x: jax.Array | Coded,
        absmax: jax.Array | None = None,
        codes: QuantizedKernel | None = None,
    ) -> jax.Array:
        """Apply the layer to [..., n]; the result is [..., features].

        `absmax` and `codes` are `kernel_absmax` and `kernel_codes` of `fp8_flow.linear`.
        """
        if not self.takes_codes:
            return super().__call__(value_of(x))
        inputs = value_of(x).shape[-1]
        kernel = self.param("kernel", self.kernel_init, (inputs, self.features), self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        given: Any = x
        if isinstance(x, Coded):
            kernel = kernel.astype(x.value.dtype)
        else:
            promoted: Any = self.promote_dtype(x, kernel, dtype=self.dtype)
            given, kernel = promoted
        return apply_layer(self, given, kernel, bias, absmax, codes)


class Fp8RMSNorm(nn.Module):
    """`fp8_flow.rms_norm` with a learned `scale`.

    Its attributes are the arguments of `layers.Fp8RMSNorm`, and the initializer of the scale.
    """

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer = nn.initializers.ones
    recipe: Recipe = DEFAULT

    @nn.compact
    def __call__(self, x: jax.Array) -> Coded:
        """Normalise x for linear layers of this flow; `.value` of the result is the array."""
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        x = x.astype(self.dtype or x.dtype)
        return norm.rms_norm(x, scale, eps=self.epsilon, recipe=self.recipe)


class Fp8LayerNorm(nn.Module):
    """`fp8_flow.layer_norm` with a learned `scale` and `bias`.

    Its attributes are the arguments of `layers.Fp8LayerNorm`, and the initializers.
    """

    epsilon: float = 1e-6
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer = nn.initializers.ones
    bias_init: Initializer = nn.initializers.zeros
    recipe: Recipe = DEFAULT

    @nn.compact
    def __call__(self, x: jax.Array) -> Coded:
        """Normalise x for linear layers of this flow; `.value` of the result is the array."""
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        x = x.astype(self.dtype or x.dtype)
        return norm.layer_norm(x, scale, bias, eps=self.epsilon, recipe=self.recipe)


class Fp8GatedProduct(nn.Module):
    """`fp8_flow.gated_product`, whose arguments are its attributes, without parameters."""

    activation: str = "silu"
    recipe: Recipe = DEFAULT

    def __call__(self, of_gate: jax.Array, up: jax.Array | None = None) -> Coded:
        """Compute the product for a linear layer of this flow; its `.value` is the array."""
        return gate.gated_product(of_gate, up, activation=self.activation, recipe=self.recipe)
